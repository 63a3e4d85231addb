"""SQL queries (an ambiguous question to a database): schemas, hidden decisions, the rule-based human, looks into an
example database, kinds of turns, oracles, scores.

The human asks in a colleague's words ("How many customers had a big order this year?"). What the words mean stands in
"facts": the decisions, each of which matters, and plausible ones that do not. Some are the human's ("by": "ask"), some
the database shows ("by": "look"). In each round the agent does one of three things:

    QUERY: SELECT …             a look: the rows of the example database come back as a table (8 rows, 600 characters)
    any other text              a message to the human, who says what was asked about
    I WANT TO ANSWER: SELECT …  ends the dialogue

The answer (sql_text.py finds the query in it) is run on hidden databases, the reward is the share of them on which it
gives the rows of the reference. The databases are drawn until likely mistakes show (sql_mutants.py). Rows are a
multiset, and a list where the reference ends with ORDER BY. Names and order of columns are ignored, 1 equals 1.0, and
fractions are compared to 9 digits. All SQL of an agent runs in the scorer's confined child program (sandbox.py).
"""
import collections
import functools
import hashlib
import inspect
import json
import math
import random
import re
import string

from colbench import (
    backend,
    beside,
    check_kind,
    ColBenchError,
    defaults,
    dialogue,
    MORE_KEYS,
    sql_mutants,
    task_id,
    TASK_KEYS,
)
from colbench.defaults import *  # noqa: F403
from colbench.dialogue import (
    human_chat,
    kind_scores,
    knows_all,
    MARKER,
    numbers_known,
    OPENERS,
    topics_asked,
)
from colbench.schema import list_of, MAX_WORD, one_of, record, table_of
from colbench.scorer import check_tasks, Scorer
from colbench.sql_text import is_ordered, LOOK, statement_of

NOUN = "query"
ORACLES = "oracle", "oracle-patient"
COLUMNS = (("databases_agree", "databases", ".3f"), ("success_seen", "seen", ".3f"),
           ("success_unseen", "unseen", ".3f"), ("all_known", "all known", ".3f"),
           ("success_when_known", "when known", ".3f"), ("looks", "looks", ".2f"))
SCORE_KEYS = "reward", "databases", "faults"
AGENT_SYSTEM = (
    "You write one SQL query (SQLite) for a person. The question leaves things out. Some only the person knows: ask "
    "one short question in a turn; the person cannot read SQL. Some the database shows: write "
    f'"{LOOK}" and one SELECT, and you get rows of an example database. When you know enough, write "{MARKER}" and '
    "then nothing but the query. You have {max_rounds} rounds, looks included; the last one must be that answer.")
SIMULATOR_SYSTEM = (
    "You are a person who asked an assistant for data, in these words:\n{problem_description}\n\nOnly you know what "
    "you mean: the query below. Answer the assistant's last message in one or two short sentences of plain English. "
    "Say only what was asked about. You do not know how the database stores things. Never write SQL.\n\n{ground_truth}")
JUDGE = (
    "An assistant writes an SQL query for a person. It cannot see what the person needs; you can:\n{ground_truth}\n\n"
    "The dialogue so far:\n{dialogue}\n\nTwo ways for the assistant to go on:\n[A] {a}\n[B] {b}\n\nWhich one brings "
    "the assistant nearer to the query that the person needs? Reply with the letter A or B alone.")


# ---------------------------------------------------------------------------------------------------------------------
# schemas: two or three tables, joined by keys. Those marked "unseen" are in the test split alone; their words occur in
# other schemas, too, in other combinations.

SCHEMAS = {name: dict(zip(("parents", "children", "first", "second", "begin", "end", "statuses", "places", "unseen"),
                          words)) for name, *words in (line.split() for line in """
shop      customers orders   total  net     placed   paid     active/paused/closed       cities      -
library   readers   loans    fee    fine    taken    returned student/guest/regular      branches    -
clinic    patients  visits   cost   refund  booked   held     insured/private/unknown    -           -
airline   travelers tickets  price  tax     sold     flown    gold/silver/bronze         cities      -
school    pupils    exams    score  bonus   written  graded   enrolled/finished/left     classes     -
music     artists   albums   sales  streams recorded released signed/independent/retired -           -
rental    drivers   rentals  price  deposit started  returned verified/pending/blocked   stations    -
payroll   employees payments gross  net     earned   paid     permanent/temporary/outside departments -
gym       members   sessions fee    tip     booked   held     active/paused/closed       -           -
hotel     guests    stays    price  deposit started  ended    gold/silver/bronze         branches    -
theatre   members   tickets  price  fee     sold     held     active/paused/closed       -           unseen
bank      customers payments net    fee     placed   returned verified/pending/blocked   branches    unseen
garage    drivers   visits   cost   tax     started  paid     gold/silver/bronze         stations    unseen
""".strip().splitlines())}
NAMES = ("Ada Ben Cora Dan Eva Finn Gina Hugo Ida Jon Kim Leo Mia Ned Olga Paul Rosa Sam Tina Vera").split()
PLACES = "Bonn Cork Dover Essen Graz Lyon Oslo Porto Riga Turin".split()
NUM_HIDDEN = 6                  # hidden databases of a task; one of them has an empty table
FEW_DRAWS, MANY_DRAWS = 5, 100  # random databases of which one is taken, and for the last hidden one
MOST_TRIES = 12


def singular(word):
    return {"cities": "city", "branches": "branch", "classes": "class"}.get(word, word[:-1])


def schema_words(name):
    """What a schema puts in the place of $words in requests, queries and decisions."""
    schema = SCHEMAS[name]
    parent, child, place = (singular(schema[key]) for key in ("parents", "children", "places"))
    return {**schema, "parent": parent, "child": child, "place": place, "parent_id": f"{parent}_id",
            "place_id": f"{place}_id", "status": schema["statuses"].split("/")[0]}


def tables_of(words):
    """{table: [column, …]} of a schema."""
    has_places = words["places"] != "-"
    tables = {words["parents"]: ["id", "name", "status"] + [words["place_id"]] * has_places,
              words["children"]: ["id", words["parent_id"], words["first"], words["second"], words["begin"],
                                  words["end"]]}
    return tables | ({words["places"]: ["id", "name"]} if has_places else {})


# ---------------------------------------------------------------------------------------------------------------------
# decisions: what the words of a request can mean, and patterns: requests whose query depends on them (queries.json)
#
# "options" of a decision are {how it stands in the query: [what the human says of it, …]}. Those with "looks" are what
# the database shows: the human cannot tell them, a look at one of the "columns" does, by a cell of the form "cell".

QUERIES = json.loads(beside("queries.json"))
DECISIONS, PATTERNS = QUERIES["decisions"], QUERIES["patterns"]
BIG = [int(value) for value in DECISIONS["big"]["options"]]
LAST_YEAR = max(DECISIONS["year"]["options"])
FAMILIES = [f"{schema}_{pattern}" for schema, words in SCHEMAS.items() for pattern in PATTERNS
            if pattern != ("best" if words["places"] != "-" else "places")]


def put(text, words):
    """`text`, or each text of a tuple, list or dict, with a schema's words for $words."""
    if isinstance(text, str):
        return string.Template(text).substitute(words)
    if isinstance(text, dict):
        return {put(key, words): put(value, words) for key, value in text.items()}
    return [put(part, words) for part in text]


def stored(status, style):
    """How a database with this style keeps a status."""
    return {"word": status, "capitals": status.upper(), "letter": status[0].upper(), "small": status[0]}[style]


# ---------------------------------------------------------------------------------------------------------------------
# databases

def fill(rng, words, chosen, shape):
    """{table: rows} of a random database with values at and beside the borders of the decisions `chosen` {slot: code}.

    Its shape is "example" (it shows what looks are for: all codes of a status, this year, a few plain rows), "plain",
    "wide" (many parents, most of them as they are asked for), "quiet" (nothing has happened yet this year) or "empty"
    (no children at all). In all of them keys lead somewhere, names differ, amounts are positive, a status is stored in
    one way, and no date lies behind this year."""
    limit, year = int(chosen.get("big", rng.choice(BIG))), int(chosen.get("year", LAST_YEAR))
    unit, style = (100 if chosen.get("unit") else 1), chosen.get("style", "word")
    statuses = [stored(status, style) for status in words["statuses"].split("/")]
    newest = year - 1 if shape == "quiet" else year

    def status():
        if rng.random() < (0.05 if shape == "wide" else 0.12):
            return None
        return statuses[0] if shape == "wide" and rng.random() < 0.8 else rng.choice((statuses[0], *statuses))

    def amount():
        if rng.random() < 0.12:
            return None
        if shape == "wide":
            return limit + rng.choice((0, 1, 5, 30))
        near = (limit, limit, limit - 1, limit + 1, limit - 5, limit + 5, rng.choice(BIG),
                rng.choice(BIG) + rng.choice((-1, 1)))
        whole = rng.choice(near) * unit
        return whole + rng.randint(0, 99) if unit == 100 and shape != "example" else whole

    def day():
        luck = rng.random()
        if luck < 0.08:
            return None
        if luck < 0.38:
            return rng.choice((f"{newest}-01-01", f"{newest}-12-31", f"{newest - 1}-12-31"))
        return f"{newest - rng.choice((0, 0, 1, 2))}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"

    num_parents = 6 if shape == "example" else 18 if shape == "wide" else rng.choice((5, 6, 9))
    num_children = 0 if shape == "empty" else 24 if shape == "wide" else rng.randint(9, 14)
    parents = [[number, name, status()] for number, name in enumerate(rng.sample(NAMES, num_parents), 1)]
    keys = list(range(1, num_parents + 1)) if shape == "wide" else []
    keys += [rng.randint(1, num_parents) for _ in range(num_children - len(keys))]
    children = [[number, key, amount(), amount(), day(), day()] for number, key in enumerate(keys, 1)]
    rows = {words["parents"]: parents, words["children"]: children}
    if words["places"] != "-":
        for row, place in zip(parents, rng.sample(4 * [1, 2, 3, 4, 5], num_parents)):
            row.append(place)
        rows[words["places"]] = [[number, name] for number, name in enumerate(rng.sample(PLACES, 5), 1)]
    if shape == "example":
        for row, code in zip(parents, statuses):
            row[2] = code
        put_plain_rows(rng, children, year, unit)
    elif children and "big" in chosen:
        put_sum_at(rng, children, limit)
    return rows


def put_plain_rows(rng, children, year, unit):
    """Let the first two children have all their values, and dates of this year."""
    for row, column in zip(children, (4, 5)):
        row[2:] = [rng.choice(BIG) * unit, rng.choice(BIG) * unit, f"{year}-0{rng.randint(1, 9)}-1{row[0]}",
                   f"{year}-0{rng.randint(1, 9)}-1{column}"]


def put_sum_at(rng, children, limit):
    """Change amounts of a parent so that their sum lies at the limit or beside it: one of them or, of two, both."""
    row, column = rng.choice(children), rng.choice((2, 3))
    siblings = [other for other in children if other[1] == row[1] and other is not row]
    if len(siblings) == 1 and rng.random() < 0.5:
        row[column] = siblings[0][column] = (limit + 1) // 2
        return
    rest = sum(other[column] or 0 for other in siblings)
    row[column] = max(1, limit + rng.choice((-1, 0, 1)) - rest)


def shapes_of(query):
    """The shapes of the hidden databases for a query, from the last one to the first."""
    if "{year}" in query:
        special = ["quiet"]
    elif "ORDER BY" in query:
        special = ["wide"]
    else:
        special = ["plain"]
    return ["empty", *special] + ["plain"] * (NUM_HIDDEN - 2)


def draw_hidden(draw, shapes, judge, rivals):
    """Hidden databases of these shapes such that each of the queries `rivals` gives other rows than the reference on
    one of them; None if a rival is left. draw(shape) makes one.

    Of several databases of a shape the one is taken on which the fewest rivals agree with the reference."""
    hidden = []
    for number, shape in enumerate(shapes):
        most_draws = 1 if shape == "empty" else FEW_DRAWS if number < len(shapes) - 1 else MANY_DRAWS
        fewest = None
        for _ in range(most_draws):
            tables = draw(shape)
            agreeing = judge.agreeing(tables, rivals)
            if fewest is None or len(agreeing) < len(fewest):
                best, fewest = tables, agreeing
            if not agreeing:
                break
        hidden.append(best)
        rivals = fewest
    return None if rivals else hidden[::-1]


def rivals_of(template, codes, slots, statuses):
    """The queries that must not pass: the reference with another value of one decision, and likely mistakes."""
    queries = []
    for slot, decision in slots.items():
        for code in decision["options"]:
            if code != codes[slot]:
                queries.append(template.format(**{**codes, slot: code}))
    mistakes = sql_mutants.mutants_of(template.format(**codes), statuses)
    return list(dict.fromkeys([*queries, *mistakes]))


def make_task(rng, name, told, accept):
    """One task of a family, or the reason why there is none: `accept(task_id)` says no, or no databases prove every
    decision. The id of a task with an unseen schema is of the test split."""
    schema, pattern = name.split("_")
    words, pattern = schema_words(schema), PATTERNS[pattern]
    template = put(pattern["query"], words)
    slots = {slot: put(DECISIONS[slot], words) for slot in re.findall(r"\{(\w+)\}", template)}
    codes = {slot: rng.choice(list(decision["options"])) for slot, decision in slots.items()}
    style = codes.get("code", "word")
    if "code" in slots:
        options = [stored(words["status"], style) for style in slots["code"]["options"]]
        slots["code"]["options"] = {code: [f"The status is stored as {code}."] for code in options}
        codes["code"] = stored(words["status"], style)
    reference = template.format(**codes)
    number = int(hashlib.sha256(f"{reference} {codes.get('unit')}".encode()).hexdigest()[:15], 16)
    if words["unseen"] == "unseen":
        number += 90 + number % 10 - number % 100
    if reason := accept(f"{number:016x}"):
        return reason
    tables, chosen, texts = tables_of(words), codes | {"style": style}, ("name", "status", words["begin"], words["end"])
    schema_text = "".join(f"CREATE TABLE {table}(" + ", ".join(
        f"{column} {'TEXT' if column in texts else 'INTEGER'}" for column in own) + ");\n"
        for table, own in tables.items())
    # The databases depend on the reference alone, not on what was drawn for other tasks before.
    own_rng = random.Random(number)
    draw = functools.partial(fill, own_rng, words, chosen)
    statuses = [stored(status, style) for status in words["statuses"].split("/")]
    rivals, hidden = rivals_of(template, codes, slots, statuses), None
    with sql_mutants.Judge(schema_text, reference, is_ordered(reference), canonical) as judge:
        for _ in range(MOST_TRIES):
            hidden = hidden or draw_hidden(draw, shapes_of(template), judge, rivals)
    if hidden is None:
        return "a wrong query that no database shows"
    databases = [draw("example"), *hidden]

    facts = [{"topic": decision["topic"], "questions": decision["questions"], "matters": True, "told": False,
              "slot": slot, "code": codes[slot], "by": "look" if "looks" in decision else "ask",
              "guesses": [codes[slot], *sorted(set(decision["options"]) - {codes[slot]})],
              **({"replies": QUERIES["not_mine"], "looks": decision["looks"], "columns": decision["columns"],
                  "cell": decision["cell"].replace("{code}", re.escape(codes[slot]))} if "looks" in decision else
                 {"replies": decision["options"][codes[slot]]})} for slot, decision in slots.items()]
    facts += [{"topic": topic, "matters": False, "told": False, "by": "ask",
               "questions": [f"What is {topic}?", f"Could you tell me {topic}?"],
               "replies": ["That does not matter.", f"It does not depend on {topic}."]} for topic in QUERIES["idle"]]
    needed = [fact for fact in facts if fact["matters"]]
    own = [fact for fact in needed if fact["by"] == "ask"]
    for fact in {"none": [], "some": rng.sample(own, int(rng.random() < 0.3)), "all": needed}[told]:
        fact["told"] = True
    hints = [rng.choice(slots[fact["slot"]]["options"][fact["code"]]) for fact in needed if fact["told"]]
    lines = ", ".join(f"{table}({', '.join(columns)})" for table, columns in tables.items())
    request = " ".join([put(rng.choice(pattern["requests"]), words), *hints])
    return {"task_id": f"{number:016x}", "problem_description": f"{request}\n{lines}", "ground_truth": reference,
            "schema": schema_text, "databases": databases, "family": name, "seen": words["unseen"] != "unseen",
            "template": template, "facts": facts, "idle_looks": put(QUERIES["idle_looks"], words)}


# ---------------------------------------------------------------------------------------------------------------------
# running SQL. The source of these five functions is what the confined child program runs

def open_database(schema, tables):
    """A filled sqlite database in memory that lets SELECT through and nothing else, with limits on its size."""
    import sqlite3
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(schema)
    for name, rows in tables.items():
        if rows:
            connection.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(rows[0]))})', rows)
    for pragma in ("query_only = 1", "trusted_schema = 0", "hard_heap_limit = 67108864", "temp_store = 2"):
        connection.execute(f"PRAGMA {pragma}")
    for limit, value in ((sqlite3.SQLITE_LIMIT_LENGTH, 100_000), (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 10_000),
                         (sqlite3.SQLITE_LIMIT_COLUMN, 100), (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
                         (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 50), (sqlite3.SQLITE_LIMIT_VDBE_OP, 20_000),
                         (sqlite3.SQLITE_LIMIT_ATTACHED, 0), (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)):
        connection.setlimit(limit, value)
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
    connection.set_authorizer(lambda action, table, name, *_: int(
        action not in allowed or name in ("load_extension", "fts3_tokenizer", "random", "randomblob")))
    return connection


def select(connection, statement):
    """(names of the columns, rows) of one SELECT; ValueError or sqlite3.Error that says why there are none."""
    steps = iter(range(300))                                       # of 10,000 instructions each
    connection.set_progress_handler(lambda: next(steps, None) is None, 10_000)
    cursor = connection.execute(statement)
    if cursor.description is None:
        raise ValueError("no SELECT")
    rows, size = [], 0
    for row in cursor:
        rows.append(row)
        size += sum(len(cell) if isinstance(cell, (str, bytes)) else 8 for cell in row)
        if len(rows) > 1000 or size > 200_000:
            raise ValueError("more than 1,000 rows or 200,000 characters")
    return [column[0] for column in cursor.description], rows


def plain_number(cell):
    """A cell in a form that is equal for equal numbers: whole numbers as int, fractions to 9 digits."""
    if not isinstance(cell, float):
        return cell
    if 10 ** 9 <= abs(cell) < 2 ** 53:                               # where 9 digits are coarser than whole numbers
        return round(cell)
    cell = float(f"{cell:.9g}")
    return int(cell) if abs(cell) < 2 ** 53 and cell == int(cell) else cell


def canonical(names, rows, ordered):
    """Rows in a form that is equal for equal results: columns and (unless `ordered`) rows in an order of their own."""
    import itertools
    import math
    rows = [[plain_number(cell) for cell in row] for row in rows]
    if len(names) == 1:
        return [1, rows if ordered else sorted(rows, key=repr)]
    texts = [[repr(cell) for cell in row] for row in rows]
    contents = [tuple(sorted(row)) for row in texts]
    numbers = {content: number for number, content in enumerate(sorted(set(contents)))}
    groups = {}                                             # columns with equal cells in rows of equal content
    for i in range(len(names)):
        column = [(row[i], numbers[content]) for row, content in zip(texts, contents)]
        groups.setdefault(tuple(column if ordered else sorted(column)), []).append(i)
    groups = [groups[column] for column in sorted(groups)]
    orders = [groups]
    if not ordered and math.prod(math.factorial(len(group)) for group in groups) <= 120:
        orders = itertools.product(*map(itertools.permutations, groups))

    def in_order(order):
        columns = [i for group in order for i in group]
        return [[row[i] for i in columns] for row in rows]

    tables = (in_order(order) for order in orders)
    return [len(names), next(tables) if ordered else min((sorted(table, key=repr) for table in tables), key=repr)]


def as_table(names, rows):
    """Rows as the agent sees them: at most 8, and 600 characters."""
    lines = [" | ".join("NULL" if cell is None else str(cell) for cell in row)[:200] for row in rows[:8]]
    note = ["(no rows)"] if not rows else [f"({len(rows)} rows)"] if len(rows) > 8 else []
    return "\n".join([" | ".join(names)[:200], *lines, *note])[:600]


SOURCE = "import json\n\n" + "\n\n".join(
    map(inspect.getsource, (open_database, select, plain_number, canonical, as_table)))


def program(task, databases, statement):
    """Python source for the child: result(i) is what `statement` gives on database i, table() how that looks."""
    data = json.dumps([task["schema"], databases, statement])
    return (f"{SOURCE}\n\nSCHEMA, DATABASES, STATEMENT = json.loads({data!r})\n\n\n"
            "def rows(i):\n    return select(open_database(SCHEMA, DATABASES[i]), STATEMENT)\n\n\n"
            f"def result(i):\n    return canonical(*rows(i), {is_ordered(task['ground_truth'])})\n\n\n"
            "def table():\n    return as_table(*rows(0))\n")


def as_function_task(task):
    """A task as the scorer knows it: its tests are the hidden databases."""
    hidden = task["databases"][1:]
    return {**task, "ground_truth": program(task, hidden, task["ground_truth"]),
            "test_cases": {f"database{i + 1}": f"result({i})" for i in range(len(hidden))}}


def as_functions(task, answer):
    """(task, answer) as the scorer knows them. This is where an answer, wherever it comes from, becomes a query."""
    return as_function_task(task), program(task, task["databases"][1:], statement_of(answer))


# ---------------------------------------------------------------------------------------------------------------------
# what a turn is worth

def query_of(message):
    """The statement of a look; None where the message is none."""
    found = re.match(rf"\s*{LOOK}(.*)", message, re.DOTALL)
    return statement_of(found[1]) if found else None


def looked_at(task, query):
    """Which facts (indices) a look is for: those that a column of the statement shows."""
    said = set(re.findall(r"\w+", query))
    if re.search(r"SELECT\s+\*", query, re.IGNORECASE):
        said |= {column for i, fact in enumerate(task["facts"]) for column in fact.get("columns", ())}
    return [i for i, fact in enumerate(task["facts"]) if fact["by"] == "look" and said & set(fact["columns"])]


def known_by_turn(task, history):
    """[the facts (indices) that are known after 0, 1, … all turns]: those that the request states, the human was asked
    about, or the rows of a look have shown, which are the turn after it."""
    known = [{i for i, fact in enumerate(task["facts"]) if fact["told"]}]
    for before, turn in zip([{"role": "user"}, *history], history):
        learned = set()
        if turn["role"] == "assistant" and query_of(turn["content"]) is None:
            learned |= {i for i in topics_asked(task["facts"], turn["content"]) if task["facts"][i]["by"] == "ask"}
        if before["role"] == "assistant" and (query := query_of(before["content"])) is not None:
            cells = [cell for line in turn["content"].split("\n")[1:] for cell in line.split(" | ")]
            learned |= {i for i in looked_at(task, query)
                        if any(re.fullmatch(task["facts"][i]["cell"], cell) for cell in cells)}
        known.append(known[-1] | learned if learned else known[-1])
    return known


def known_facts(task, history):
    """Indices of the facts that the request states, the human was asked about, or the rows of a look have shown."""
    return known_by_turn(task, history)[-1]


def all_known(task, history):
    """Whether every decision is known after `history`."""
    return knows_all(task, known_facts(task, history))


def facts(task, history):
    """[(a decision and how it stands in the reference, whether it is known after `history`)]; None where the task
    states no facts."""
    if not task.get("facts"):
        return None
    known = known_facts(task, history)
    return [(f"{fact['topic']}: {fact['code'].strip()}", i in known) for i, fact in enumerate(task["facts"])
            if fact["matters"]]


def facts_by_turn(task, history):
    return [numbers_known(task, known) for known in known_by_turn(task, history)]


def turn_kind(task, history, message):
    """What an agent's turn is worth: "ask needed", "ask repeat", "ask idle" (does not matter), "ask for a look" (the
    database shows it), "ask vague" (no topic); "look needed", "look repeat", "look idle" (shows nothing that matters);
    "right answer", "wrong answer", "early answer", as for functions. None where the task states no facts."""
    before = {turn["content"] for turn in history}
    return kind_of(task, known_facts(task, history), before, message) if task.get("facts") else None


def turn_kinds(task, history):
    """turn_kind of each agent turn of a history, all at once."""
    known, before, kinds = known_by_turn(task, history) if task.get("facts") else None, set(), []
    for i, turn in enumerate(history):
        if turn["role"] == "assistant":
            kinds.append(kind_of(task, known[i], before, turn["content"]) if known else None)
        before.add(turn["content"])
    return kinds


def kind_of(task, known, before, message):
    """turn_kind of a message where these facts are known; `before`: the texts of all turns before."""
    if (answer := answer_of([{"content": message}], False)) is not None:
        if " ".join(answer.split()).rstrip("; ") == task["ground_truth"]:
            return "right answer"
        return "wrong answer" if knows_all(task, known) else "early answer"
    if (query := query_of(message)) is not None:
        found = looked_at(task, query)
        return ("look needed" if set(found) - known else "look repeat" if found or message in before else "look idle")
    facts, asked = task["facts"], topics_asked(task["facts"], message)
    if not asked:
        return "ask vague"
    if any(facts[i]["matters"] and facts[i]["by"] == "ask" and i not in known for i in asked):
        return "ask needed"
    if any(facts[i]["by"] == "look" for i in asked):
        return "ask for a look"
    return "ask repeat" if any(i in known for i in asked) else "ask idle"


def oracle_scores(oracle, task, history, messages):
    """As for functions (backend.oracle_scores): "oracle" wants a right answer at once, "oracle-patient" only when the
    agent can know that it is right."""
    kinds = [turn_kind(task, history, message) for message in messages]
    needed = {"ask needed": "needed", "look needed": "needed"}
    return kind_scores(oracle, all_known(task, history), [needed.get(kind, kind) for kind in kinds])


# ---------------------------------------------------------------------------------------------------------------------
# the human, and the scripted agents

def leak_of(task, reply):
    """How a reply of the human shows SQL: "fence", "query" (select … from a table), "code" (8 tokens in a row of the
    reference); None: it does not."""
    tables = "|".join(re.findall(r"CREATE TABLE (\w+)", task["schema"]))
    leak = dialogue.code_leak(task, reply)
    if leak != "fence" and re.search(rf"\bselect\b.+\bfrom\s+({tables})\b", reply, re.IGNORECASE | re.DOTALL):
        return "query"
    return leak


VAGUE = ("Can you tell me more?", "What else should I know?", "Could you describe the data?")


def answer_text(task, value):
    """The answer with value(index, fact) for each decision."""
    values = {fact["slot"]: value(i, fact) for i, fact in enumerate(task["facts"]) if fact["matters"]}
    return f"{MARKER}\n{task['template'].format(**values)}"


def asking(task, index, rng):
    """What the agent says to learn a fact: a look where a look shows it."""
    fact = task["facts"][index]
    return f"{LOOK} {rng.choice(fact['looks'])}" if fact["by"] == "look" else rng.choice(fact["questions"])


def scripted_turn(task, history, max_rounds, rng, informed=False):
    """What the noisy scripted agent says next. It asks the human what a look would show, looks at what shows nothing,
    repeats itself, asks for what does not matter, forgets, and sometimes answers too early, guessing what it does not
    know."""
    facts, known = task["facts"], known_facts(task, history)
    unknown = [i for i, fact in enumerate(facts) if i not in known]
    needed = [i for i in unknown if facts[i]["matters"]]
    num_turns = sum(turn["role"] == "assistant" for turn in history)
    early, vague, repeat, useless = (0.01, 0.03, 0.04, 0.08) if informed else (0.03, 0.05, 0.12, 0.33)
    luck = rng.random()
    if num_turns + 1 == max_rounds or luck < (early if needed else 0.85):
        return answer_text(task, lambda i, fact: fact["code"] if informed or i in known and rng.random() > 0.01 else
                           rng.choice(fact["guesses"]))
    luck = rng.random()
    if luck < vague:
        return rng.choice(VAGUE)
    if luck < vague + repeat and known:
        return asking(task, rng.choice(sorted(known)), rng)
    if luck < vague + repeat + useless or not needed:
        to_look = [i for i in unknown if facts[i]["by"] == "look"]
        idle = [i for i in unknown if not facts[i]["matters"]]
        luck = rng.random()
        if luck < 0.3:
            return f"{LOOK} {rng.choice(task['idle_looks'])}"
        return rng.choice(facts[rng.choice(to_look if to_look and luck < 0.6 else idle or range(len(facts)))]
                          ["questions"])
    ask = rng.choice(needed)
    opener = rng.choice(OPENERS) if len(history) > 1 and facts[ask]["by"] == "ask" else ""
    return opener + asking(task, ask, rng)


def asker_turn(task, history, max_rounds, rng):
    """An asker that learns nothing: it knows the decisions of the family and their values, takes each value for equally
    likely, and asks or looks where it expects most information; then it answers, guessing what it has no round for."""
    facts, known = task["facts"], known_facts(task, history)
    bits = {i: math.log2(len(fact["guesses"])) for i, fact in enumerate(facts) if fact["matters"] and i not in known}
    if bits and sum(turn["role"] == "assistant" for turn in history) + 1 < max_rounds:
        return asking(task, max(bits, key=bits.get), rng)
    return answer_text(task, lambda i, fact: fact["code"] if i in known else rng.choice(fact["guesses"]))


PLAYERS = {"script": scripted_turn, "script-informed": functools.partial(scripted_turn, informed=True),
           "script-asker": asker_turn}


# ---------------------------------------------------------------------------------------------------------------------
# the rest of the interface (colbench/__init__.py)

def owns(task):
    return "databases" in task


CELL_TYPES = {int, float, str, type(None)}


def table_rows(rows):
    """What is wrong with the rows of a table, which go into a database as they are; None: nothing."""
    if type(rows) is not list:
        return f"is a {type(rows).__name__}, not a list"
    for index, row in enumerate(rows):
        if type(row) is not list or not row or len(row) != len(rows[0]):
            return f"item {index}: not a list of as many cells as the first row"
        for cell in row:
            if type(cell) not in CELL_TYPES:
                return f"item {index}: a cell is a {type(cell).__name__}, not a number, a str or null"
            if type(cell) in (int, float) and not -MAX_WORD <= cell < MAX_WORD:
                return f"item {index}: a cell is a number that is not finite or not of 64 bits"


OBJECT, TABLES = record({}), table_of(table_rows)


def database(tables):
    """What is wrong with the tables of a database, {name: rows}; None: nothing."""
    return OBJECT(tables) or TABLES(tables)


def pattern(text):
    """What is wrong with a regular expression; None: nothing."""
    if type(text) is not str:
        return f"is a {type(text).__name__}, not a str"
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression ({error})"


SQL_FACT_KEYS = {**dialogue.FACT_KEYS, "by": one_of("ask", "look")}
FACT = record(SQL_FACT_KEYS, dialogue.REPLIES)
NEEDED_FACT = record({**SQL_FACT_KEYS, **dialogue.SLOT_KEYS}, dialogue.REPLIES)
LOOK_FACT = record({**SQL_FACT_KEYS, "looks": list_of(str, 1), "columns": list_of(str, 1), "cell": pattern},
                   dialogue.REPLIES)
TASK = record({**TASK_KEYS, "schema": str, "databases": list_of(database)},
              {**MORE_KEYS, "template": str, "facts": list_of(FACT), "idle_looks": list_of(str, 1)})


def check_task(task, where):
    check_kind(task, TASK, where)
    if len(task["databases"]) < 2:
        raise ColBenchError(f'{where}: "databases" needs the example and a hidden one')
    if task.get("facts"):
        for key in ("idle_looks", "template"):
            if key not in task:
                raise ColBenchError(f'{where}: missing "{key}", which a task with "facts" has')
        for index, fact in enumerate(task["facts"]):
            if fact["matters"]:
                check_kind(fact, NEEDED_FACT, f"{where}: facts: item {index}")
            if fact["by"] == "look":
                check_kind(fact, LOOK_FACT, f"{where}: facts: item {index}")
        dialogue.check_facts(task, where)


def lacks(task, player):
    return dialogue.missing_field(task, player)


def check_data(tasks, unsafe_scorer):
    with Scorer(unsafe_scorer) as scorer, Scorer(unsafe_scorer, hash_seed=1) as other:
        return check_tasks([as_function_task(task) for task in tasks], scorer, other)


def answer_of(history, is_last):
    """The statement that follows the marker; in the last round without it the whole turn, as it is."""
    before, marker, after = history[-1]["content"].partition(MARKER)
    return statement_of(after) if marker else before if is_last else None


def answer_message(task):
    return f"{MARKER}\n{task['ground_truth']}"


def measure(trajectories):
    """See 05_evaluate.py; "databases_agree" is the mean reward, "success_seen" and "success_unseen" are those of
    schemas that are also in the training split, and of others; "looks" counts QUERY turns of a dialogue, "failed_looks"
    the share of them with an error."""
    def mean(values):
        return sum(values) / max(1, len(values))

    rows = [turn["content"] for t in trajectories for turn in t["dialogue_history"] if turn.get("tool")]
    faults = collections.Counter(fault.partition(":")[0] for t in trajectories for fault in t["faults"] if fault)
    metrics = {"databases_agree": mean([t["reward"] for t in trajectories]),
               "looks": len(rows) / len(trajectories), "failed_looks": mean([row.startswith("Error:") for row in rows]),
               "forced_answers": mean([MARKER not in t["dialogue_history"][-1]["content"] for t in trajectories]),
               "faults": dict(faults.most_common())}
    for name, side in (("success_seen", True), ("success_unseen", False)):
        if own := [defaults.outcome(t) for t in trajectories if t["task"].get("seen") == side]:
            metrics |= {name: mean(own), f"n_{name[8:]}": len(own)}
    return metrics


class World(backend.World):
    """The scorer, the example databases, and the rule-based human."""

    TAKES = ("unsafe_scorer",)

    def __init__(self, unsafe_scorer=False):
        super().__init__(unsafe_scorer=unsafe_scorer)
        self.tables = {}

    async def tool_reply(self, task, history):
        """The rows of a look, or what the database says is wrong with it. It blocks: what runs beside it would change
        which requests of a local model share a batch."""
        if (query := query_of(history[-1]["content"])) is None:
            return None
        key = task_id(task), query
        if key not in self.tables:
            children = self.scorer.workers.get()
            [(kind, text)], _ = self.scorer.run(
                children[1], program(task, task["databases"][:1], query), ["table()"], [])
            self.scorer.workers.put(children)
            self.tables[key] = text if kind == "ok" else f"Error: {text.partition(': ')[2] or text}"[:600]
        return self.tables[key]

    async def person_chat(self, task, history):
        return human_chat(SIMULATOR_SYSTEM.format(**task), history)

    async def score(self, pairs, explain=False):
        """"databases": whether the rows agree, for each hidden database; "faults": why they do not."""
        scores = await super().score([as_functions(*pair) for pair in pairs], explain)
        return [{"databases" if key == "tests" else key: value for key, value in score.items()} for score in scores]
