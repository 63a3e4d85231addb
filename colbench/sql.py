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
import itertools
import json
import random
import re
import sqlite3
from dataclasses import dataclass

from colbench import backend, beside, check_keys, check_kind, defaults, dialogue, MORE_KEYS, task_id, TASK_KEYS
from colbench.defaults import *  # noqa: F403
from colbench.dialogue import answer_kind, Facts, MARKER, needed_facts, OPENERS, put, topics_asked
from colbench.schema import list_of, one_of, record, table_of
from colbench.sql_mutants import Judge, mutants_of
from colbench.sql_text import is_ordered, LOOK, statement_of

NOUN = "query"
ORACLES = "oracle", "oracle-patient"
COLUMNS = (("databases_agree", "databases", ".3f"), ("success_seen", "seen", ".3f"),
           ("success_unseen", "unseen", ".3f"), ("all_known", "all known", ".3f"),
           ("success_when_known", "when known", ".3f"), ("looks", "looks", ".2f"))
SCORE_KEYS = "reward", "databases", "faults"
AGENT_SYSTEM = beside("prompts/sql_agent.txt")
SIMULATOR_SYSTEM = beside("prompts/sql_simulator.txt")
JUDGE = beside("prompts/sql_judge.txt")


# ---------------------------------------------------------------------------------------------------------------------
# schemas, decisions and patterns (queries.json)
#
# A schema is two or three tables, joined by keys. Those marked "unseen" are in the test split alone; their words occur
# in other schemas, too, in other combinations. A pattern is a request whose query depends on decisions: what words can
# mean. "options" of a decision are {how it stands in the query: [what the human says of it, …]}. Those with "looks" are
# what the database shows: the human cannot tell them, but a look at one of the "columns" can, by a cell like "cell".

QUERIES = json.loads(beside("queries.json"))
SCHEMA_KEYS = ("parents", "children", "first", "second", "begin", "end", "statuses", "places", "unseen")
SCHEMAS = {name: dict(zip(SCHEMA_KEYS, words.split())) for name, words in QUERIES["schemas"].items()}
NAMES, PLACES = QUERIES["names"].split(), QUERIES["places"].split()
DECISIONS, PATTERNS = QUERIES["decisions"], QUERIES["patterns"]
BIG = [int(value) for value in DECISIONS["big"]["options"]]
LAST_YEAR = max(DECISIONS["year"]["options"])
NUM_HIDDEN = 6                  # hidden databases of a task; one of them has an empty table
FEW_DRAWS, MANY_DRAWS = 5, 100  # random databases of which one is taken, and for the last hidden one
MOST_TRIES = 12


def singular(word):
    irregular = {"cities": "city", "branches": "branch", "classes": "class"}
    return irregular.get(word, word[:-1])


def schema_words(name):
    """What a schema puts in the place of $words in requests, queries and decisions."""
    schema = SCHEMAS[name]
    parent, child, place = (singular(schema[key]) for key in ("parents", "children", "places"))
    status = schema["statuses"].split("/")[0]
    return {**schema, "parent": parent, "child": child, "place": place, "parent_id": f"{parent}_id",
            "place_id": f"{place}_id", "status": status}


def has_places(words):
    """Whether a schema has the third table, of places."""
    return words["places"] != "-"


def tables_of(words):
    """{table: [column, …]} of a schema."""
    parents = ["id", "name", "status"]
    children = ["id", words["parent_id"], words["first"], words["second"], words["begin"], words["end"]]
    tables = {words["parents"]: parents, words["children"]: children}
    if has_places(words):
        parents.append(words["place_id"])
        tables[words["places"]] = ["id", "name"]
    return tables


def schema_text(words):
    """The statements that make the tables of a schema."""
    texts = ("name", "status", words["begin"], words["end"])
    statements = []
    for table, names in tables_of(words).items():
        columns = [f"{name} {'TEXT' if name in texts else 'INTEGER'}" for name in names]
        statements.append(f"CREATE TABLE {table}({', '.join(columns)});\n")
    return "".join(statements)


def families():
    """Each schema with each pattern that it can have: "places" needs places, "best" is for schemas without them."""
    names = []
    for schema, words in SCHEMAS.items():
        without = "best" if has_places(words) else "places"
        names += [f"{schema}_{pattern}" for pattern in PATTERNS if pattern != without]
    return names


FAMILIES = families()


def stored(status, style):
    """How a database with this style keeps a status."""
    if style == "capitals":
        return status.upper()
    if style == "letter":
        return status[0].upper()
    return status[0] if style == "small" else status


# ---------------------------------------------------------------------------------------------------------------------
# databases

@dataclass(frozen=True)
class Plan:
    """What the values of a random database are drawn by, so that they lie at and beside the borders of decisions."""
    shape: str          # see `fill`
    limit: int          # from where on an amount is big
    year: int           # this year
    unit: int           # 100 where amounts are kept in cents, else 1
    statuses: list      # as they are stored; the first one is asked for


def fill(rng, words, chosen, shape):
    """{table: rows} of a random database for a task whose decisions are `chosen` {slot: code}.

    Its shape is "example" (it shows what looks are for: all codes of a status, this year, a few plain rows), "plain",
    "wide" (many parents, most of them as they are asked for), "quiet" (nothing has happened yet this year) or "empty"
    (no children at all). In all of them keys lead somewhere, names differ, amounts are positive, a status is stored in
    one way, and no date lies behind this year."""
    any_limit = rng.choice(BIG)
    style = chosen.get("style", "word")
    plan = Plan(shape, int(chosen.get("big", any_limit)), int(chosen.get("year", LAST_YEAR)),
                100 if chosen.get("unit") else 1, [stored(status, style) for status in words["statuses"].split("/")])
    num_parents, num_children = draw_sizes(rng, shape)
    names = rng.sample(NAMES, num_parents)
    parents = [[number, name, draw_status(rng, plan)] for number, name in enumerate(names, 1)]
    children = []
    for number, key in enumerate(draw_keys(rng, shape, num_parents, num_children), 1):
        amounts = [draw_amount(rng, plan), draw_amount(rng, plan)]
        children.append([number, key, *amounts, draw_day(rng, plan), draw_day(rng, plan)])
    tables = {words["parents"]: parents, words["children"]: children}
    if has_places(words):
        for parent, place in zip(parents, rng.sample(4 * [1, 2, 3, 4, 5], num_parents)):
            parent.append(place)
        tables[words["places"]] = [[number, name] for number, name in enumerate(rng.sample(PLACES, 5), 1)]
    if shape == "example":
        for parent, code in zip(parents, plan.statuses):
            parent[2] = code
        put_plain_rows(rng, children, plan)
    elif children and "big" in chosen:
        put_sum_at(rng, children, plan.limit)
    return tables


def draw_sizes(rng, shape):
    """(number of parents, number of children) of a database."""
    if shape == "wide":
        return 18, 24
    num_parents = 6 if shape == "example" else rng.choice((5, 6, 9))
    num_children = 0 if shape == "empty" else rng.randint(9, 14)
    return num_parents, num_children


def draw_keys(rng, shape, num_parents, num_children):
    """The parent of each child; where there are many, each has one."""
    keys = list(range(1, num_parents + 1)) if shape == "wide" else []
    while len(keys) < num_children:
        keys.append(rng.randint(1, num_parents))
    return keys


def draw_status(rng, plan):
    is_wide = plan.shape == "wide"
    if rng.random() < (0.05 if is_wide else 0.12):
        return None
    if is_wide and rng.random() < 0.8:
        return plan.statuses[0]
    return rng.choice((plan.statuses[0], *plan.statuses))


def draw_amount(rng, plan):
    """An amount at or beside the limit, or at or beside another one; None: it is missing."""
    if rng.random() < 0.12:
        return None
    limit = plan.limit
    if plan.shape == "wide":
        return limit + rng.choice((0, 1, 5, 30))
    other_limit = rng.choice(BIG)
    beside_another = rng.choice(BIG) + rng.choice((-1, 1))
    whole = rng.choice((limit, limit, limit - 1, limit + 1, limit - 5, limit + 5, other_limit, beside_another))
    has_cents = plan.unit == 100 and plan.shape != "example"
    cents = rng.randint(0, 99) if has_cents else 0
    return whole * plan.unit + cents


def draw_day(rng, plan):
    """A day at a border of this year, or in the last years; None: it is missing."""
    newest = plan.year - 1 if plan.shape == "quiet" else plan.year
    luck = rng.random()
    if luck < 0.08:
        return None
    if luck < 0.38:
        return rng.choice((f"{newest}-01-01", f"{newest}-12-31", f"{newest - 1}-12-31"))
    return f"{newest - rng.choice((0, 0, 1, 2))}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def put_plain_rows(rng, children, plan):
    """Let the first two children have all their values, and dates of this year."""
    for number, child in enumerate(children[:2], 1):
        amounts = [rng.choice(BIG) * plan.unit, rng.choice(BIG) * plan.unit]
        begin = f"{plan.year}-0{rng.randint(1, 9)}-1{number}"
        end = f"{plan.year}-0{rng.randint(1, 9)}-1{number + 3}"
        child[2:] = [*amounts, begin, end]


def put_sum_at(rng, children, limit):
    """Change amounts of a parent so that their sum lies at the limit or beside it: one of them or, of two, each."""
    child, column = rng.choice(children), rng.choice((2, 3))
    siblings = [sibling for sibling in children if sibling[1] == child[1] and sibling is not child]
    if len(siblings) == 1 and rng.random() < 0.5:
        child[column] = siblings[0][column] = (limit + 1) // 2
        return
    rest = sum(sibling[column] or 0 for sibling in siblings)
    child[column] = max(1, limit + rng.choice((-1, 0, 1)) - rest)


# ---------------------------------------------------------------------------------------------------------------------
# hidden databases: drawn until they tell the reference from wrong queries

def shapes_of(query):
    """The shapes of the hidden databases for a query, from the last one to the first."""
    if "{year}" in query:
        special = "quiet"
    elif "ORDER BY" in query:
        special = "wide"
    else:
        special = "plain"
    return ["empty", special] + ["plain"] * (NUM_HIDDEN - 2)


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
    mistakes = mutants_of(template.format(**codes), statuses)
    return list(dict.fromkeys([*queries, *mistakes]))


# ---------------------------------------------------------------------------------------------------------------------
# template tasks

def make_task(rng, name, told, accept):
    """One task of a family; the reason why there is none where no databases prove every decision.

    The id of a task with an unseen schema is of the test split."""
    schema, pattern = name.split("_")
    words = schema_words(schema)
    template = put(PATTERNS[pattern]["query"], words)
    slots, codes, style = draw_decisions(rng, template, words)
    reference = template.format(**codes)
    is_seen = words["unseen"] != "unseen"
    number = task_number(reference, codes, is_seen)
    if reason := accept(f"{number:016x}"):
        return reason

    # The databases depend on the reference alone, not on what was drawn for other tasks before.
    draw = functools.partial(fill, random.Random(number), words, codes | {"style": style})
    statuses = [stored(status, style) for status in words["statuses"].split("/")]
    rivals = rivals_of(template, codes, slots, statuses)
    with Judge(schema_text(words), reference, is_ordered(reference), canonical) as judge:
        for _ in range(MOST_TRIES):
            hidden = draw_hidden(draw, shapes_of(template), judge, rivals)
            if hidden:
                break
    if not hidden:
        return "a wrong query that no database shows"
    databases = [draw("example"), *hidden]

    needed = [needed_fact(slot, decision, codes[slot]) for slot, decision in slots.items()]
    to_ask = [fact for fact in needed if fact["by"] == "ask"]
    one_or_none = rng.sample(to_ask, int(rng.random() < 0.3))       # drawn even where `told` does not ask for it
    for fact in {"none": [], "some": one_or_none, "all": needed}[told]:
        fact["told"] = True
    hints = [rng.choice(slots[fact["slot"]]["options"][fact["code"]]) for fact in needed if fact["told"]]
    request = put(rng.choice(PATTERNS[pattern]["requests"]), words)
    tables = [f"{table}({', '.join(columns)})" for table, columns in tables_of(words).items()]
    return {"task_id": f"{number:016x}", "problem_description": f"{' '.join([request, *hints])}\n{', '.join(tables)}",
            "ground_truth": reference, "schema": schema_text(words), "databases": databases, "family": name,
            "seen": is_seen, "template": template, "facts": needed + list(map(idle_fact, QUERIES["idle"])),
            "idle_looks": put(QUERIES["idle_looks"], words)}


def draw_decisions(rng, template, words):
    """(the decisions of a template {slot: decision}, their drawn values {slot: code}, how a status is stored)."""
    slots = {slot: put(DECISIONS[slot], words) for slot in re.findall(r"\{(\w+)\}", template)}
    codes = {slot: rng.choice(list(decision["options"])) for slot, decision in slots.items()}
    style = codes.get("code", "word")
    if "code" in slots:
        ways = [stored(words["status"], any_style) for any_style in slots["code"]["options"]]
        slots["code"]["options"] = {code: [f"The status is stored as {code}."] for code in ways}
        codes["code"] = stored(words["status"], style)
    return slots, codes, style


def task_number(reference, codes, is_seen):
    """The number of a task, by its content; that of an unseen schema ends with 90 to 99, the test split."""
    content = f"{reference} {codes.get('unit')}"
    number = int(hashlib.sha256(content.encode()).hexdigest()[:15], 16)
    if is_seen:
        return number
    return number - number % 100 + 90 + number % 10


def needed_fact(slot, decision, code):
    """A fact of a task: a decision, with the value that was drawn for it."""
    guesses = [code, *sorted(set(decision["options"]) - {code})]
    fact = {"topic": decision["topic"], "questions": decision["questions"], "matters": True, "told": False,
            "slot": slot, "code": code, "by": "look" if "looks" in decision else "ask", "guesses": guesses}
    if "looks" not in decision:
        return {**fact, "replies": decision["options"][code]}
    cell = decision["cell"].replace("{code}", re.escape(code))
    return {**fact, "replies": QUERIES["not_mine"], "looks": decision["looks"], "columns": decision["columns"],
            "cell": cell}


def idle_fact(topic):
    questions = [f"What is {topic}?", f"Could you tell me {topic}?"]
    replies = ["That does not matter.", f"It does not depend on {topic}."]
    return {"topic": topic, "matters": False, "told": False, "by": "ask", "questions": questions, "replies": replies}


# ---------------------------------------------------------------------------------------------------------------------
# running SQL. The source of these functions is what the confined child program runs

def open_database(schema, tables):
    """A filled sqlite database in memory that lets SELECT through and nothing else, with limits on its size."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(schema)
    for name, rows in tables.items():
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', rows)
    for pragma in ("query_only = 1", "trusted_schema = 0", "hard_heap_limit = 67108864", "temp_store = 2"):
        connection.execute(f"PRAGMA {pragma}")
    for limit, value in ((sqlite3.SQLITE_LIMIT_LENGTH, 100_000), (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 10_000),
                         (sqlite3.SQLITE_LIMIT_COLUMN, 100), (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
                         (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 50), (sqlite3.SQLITE_LIMIT_VDBE_OP, 20_000),
                         (sqlite3.SQLITE_LIMIT_ATTACHED, 0), (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)):
        connection.setlimit(limit, value)
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
    forbidden = ("load_extension", "fts3_tokenizer", "random", "randomblob")

    def authorize(action, table, name, *_):
        return sqlite3.SQLITE_OK if action in allowed and name not in forbidden else sqlite3.SQLITE_DENY

    connection.set_authorizer(authorize)
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
        for cell in row:
            size += len(cell) if isinstance(cell, (str, bytes)) else 8
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
    rows = [list(map(plain_number, row)) for row in rows]
    numbers = range(len(names))
    orders = itertools.permutations(numbers)
    if len(names) > 5:                                               # too many to try: by what the columns hold
        orders = [sorted(numbers, key=lambda i: sorted(repr(row[i]) for row in rows))]
    tables = []
    for order in orders:
        table = [[row[i] for i in order] for row in rows]
        tables.append(table if ordered else sorted(table, key=repr))
    return [len(names), min(tables, key=repr)]


def as_table(names, rows):
    """Rows as the agent sees them: at most 8, and 600 characters."""
    lines = [" | ".join(names)[:200]]
    for row in rows[:8]:
        cells = ["NULL" if cell is None else str(cell) for cell in row]
        lines.append(" | ".join(cells)[:200])
    if not rows:
        lines.append("(no rows)")
    elif len(rows) > 8:
        lines.append(f"({len(rows)} rows)")
    return "\n".join(lines)[:600]


RUN_IN_CHILD = open_database, select, plain_number, canonical, as_table
SOURCE = "import itertools\nimport json\nimport sqlite3\n\n" + "\n\n".join(map(inspect.getsource, RUN_IN_CHILD))


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
    tests = {f"database{number + 1}": f"result({number})" for number in range(len(hidden))}
    return {**task, "ground_truth": program(task, hidden, task["ground_truth"]), "test_cases": tests}


def as_functions(task, answer):
    """(task, answer) as the scorer knows them. This is where an answer, wherever it comes from, becomes a query."""
    return as_function_task(task), program(task, task["databases"][1:], statement_of(answer))


# ---------------------------------------------------------------------------------------------------------------------
# what the agent knows, and what a turn is worth

def query_of(message):
    """The statement of a look; None where the message is none."""
    match = re.match(rf"\s*{LOOK}(.*)", message, re.DOTALL)
    return statement_of(match[1]) if match else None


def looked_at(task, query):
    """Which facts (indices) a look is for: those that a column of the statement shows."""
    columns = set(re.findall(r"\w+", query))
    shows_all = re.search(r"SELECT\s+\*", query, re.IGNORECASE)
    indices = []
    for index, fact in enumerate(task["facts"]):
        if fact["by"] == "look" and fact["columns"] and (shows_all or columns.intersection(fact["columns"])):
            indices.append(index)
    return indices


def facts_seen(task, query, table):
    """Which facts (indices) the rows of a look show."""
    cells = []
    for line in table.split("\n")[1:]:
        cells += line.split(" | ")
    return {index for index in looked_at(task, query) if has_cell(cells, task["facts"][index]["cell"])}


def has_cell(cells, pattern):
    return any(re.fullmatch(pattern, cell) for cell in cells)


def learned(task, history, place):
    """The agent learns what it asks the human about, and what the rows of a look show, which are the turn after it."""
    turn = history[place]
    if turn["role"] == "assistant" and query_of(turn["content"]) is None:
        return [index for index in topics_asked(task["facts"], turn["content"]) if task["facts"][index]["by"] == "ask"]
    before = history[place - 1] if place else turn
    query = query_of(before["content"]) if before["role"] == "assistant" != turn["role"] else None
    return () if query is None else facts_seen(task, query, turn["content"])


def in_one_line(statement):
    return " ".join(statement.split()).rstrip("; ")


def kind_of(task, known, texts_before, message):
    """Kinds: "ask needed", "ask repeat", "ask idle" (does not matter), "ask for a look" (the database shows it), "ask
    vague" (no topic); "look needed", "look repeat", "look idle" (shows nothing that matters); "right answer", "wrong
    answer", "early answer", as for functions."""
    answer, query = answer_of([{"content": message}], False), query_of(message)
    if answer is not None:
        return answer_kind(task, known, in_one_line(answer) == in_one_line(task["ground_truth"]))
    if query is not None:
        indices = looked_at(task, query)
        if not known.issuperset(indices):
            return "look needed"
        return "look repeat" if indices or message in texts_before else "look idle"
    indices = topics_asked(task["facts"], message)
    asked = [task["facts"][index] for index in indices]
    if not asked:
        return "ask vague"
    if any(fact["matters"] and fact["by"] == "ask" and index not in known for index, fact in zip(indices, asked)):
        return "ask needed"
    if any(fact["by"] == "look" for fact in asked):
        return "ask for a look"
    return "ask idle" if known.isdisjoint(indices) else "ask repeat"


def text_of(fact):
    """A decision, and how it stands in the reference."""
    return f"{fact['topic']}: {fact['code'].strip()}"


_facts = Facts(learned, kind_of, text_of)
known_facts, all_known, facts, facts_by_turn = _facts.known_facts, _facts.all_known, _facts.facts, _facts.facts_by_turn
turn_kind, turn_kinds, oracle_scores = _facts.turn_kind, _facts.turn_kinds, _facts.oracle_scores


# ---------------------------------------------------------------------------------------------------------------------
# the scripted agents

class Script(dialogue.ScriptedAgent):
    """It also asks the human what a look would show, looks at what shows nothing, and forgets."""

    VAGUE = ("Can you tell me more?", "What else should I know?", "Could you describe the data?")
    RATES, INFORMED_RATES = (0.03, 0.05, 0.12, 0.33), (0.01, 0.03, 0.04, 0.08)
    known_facts = staticmethod(known_facts)

    def ask(self, fact, history, rng, is_new):
        opener = rng.choice(OPENERS) if is_new and len(history) > 1 and fact["by"] == "ask" else ""
        return opener + asking(fact, rng)

    def useless(self, task, known, history, rng):
        facts = task["facts"]
        unknown = [index for index in range(len(facts)) if index not in known]
        to_look = [index for index in unknown if facts[index]["by"] == "look"]
        idle = [index for index in unknown if not facts[index]["matters"]]
        luck = rng.random()
        if luck < 0.3:
            return f"{LOOK} {rng.choice(task['idle_looks'])}"
        indices = to_look if to_look and luck < 0.6 else idle or range(len(facts))
        return rng.choice(facts[rng.choice(indices)]["questions"])

    def answer(self, task, known, rng):
        codes = {}
        for index in needed_facts(task):
            fact = task["facts"][index]
            knows = self.informed or index in known and rng.random() > 0.01
            codes[fact["slot"]] = fact["code"] if knows else rng.choice(fact["guesses"])
        return dialogue.answer_with(task, codes)


def asking(fact, rng):
    """What the agent says to learn a fact: a look where a look shows it."""
    if fact["by"] == "look":
        return f"{LOOK} {rng.choice(fact['looks'])}"
    return rng.choice(fact["questions"])


def asker_turn(task, history, max_rounds, rng):
    """What an asker says next that learns nothing in training.

    It knows the decisions of the family and their values, and takes each value for equally likely. It asks or looks
    where it expects most information; then it answers, and guesses what it has no round for."""
    facts, known = task["facts"], known_facts(task, history)
    num_guesses = {index: len(facts[index]["guesses"]) for index in needed_facts(task) if index not in known}
    if num_guesses and dialogue.num_agent_turns(history) + 1 < max_rounds:
        return asking(facts[max(num_guesses, key=num_guesses.get)], rng)
    codes = {}
    for index in needed_facts(task):
        fact = facts[index]
        codes[fact["slot"]] = fact["code"] if index in known else rng.choice(fact["guesses"])
    return dialogue.answer_with(task, codes)


PLAYERS = {"script": Script(), "script-informed": Script(informed=True), "script-asker": asker_turn}


# ---------------------------------------------------------------------------------------------------------------------
# what a task is

def owns(task):
    return "databases" in task


LOOK_KEYS = {"looks": list_of(str, 1), "columns": list_of(str, 1), "cell": str}
TASK = record({**TASK_KEYS, "schema": str, "databases": list_of(table_of(list_of(list)), 2)},
              {**MORE_KEYS, "template": str, "facts": list_of(dialogue.FACT), "idle_looks": list_of(str, 1)})


def check_task(task, where):
    check_kind(task, TASK, where)
    if not task.get("facts"):
        return
    check_keys(task, {"idle_looks": list, "template": str}, where)
    for index, fact in enumerate(task["facts"]):
        keys = {"by": one_of("ask", "look"), **(dialogue.SLOT_KEYS if fact["matters"] else {})}
        if fact.get("by") == "look":
            keys |= LOOK_KEYS
        check_keys(fact, keys, f"{where}: facts: item {index}")
    dialogue.check_facts(task, where)


def check_data(tasks, unsafe_scorer):
    return backend.check_data(list(map(as_function_task, tasks)), unsafe_scorer)


# ---------------------------------------------------------------------------------------------------------------------
# the rest of the interface (colbench/__init__.py)

def answer_of(history, is_last):
    """The statement that follows the marker, or stands before it where nothing follows; in the last round without a
    marker the whole turn, as it is."""
    content = history[-1]["content"]
    before, marker, after = content.partition(MARKER)
    if marker:
        return statement_of(after if after.strip("`~ \n") else before)
    return content if is_last else None


def answer_message(task):
    return f"{MARKER}\n{task['ground_truth']}"


lacks = dialogue.missing_field


def leak_of(task, reply):
    """How a reply of the human shows SQL: as code (dialogue.code_leak), or "query" (select … from a table)."""
    leak = dialogue.code_leak(task, reply)
    tables = "|".join(re.findall(r"CREATE TABLE (\w+)", task["schema"]))
    if leak != "fence" and re.search(rf"\bselect\b.+\bfrom\s+({tables})\b", reply, re.IGNORECASE | re.DOTALL):
        return "query"
    return leak


def mean(values):
    return sum(values) / max(1, len(values))


def measure(trajectories):
    """"databases_agree": the mean reward.
    "success_seen", "success_unseen": the success on schemas that are also in the training split, and on others.
    "looks": QUERY turns of a dialogue. "failed_looks": the share of them with an error.
    "faults" counts by reason the hidden databases whose rows do not agree."""
    looks, forced, faults = [], [], collections.Counter()
    for trajectory in trajectories:
        history = trajectory["dialogue_history"]
        looks += [turn["content"] for turn in history if turn.get("tool")]
        forced.append(dialogue.is_forced(trajectory))
        faults.update(fault.partition(":")[0] for fault in trajectory["faults"] if fault)
    metrics = {"databases_agree": mean([trajectory["reward"] for trajectory in trajectories]),
               "looks": len(looks) / len(trajectories),
               "failed_looks": mean([rows.startswith("Error:") for rows in looks]),
               "forced_answers": mean(forced), "faults": dict(faults.most_common())}
    for name, is_seen in (("seen", True), ("unseen", False)):
        successes = [defaults.eval_score(trajectory) for trajectory in trajectories
                     if trajectory["task"].get("seen") == is_seen]
        if successes:
            metrics |= {f"success_{name}": mean(successes), f"n_{name}": len(successes)}
    return metrics


class Environment(backend.Environment):
    """The scorer, the example databases, and the rule-based human."""

    TAKES = ("unsafe_scorer",)

    def __init__(self, unsafe_scorer=False):
        super().__init__(unsafe_scorer=unsafe_scorer)
        self.tables = {}                                            # {(task_id, query of a look): what came back}

    async def tool_reply(self, task, history):
        """The rows of a look, or what the database says is wrong with it. It blocks: what runs beside it would change
        which requests of a local model share a batch."""
        query = query_of(history[-1]["content"])
        if query is None:
            return None
        key = task_id(task), query
        if key not in self.tables:
            self.tables[key] = self.look(task, query)
        return self.tables[key]

    def look(self, task, query):
        """The rows of a query on the example database, as a table or an error."""
        code = program(task, task["databases"][:1], query)
        children = self.scorer.workers.get()
        try:
            [(status, text)], _ = self.scorer.run(children[1], code, ["table()"], [])
        finally:
            self.scorer.workers.put(children)
        if status == "ok":
            return text
        reason = text.partition(": ")[2] or text
        return f"Error: {reason}"[:600]

    async def simulator_chat(self, task, history):
        return dialogue.human_chat(SIMULATOR_SYSTEM.format(**task), history)

    async def score(self, pairs, explain=False):
        """"databases": whether the rows agree, for each hidden database; "faults": why they do not."""
        scores = await super().score([as_functions(*pair) for pair in pairs], explain)
        return list(map(database_row, scores))


def database_row(row):
    """A row of the scorer, whose tests are databases."""
    return {"databases" if key == "tests" else key: value for key, value in row.items()}
