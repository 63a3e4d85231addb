"""Likely mistakes in a query, as mutants of a reference, and whether databases show them.

`mutants_of` makes them by rules on the text of a reference: a threshold or a list that is off by one, another
comparison or aggregate, a list that is cut, a dropped tie-break, rows with a missing value that count, borders of a
year, the newest year of the rows in place of this year. Each rule is written for the references of queries.json.

sql.py draws hidden databases until each mutant gives other rows on one of them. docs/sql.md says how many wrong queries
pass.
"""
import re
import sqlite3

COMPARISONS = (">", ">=", "<", "<=", "=", "<>")
AGGREGATES = ("COUNT", "SUM", "AVG", "MAX", "MIN")
ADDED_LIMITS = (1, 3, 5, 10)


# ---------------------------------------------------------------------------------------------------------------------
# mutants

def replaced(query, match, text):
    """The query with `text` in place of what a match covers."""
    return query[:match.start()] + text + query[match.end():]


def thresholds(query):
    """A threshold is off by one, or compared in another way."""
    for match in re.finditer(r"([<>]=?) (\d+)", query):
        comparison, limit = match[1], int(match[2])
        for other in (limit - 1, limit + 1):
            yield replaced(query, match, f"{comparison} {other}")
        for other in COMPARISONS:
            if other != comparison:
                yield replaced(query, match, f"{other} {limit}")


def limits(query):
    """A list is off by one or whole; a list that is wanted whole is cut."""
    if match := re.search(r" LIMIT (\d+)$", query):
        for other in (int(match[1]) - 1, int(match[1]) + 1):
            yield replaced(query, match, f" LIMIT {other}")
        yield query[:match.start()]
    elif "ORDER BY" in query:
        for number in ADDED_LIMITS:
            yield f"{query} LIMIT {number}"


def aggregates(query):
    """Another aggregate; each value once, or no longer once."""
    for match in re.finditer(r"\b(COUNT|SUM|AVG|MAX|MIN)\((DISTINCT )?(?=[^*])", query):
        for other in AGGREGATES:
            if other != match[1]:
                yield replaced(query, match, f"{other}({match[2] or ''}")
        if match[2]:
            yield replaced(query, match, f"{match[1]}(")
        elif match[1] in ("COUNT", "SUM", "AVG"):
            yield replaced(query, match, f"{match[1]}(DISTINCT ")


def ties(query):
    """Equal ones come in no order, or in that of their keys."""
    if match := re.search(r", (\w)\.name( DESC)?(?= LIMIT)", query):
        yield replaced(query, match, "")
        yield replaced(query, match, f", {match[1]}.id")


def missing_values(query):
    """Rows whose value is missing pass a condition."""
    for match in re.finditer(r"(\w\.\w+) (?:LIKE|=|[<>]=?) ('[^']*'|\d+)", query):
        yield replaced(query, match, f"({match[0]} OR {match[1]} IS NULL)")
    for match in re.finditer(r"(SUM\(\w\.\w+\)) >= \d+", query):
        yield replaced(query, match, f"({match[0]} OR {match[1]} IS NULL)")


def years(query):
    """A year without its first or last day, or with the last one of the year before; every year until now; the newest
    year of the rows in place of this year."""
    for match in re.finditer(r"\bc\.(\w+) LIKE '(\d{4})%'", query):
        column, year = match[1], int(match[2])
        children = re.search(r"(?:FROM|JOIN) (\w+) c\b", query)[1]
        for condition in (f"c.{column} > '{year}-01-01'",
                          f"c.{column} >= '{year}-01-01' AND c.{column} < '{year}-12-31'",
                          f"c.{column} >= '{year - 1}-12-31'",
                          f"c.{column} >= '{year - 1}-01-01'",
                          f"c.{column} < '{year + 1}'",
                          f"substr(c.{column}, 1, 4) = (SELECT substr(MAX({column}), 1, 4) FROM {children})"):
            yield replaced(query, match, condition)


def cents(query):
    """Cents are cut before the mean is taken."""
    if match := re.search(r"AVG\((.*)\) / 100", query):
        yield replaced(query, match, f"AVG({match[1]} / 100)")


def statuses(query, codes):
    """A second status counts, too."""
    for match in re.finditer(r"(\w\.status) = ('[^']*')", query):
        for code in codes:
            if f"'{code}'" != match[2]:
                yield replaced(query, match, f"{match[1]} IN ({match[2]}, '{code}')")


RULES = {"threshold": thresholds, "limit": limits, "aggregate": aggregates, "tie": ties,
         "missing value": missing_values, "year": years, "unit": cents}


def mutants_of(reference, codes):
    """{mutant: which rule made it} of a reference of queries.json; `codes` are the statuses as they are stored."""
    mutants = {}
    for kind, rule in RULES.items():
        for mutant in rule(reference):
            mutants.setdefault(mutant, kind)
    for mutant in statuses(reference, codes):
        mutants.setdefault(mutant, "status")
    return mutants


# ---------------------------------------------------------------------------------------------------------------------
# which databases tell a reference from its mutants

class Judge:
    """Runs queries that this folder made on one database after the other. A context manager.

    One connection serves all of them, so that sqlite3 prepares each query once."""

    def __init__(self, schema, reference, ordered, canonical):
        """canonical(names, rows, ordered): rows in a form that is equal for equal results."""
        self.reference, self.ordered, self.canonical = reference, ordered, canonical
        self.connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=500)
        self.connection.executescript(schema)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.connection.close()

    def rows(self, query):
        cursor = self.connection.execute(query)
        names = [column[0] for column in cursor.description]
        return self.canonical(names, cursor.fetchall(), self.ordered)

    def agreeing(self, tables, queries):
        """The queries which give the rows of the reference on the database `tables`, {name: rows}."""
        for name, rows in tables.items():
            self.connection.execute(f"DELETE FROM {name}")
            if rows:
                marks = ", ".join("?" * len(rows[0]))
                self.connection.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
        wanted = self.rows(self.reference)
        return [query for query in queries if self.rows(query) == wanted]
