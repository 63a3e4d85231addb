"""How many wrong queries get a reward of 1: mutants of the references of a tasks file.

    python tests/query_mutants.py TASKS.jsonl [NUM_TASKS]

A mutant is the reference with one small mistake, made here by rules on its tokens. These rules know nothing of how
colbench/ draws its databases or of the mistakes that it looks for itself (colbench/sql_mutants.py).
A mutant is wrong if it gives other rows on one of many further databases, most of them larger than the hidden ones.
These keep what the domain tells an agent: keys lead somewhere, names of a table differ, a status is stored in one way,
no date lies behind this year, amounts are positive.
"""
import collections
import json
import pathlib
import random
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from colbench import sql  # noqa: E402

TOKEN = re.compile(r"'(?:[^']|'')*'|\w+(?:\.\w+)?|<>|<=|>=|[^\w\s]")
COMPARISONS = (">", ">=", "<", "<=", "=", "<>")
AGGREGATES = ("COUNT", "SUM", "AVG", "MAX", "MIN")
NUM_FURTHER = 45


# ---------------------------------------------------------------------------------------------------------------------
# what a task says of its tables

def columns_of(schema):
    """{table: {column: type}}, in the order of the schema."""
    tables = {}
    for table, body in re.findall(r"CREATE TABLE (\w+)\((.*?)\);", schema):
        tables[table] = dict(column.split() for column in body.split(", "))
    return tables


def this_year(task):
    """The newest year of the example, which is what a look shows."""
    children = list(task["databases"][0].values())[1]
    return max(int(cell[:4]) for row in children for cell in row[4:6] if cell)


def statuses_of(task):
    parents = [row for tables in task["databases"] for row in list(tables.values())[0]]
    return sorted({row[2] for row in parents if row[2] is not None})


# ---------------------------------------------------------------------------------------------------------------------
# mutants

class Query:
    """A reference as a list of tokens; each method gives new queries, as texts."""

    def __init__(self, task):
        self.tokens = TOKEN.findall(task["ground_truth"])
        self.columns = columns_of(task["schema"])
        self.aliases = {}
        for i, token in enumerate(self.tokens):
            if token in ("FROM", "JOIN"):
                self.aliases[self.tokens[i + 2]] = self.tokens[i + 1]
        self.year, self.statuses = this_year(task), statuses_of(task)

    def with_tokens(self, begin, end, *new):
        """The query with other tokens in place of begin:end."""
        return " ".join([*self.tokens[:begin], *new, *self.tokens[end:]])

    def where(self, *words):
        return [i for i, token in enumerate(self.tokens) if token in words]

    def clause(self, i):
        """The keyword of the clause that token i stands in."""
        before = [token for token in self.tokens[:i + 1] if token in
                  ("SELECT", "FROM", "WHERE", "GROUP", "HAVING", "ORDER", "LIMIT")]
        return before[-1]

    def conjuncts(self):
        """(begin, end) of each condition of WHERE and HAVING."""
        ends = [i for i, token in enumerate(self.tokens) if token in ("WHERE", "AND", "GROUP", "HAVING", "ORDER")]
        ends.append(len(self.tokens))
        return [(begin + 1, end) for begin, end in zip(ends, ends[1:])
                if self.tokens[begin] in ("WHERE", "AND", "HAVING")]

    def order_terms(self):
        """(begin, end) of each term of ORDER BY, and where the clause ends."""
        if not self.where("ORDER"):
            return [], len(self.tokens)
        begin, stop = self.where("ORDER")[0] + 2, (self.where("LIMIT") or [len(self.tokens)])[0]
        terms, depth = [], 0
        for i in range(begin, stop):
            depth += {"(": 1, ")": -1}.get(self.tokens[i], 0)
            if self.tokens[i] == "," and not depth:
                terms.append((begin, i))
                begin = i + 1
        return [*terms, (begin, stop)], stop

    def siblings(self, column):
        """Columns of the same table and type as alias.column."""
        alias, _, name = column.partition(".")
        types = self.columns[self.aliases[alias]]
        return [f"{alias}.{other}" for other in types if other != name and types[other] == types[name]]


def numbers_and_comparisons(query):
    for i in query.where(*COMPARISONS):
        if query.clause(i) not in ("WHERE", "HAVING"):
            continue
        for other in COMPARISONS:
            if other != query.tokens[i]:
                yield "comparison", query.with_tokens(i, i + 1, other)
        if query.tokens[i + 1].isdigit():
            for step in (-1, 1):
                yield "threshold ±1", query.with_tokens(i + 1, i + 2, str(int(query.tokens[i + 1]) + step))
            for step in (-10, 10):
                yield "threshold ±10", query.with_tokens(i + 1, i + 2, str(int(query.tokens[i + 1]) + step))


def limits(query):
    for i in query.where("LIMIT"):
        for step in (-1, 1):
            yield f"limit {step:+}", query.with_tokens(i + 1, i + 2, str(int(query.tokens[i + 1]) + step))
        yield "limit dropped", query.with_tokens(i, i + 2)
    if not query.where("LIMIT"):
        for number in ("1", "3", "5", "10"):
            yield "limit added", query.with_tokens(len(query.tokens), len(query.tokens), "LIMIT", number)


def aggregates(query):
    for i in query.where(*AGGREGATES):
        begin = i + 3 if query.tokens[i + 2] == "DISTINCT" else i + 2
        for other in AGGREGATES:
            if other != query.tokens[i] and query.tokens[begin] != "*":
                yield f"aggregate in {query.clause(i)}", query.with_tokens(i, i + 1, other)
        if begin == i + 3:
            yield "distinct", query.with_tokens(i + 2, i + 3)
        elif query.tokens[begin] != "*":
            yield "distinct", query.with_tokens(i + 2, i + 2, "DISTINCT")
            if query.tokens[begin] != "COALESCE":
                yield "missing amount as zero", query.with_tokens(begin, begin + 1, "COALESCE", "(",
                                                                  query.tokens[begin], ", 0)")
    for i in query.where("COALESCE"):
        yield "missing amount left out", query.with_tokens(i, i + 6, query.tokens[i + 2])
    yield "distinct rows", query.with_tokens(1, 1, "DISTINCT")


def orders(query):
    terms, stop = query.order_terms()
    for number, (begin, end) in enumerate(terms):
        turned = query.tokens[begin:end - 1] if query.tokens[end - 1] == "DESC" else [*query.tokens[begin:end], "DESC"]
        yield "order turned", query.with_tokens(begin, end, *turned)
        if number:
            yield "tie-break dropped", query.with_tokens(begin - 1, end)
            yield "tie-break by id", query.with_tokens(begin, end, query.tokens[begin].replace("name", "id"))
    if terms:
        yield "order dropped", query.with_tokens(query.where("ORDER")[0], stop)


def columns(query):
    for i, token in enumerate(query.tokens):
        if "." in token and not token.startswith("'") and query.clause(i) != "FROM":
            for other in query.siblings(token):
                yield "other column", query.with_tokens(i, i + 1, other)


def conditions(query):
    for begin, end in query.conjuncts():
        condition = query.tokens[begin:end]
        yield "condition turned", query.with_tokens(begin, end, "NOT", "(", *condition, ")")
        if query.clause(begin) == "HAVING":
            yield "having dropped", query.with_tokens(begin - 1, end)
            yield "sum missing", query.with_tokens(begin, end, "(", *condition, "OR", *condition[:4], "IS NULL )")
            continue
        yield "condition dropped", query.with_tokens(begin, end, "1")
        column = condition[0]
        kind = "date" if "LIKE" in condition else "status" if column.endswith(".status") else "amount"
        yield f"{kind} missing", query.with_tokens(begin, end, "(", *condition, "OR", column, "IS NULL )")


def dates(query):
    year = query.year
    for begin, end in query.conjuncts():
        column = query.tokens[begin]
        if query.tokens[begin + 1] != "LIKE":
            continue
        table = query.aliases[column.partition(".")[0]]
        for kind, condition in (
                ("without Jan 1", f"{column} > '{year}-01-01' AND {column} <= '{year}-12-31'"),
                ("without Dec 31", f"{column} >= '{year}-01-01' AND {column} < '{year}-12-31'"),
                ("with Dec 31 before", f"{column} >= '{year - 1}-12-31' AND {column} <= '{year}-12-31'"),
                ("until now", f"{column} <= '{year}-12-31'"),
                ("other year", f"{column} LIKE '{year - 1}%'"), ("other year", f"{column} LIKE '{year - 2}%'"),
                ("two years", f"{column} >= '{year - 1}-01-01'"),
                ("half a year", f"{column} >= '{year}-07-01'"),
                ("months with one digit", f"{column} LIKE '{year}-0%'"),
                ("newest year", f"substr({column}, 1, 4) = (SELECT substr(MAX({column[2:]}), 1, 4) FROM {table})"),
                ("newest year", f"{column} LIKE (SELECT strftime('%Y', MAX({column[2:]})) FROM {table}) || '%'")):
            yield kind, query.with_tokens(begin, end, condition)


def statuses(query):
    for i, token in enumerate(query.tokens):
        if token.startswith("'") and "%" not in token:
            for other in query.statuses:
                if f"'{other}'" != token:
                    yield "other status", query.with_tokens(i, i + 1, f"'{other}'")
                    both = f"IN ({token}, '{other}')"
                    yield "one status more", query.with_tokens(i - 1, i + 1, both)
                    yield "all but one status", query.with_tokens(i - 1, i + 1, f"<> '{other}'")


def groups_and_joins(query):
    for i in query.where("GROUP"):
        alias = query.tokens[i + 2].partition(".")[0]
        for other in ("name", "status"):
            if other in query.columns[query.aliases[alias]]:
                yield f"grouped by {other}", query.with_tokens(i + 2, i + 3, f"{alias}.{other}")
        yield "not grouped", query.with_tokens(i, i + 3)
    for i in query.where("JOIN"):
        yield "left join", query.with_tokens(i, i, "LEFT")


def rounding(query):
    for i in query.where("ROUND"):
        end = max(query.where(")"))
        comma = max(j for j in query.where(",") if j < query.where("FROM")[0])
        digits = int(query.tokens[comma + 1])
        for other in {digits + 1, digits - 1} - {-1}:
            yield "digits ±1", query.with_tokens(comma + 1, comma + 2, str(other))
        end = query.where("FROM")[0]
        yield "not rounded", query.with_tokens(i, end, *query.tokens[i + 2:comma])
        yield "cut, not rounded", query.with_tokens(i, end, "CAST", "(", *query.tokens[i + 2:comma], "AS INTEGER )")
        if query.tokens[comma - 1] == "100":
            inner = query.tokens[i + 4:comma - 3]
            yield "cents cut", query.with_tokens(i + 4, comma, *inner, "/ 100 )")
            yield "other unit", query.with_tokens(comma - 2, comma)
        else:
            yield "other unit", query.with_tokens(comma, comma, "/ 100")


RULES = (numbers_and_comparisons, limits, aggregates, orders, columns, conditions, dates, statuses, groups_and_joins,
         rounding)


def mutants_of(task):
    """{mutant: its kind}."""
    query, mutants = Query(task), {}
    for rule in RULES:
        for kind, text in rule(query):
            mutants.setdefault(text, kind)
    mutants.pop(" ".join(query.tokens), None)
    return mutants


# ---------------------------------------------------------------------------------------------------------------------
# further databases

def limit_of(task):
    numbers = [int(number) for number in re.findall(r"[<>]=? (\d+)", task["ground_truth"])]
    return numbers[0] if numbers else 60


def further_database(task, rng):
    """A random database of 3 to 60 parents that keeps the domain's rules."""
    tables = list(columns_of(task["schema"]))
    has_places = len(tables) == 3
    num_parents = rng.choice((3, 6, 12, 25, 60))
    num_children = round(num_parents * rng.choice((1, 2, 5)))
    limit, newest, statuses = limit_of(task), this_year(task), statuses_of(task)
    unit = 100 if "/ 100" in task["ground_truth"] else 1
    newest -= rng.random() < 0.15                                   # nothing has happened yet this year
    share_missing = rng.choice((0, 0.1, 0.3))

    def amount():
        if rng.random() < share_missing:
            return None
        near = rng.choice((limit - 1, limit, limit + 1, limit // 2, rng.randint(1, 200), rng.randint(1, 200)))
        return near * unit + (rng.randint(0, 99) if unit == 100 else 0)

    def date():
        year = newest - rng.choice((0, 0, 0, 1, 1, 2))
        luck = rng.random()
        if luck < share_missing:
            return None
        if luck < share_missing + 0.2:
            return f"{year}-{rng.choice(('01-01', '12-31'))}"
        return f"{year}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"

    names = [f"{name}{more}" for name in sql.NAMES for more in ("", "bel", "o", "s")]
    parents = []
    for number, name in enumerate(rng.sample(names, num_parents), 1):
        status = None if rng.random() < share_missing else rng.choice((*statuses, *statuses[:1]))
        parents.append([number, name, status, *[rng.randint(1, 8)] * has_places])
    children = [[number, rng.randint(1, num_parents), amount(), amount(), date(), date()]
                for number in range(1, num_children + 1)]
    rows = {tables[0]: parents, tables[1]: children}
    if has_places:
        rows[tables[2]] = [[number, name] for number, name in enumerate(rng.sample(sql.PLACES, 8), 1)]
    return rows


# ---------------------------------------------------------------------------------------------------------------------

def rows_of(connections, query, ordered):
    """What a query gives on each database, one after the other."""
    for connection in connections:
        try:
            yield sql.canonical(*sql.select(connection, query), ordered)
        except Exception as error:
            yield type(error).__name__


def agrees(connections, expected, query, ordered):
    """Does a query give the expected rows on each database?"""
    return all(a == b for a, b in zip(expected, rows_of(connections, query, ordered)))


def failing_mutant(task, number):
    """The first mutant, from this number on, that gives other rows than the reference on a hidden database."""
    mutants = list(mutants_of(task))
    begin = number % len(mutants)
    ordered = sql.is_ordered(task["ground_truth"])
    hidden = [sql.open_database(task["schema"], tables) for tables in task["databases"][1:]]
    try:
        expected = list(rows_of(hidden, task["ground_truth"], ordered))
        for mutant in mutants[begin:] + mutants[:begin]:
            if not agrees(hidden, expected, mutant, ordered):
                return mutant
    finally:
        for connection in hidden:                                   # they share one limit of memory
            connection.close()


def verdicts(task):
    """[(mutant, kind, whether it is wrong, whether it agrees with the reference on all hidden databases)]"""
    rng = random.Random(task["task_id"])
    further = [further_database(task, rng) for _ in range(NUM_FURTHER)]
    ordered = sql.is_ordered(task["ground_truth"])
    hidden, larger = ([sql.open_database(task["schema"], tables) for tables in databases]
                      for databases in (task["databases"][1:], further))
    wanted = [list(rows_of(connections, task["ground_truth"], ordered)) for connections in (hidden, larger)]
    found = []
    for mutant, kind in mutants_of(task).items():
        passes, same = (agrees(connections, expected, mutant, ordered)
                        for connections, expected in zip((hidden, larger), wanted))
        found.append((mutant, kind, not same or not passes, passes))
    for connection in (*hidden, *larger):                            # they share one limit of memory
        connection.close()
    return found


def main(path, num_tasks=40):
    lines = pathlib.Path(path).read_text().splitlines()[:int(num_tasks)]
    made, wrong, passing = collections.Counter(), collections.Counter(), collections.Counter()
    examples = collections.defaultdict(list)
    for task in map(json.loads, lines):
        for mutant, kind, is_wrong, passes in verdicts(task):
            made[kind] += 1
            wrong[kind] += is_wrong
            if is_wrong and passes:
                passing[kind] += 1
                examples[kind].append((task["ground_truth"], mutant))
    for kind in made:
        print(f"{kind:26}{made[kind]:6} mutants{wrong[kind]:6} wrong{passing[kind]:5} of them pass")
        if "-v" in sys.argv:
            for reference, mutant in examples[kind][:3]:
                print(f"      {reference}\n      {mutant}")
    print(f"{len(lines)} tasks: {made.total():,} mutants, {wrong.total():,} wrong, {passing.total():,} of them pass: "
          f"{passing.total() / wrong.total():.2%}")


if __name__ == "__main__":
    main(*[word for word in sys.argv[1:] if word != "-v"])
