"""SQL queries (an ambiguous question to a database): schemas, hidden decisions, the rule-based user simulator, looks
into an example database, kinds of turns, scores.

The user asks in a colleague's words ("How many customers had a big order this year?"). "facts" has their meaning: the
decisions, each of which matters, and plausible ones that do not. The user knows some ("by": "ask"), the database shows
others ("by": "look"). In each round the agent does one of three things:

    QUERY: SELECT …             a look: the rows of the example database come back as a table (8 rows, 600 characters)
    any other text              a message to the user, who answers it
    I WANT TO ANSWER: SELECT …  ends the dialogue

The answer (sql_text.py finds the query in it) is run on hidden databases, the reward is the share of them on which it
gives the rows of the solution. The databases are drawn until likely mistakes show (sql_mutants.py). Rows are a
multiset, or a list if the solution ends with ORDER BY. Names and order of columns are ignored, 1 equals 1.0, and
fractions may differ by 1e-12 of themselves, by 5e-10, and by what the order of a sum changes (rounding_of). All SQL of
an agent runs in the scorer's confined child program (sql_child.py).
"""
import collections
import contextlib
import functools
import hashlib
import itertools
import json
import random
import re
import sqlite3

from colbench import dialogue
from colbench.dialogue import answer_kind, asking_kind, FactDomain, mean, needed_facts, OPENERS, put, topics_asked
from colbench.domain import beside, task_kind
from colbench.schema import check_keys, list_of, one_of, record, table_of
from colbench.scorer import check_with_two_scorers
from colbench.sql_child import canonical, open_database, select
from colbench.sql_mutants import agreeing, mutants_of, open_empty
from colbench.sql_text import is_ordered, LOOK, statement_of, with_ties
from colbench.values import encode, equal_values, ROUNDING, tolerance_of

# ---------------------------------------------------------------------------------------------------------------------
# schemas, decisions and patterns (queries.json)
#
# A schema is two or three tables, joined by keys. Those marked "unseen" are only in the test split; their words also
# occur in other schemas, in other combinations. A pattern is a request whose query depends on decisions: what words can
# mean. "options" of a decision are {its code in the query: [what the user says about it, …]}. The user does not know a
# decision with "looks"; the database shows it to a look at one of the "columns", in a cell that matches "cell".

QUERIES = json.loads(beside("queries.json"))
SCHEMAS, DECISIONS, PATTERNS = QUERIES["schemas"], QUERIES["decisions"], QUERIES["patterns"]
NAMES, PLACES = QUERIES["names"].split(), QUERIES["places"].split()
BIG = [int(value) for value in DECISIONS["big"]["options"]]
LAST_YEAR = max(DECISIONS["year"]["options"])
NUM_HIDDEN = 6                  # hidden databases of a task; one of them has an empty table
FEW_DRAWS, MANY_DRAWS = 5, 100  # random databases of which one is taken, and for the last hidden one
MOST_TRIES = 12


def schema_words(name):
    """A schema's values for $words in requests, queries and decisions. A status is stored in four ways."""
    words = SCHEMAS[name]
    status = words["statuses"][0]
    return {**words, "status": status, "capitals": status.upper(), "letter": status[0].upper(), "small": status[0]}


def schema_text(words):
    """The statements that make the tables of a schema."""
    return put(QUERIES["tables with places" if "places" in words else "tables"], words)


def family_names():
    """Every schema with each of its possible patterns."""
    names = []
    for schema, words in SCHEMAS.items():
        without = "best" if "places" in words else "places"
        names += [f"{schema}_{pattern}" for pattern in PATTERNS if pattern != without]
    return names


def stored_statuses(words, codes):
    """How a database stores the statuses of a schema, if the decision says how it stores the first of them."""
    code = codes.get("code", "a word")
    statuses = words["statuses"]
    if len(code) == 1:
        statuses = [status[0] for status in statuses]
    return [status.upper() for status in statuses] if code.isupper() else statuses


# ---------------------------------------------------------------------------------------------------------------------
# databases

# The values of a random database lie at and beside the borders of decisions. They depend on
#   shape         see `fill`
#   limit         from here on an amount is big
#   other_limit   amounts also lie at this one, so that they do not show which is meant
#   year          this year
#   unit          100 if amounts are stored in cents, else 1
#   statuses      as they are stored; the request asks for the first
Plan = collections.namedtuple("Plan", "shape limit other_limit year unit statuses")


def fill(rng, words, codes, shape):
    """{table: rows} of a random database for a task with the decisions `codes` {slot: code}.

    shape: "example" (shows all that looks are for: the codes of a status, this year, a few plain rows; not what is
    big), "plain", "wide" (many parents, most of which match the request), "quiet" (no dates of this year) or "empty"
    (no children). In all of them keys are valid, names differ, amounts are positive, statuses are stored in one way,
    and no date is after this year."""
    other_limit = rng.choice(BIG)
    limit = other_limit if shape == "example" else int(codes.get("big", other_limit))
    year = int(codes.get("year", LAST_YEAR))
    unit = 100 if codes.get("unit") else 1
    plan = Plan(shape, limit, other_limit, year, unit, stored_statuses(words, codes))
    num_parents, num_children = draw_sizes(rng, shape)
    parents = []
    for number, name in enumerate(rng.sample(NAMES, num_parents), 1):
        parents.append([number, name, draw_status(rng, plan)])
    children = []
    keys = list(range(1, num_parents + 1)) if shape == "wide" else []           # of many parents each has a child
    keys += [rng.randint(1, num_parents) for _ in range(num_children - len(keys))]
    for number, key in enumerate(keys, 1):
        amounts = [draw_amount(rng, plan), draw_amount(rng, plan)]
        days = [draw_day(rng, plan), draw_day(rng, plan)]
        children.append([number, key, *amounts, *days])
    tables = {words["parents"]: parents, words["children"]: children}
    if "places" in words:
        place_of = rng.sample(4 * [1, 2, 3, 4, 5], num_parents)
        for parent, place in zip(parents, place_of):
            parent.append(place)
        places = rng.sample(PLACES, 5)
        tables[words["places"]] = [list(place) for place in enumerate(places, 1)]
    if shape == "example":
        for parent, status in zip(parents, plan.statuses):
            parent[2] = status
        put_plain_rows(rng, children, plan)
    elif children and "big" in codes:
        put_sum_at(rng, children, plan.limit)
    return tables


def draw_sizes(rng, shape):
    """(number of parents, number of children) of a database."""
    if shape == "wide":
        return 18, 24
    num_parents = 6 if shape == "example" else rng.choice((5, 6, 9))
    return num_parents, 0 if shape == "empty" else rng.randint(9, 14)


def draw_status(rng, plan):
    is_wide = plan.shape == "wide"
    if rng.random() < (0.05 if is_wide else 0.12):
        return None
    if is_wide and rng.random() < 0.8:
        return plan.statuses[0]
    return rng.choice((plan.statuses[0], *plan.statuses))


def draw_amount(rng, plan):
    """An amount at or beside the limit or the other one; None: it is missing."""
    if rng.random() < 0.12:
        return None
    limit = rng.choice((plan.limit, plan.other_limit))
    if plan.shape == "wide":
        return limit + rng.choice((0, 1, 5, 30))
    amounts = [limit + step for step in (0, 0, -1, 1, -5, 5)]
    amounts.append(rng.choice(BIG))
    amounts.append(rng.choice(BIG) + rng.choice((-1, 1)))
    amount = plan.unit * rng.choice(amounts)
    if plan.unit == 100 and plan.shape != "example":
        amount += rng.randint(0, 99)
    return amount


def draw_day(rng, plan):
    """A day at a border of this year, or in the last years; None: it is missing."""
    newest = plan.year - 1 if plan.shape == "quiet" else plan.year
    luck = rng.random()
    if luck < 0.08:
        return None
    if luck < 0.38:
        borders = f"{newest}-01-01", f"{newest}-12-31", f"{newest - 1}-12-31"
        return rng.choice(borders)
    year = newest - rng.choice((0, 0, 1, 2))
    month = rng.randint(1, 12)
    day = rng.randint(1, 28)
    return f"{year}-{month:02}-{day:02}"


def put_plain_rows(rng, children, plan):
    """Give the first two children all their values, and dates of this year."""
    for day, child in zip((11, 12), children):
        child[2] = rng.choice(BIG) * plan.unit
        child[3] = rng.choice(BIG) * plan.unit
        child[4] = f"{plan.year}-0{rng.randint(1, 9)}-{day}"
        child[5] = f"{plan.year}-0{rng.randint(1, 9)}-{day + 3}"


def put_sum_at(rng, children, limit):
    """Change one amount of a parent (or each of two) so that their sum is at or beside the limit."""
    child = rng.choice(children)
    column = rng.choice((2, 3))
    siblings = [sibling for sibling in children if sibling[1] == child[1] and sibling is not child]
    if len(siblings) == 1 and rng.random() < 0.5:
        half = (limit + 1) // 2
        child[column] = siblings[0][column] = half
        return
    rest = sum(sibling[column] or 0 for sibling in siblings)
    wanted_sum = limit + rng.choice((-1, 0, 1))
    child[column] = max(1, wanted_sum - rest)


# ---------------------------------------------------------------------------------------------------------------------
# hidden databases: drawn until they tell the solution from wrong queries

def shapes_of(query):
    """[(shape, number of draws, of which one is taken)] of the hidden databases for a query, in reverse order."""
    if "{year}" in query:
        special = "quiet"
    elif "ORDER BY" in query:
        special = "wide"
    else:
        special = "plain"
    plain = [("plain", FEW_DRAWS)] * (NUM_HIDDEN - 3)
    return [("empty", 1), (special, FEW_DRAWS), *plain, ("plain", MANY_DRAWS)]


def draw_hidden(draw, shapes, agreeing_on, rivals):
    """Hidden databases with the shapes of shapes_of, such that each of the queries `rivals` gives other rows than the
    solution on one of them; None if a rival is left. draw(shape) makes a database. agreeing_on(tables, queries) returns
    the queries that agree with the solution. Several databases are drawn per shape; the one with the fewest agreeing
    rivals is taken."""
    hidden = []
    for shape, most_draws in shapes:
        fewest = None
        for _ in range(most_draws):
            tables = draw(shape)
            left = agreeing_on(tables, rivals)
            if fewest is None or len(left) < len(fewest):
                best, fewest = tables, left
            if not left:
                break
        hidden.insert(0, best)
        rivals = fewest
    return None if rivals else hidden


def rivals_of(template, slots, codes, statuses):
    """The queries that must not pass: the solution with another value of one decision, and likely mistakes."""
    queries = mutants_of(template.format(**codes), statuses)
    for slot, decision in slots.items():
        for code in decision["options"].keys() - {codes[slot]}:
            changed = {**codes, slot: code}
            queries[template.format(**changed)] = slot
    return list(queries)


# ---------------------------------------------------------------------------------------------------------------------
# template tasks

def draw_databases(rng, words, template, slots, codes):
    """The example database and the hidden ones of a task, or None. They only depend on the solution, because the task's
    number is the seed of `rng`."""
    solution = template.format(**codes)
    draw = functools.partial(fill, rng, words, codes)
    rivals = rivals_of(template, slots, codes, stored_statuses(words, codes))
    with contextlib.closing(open_empty(schema_text(words))) as connection:
        agreeing_on = functools.partial(agreeing, connection, solution)
        for _ in range(MOST_TRIES):
            hidden = draw_hidden(draw, shapes_of(template), agreeing_on, rivals)
            if hidden:
                return [draw("example"), *hidden]
    return None


def task_number(solution, codes, is_seen):
    """The number of a task, a hash of its content. With an unseen schema it ends with 90 to 99 (the test split)."""
    content = f"{solution} {codes.get('unit')}"
    number = int(hashlib.sha256(content.encode()).hexdigest()[:15], 16)
    if is_seen:
        return number
    last_two_digits = number % 100
    return number - last_two_digits + 90 + number % 10


def needed_fact(slot, decision, code):
    """A fact of a task: a decision with the value that was drawn for it."""
    is_asked = "looks" not in decision
    fact = {
        "topic": decision["topic"],
        "questions": decision["questions"],
        "matters": True,
        "told": False,
        "slot": slot,
        "code": code,
        "by": "ask" if is_asked else "look",
        "guesses": [code, *sorted(decision["options"].keys() - {code})],
        "replies": decision["options"][code] if is_asked else QUERIES["not_mine"],
    }
    if not is_asked:
        fact |= {"looks": decision["looks"], "columns": decision["columns"]}
        fact["cell"] = decision["cell"].replace("{code}", re.escape(code))
    return fact


# ---------------------------------------------------------------------------------------------------------------------
# what the confined child program runs

PROGRAM = """{child}
import json
SCHEMA, DATABASES, STATEMENT = json.loads({data!r})
def rows(i):
    return select(open_database(SCHEMA, DATABASES[i]), STATEMENT)
def result(i):
    return canonical(*rows(i), {ordered})
def table():
    return as_table(*rows(0))
"""
CHILD = beside("sql_child.py")


def program(task, databases, statement):
    """Python source for the child: result(i) returns the rows of `statement` on database i, table() shows them."""
    data = json.dumps([task["schema"], databases, statement])
    data = data.replace("/", r"\/")                                 # so that it has no </think>
    return PROGRAM.format(child=CHILD, data=data, ordered=is_ordered(task["ground_truth"]))


def as_function_task(task):
    """A task in the scorer's format: its tests are the hidden databases."""
    hidden = task["databases"][1:]
    solution = program(task, hidden, task["ground_truth"])
    tests = {f"database{number + 1}": f"result({number})" for number in range(len(hidden))}
    return {**task, "ground_truth": solution, "test_cases": tests, "rounding": rounding_of(hidden)}


def rounding_of(databases):
    """How much sums over the fractions of a database may differ by their order, or by rounding to 9 decimals."""
    largest = 0.0
    for tables in databases:
        rows = itertools.chain(*tables.values())
        cells = [abs(cell) for cell in itertools.chain(*rows) if isinstance(cell, float)]
        largest = max(largest, sum(cells))
    return max(5e-10, ROUNDING * largest)


# ---------------------------------------------------------------------------------------------------------------------
# the agent's knowledge, and kinds of turns

def query_of(message):
    """The statement of a look; None if the message is not a look."""
    match = re.match(rf"\s*{LOOK}(.*)", message, re.DOTALL)
    return statement_of(match[1]) if match else None


def looked_at(task, query):
    """Indices of the facts that a look is for: a column of the statement shows them."""
    columns = set(re.findall(r"\w+", query))
    shows_all = re.search(r"SELECT\s+\*", query, re.IGNORECASE)
    return {index for index, fact in enumerate(task["facts"])
            if fact["by"] == "look" and (shows_all or columns.intersection(fact["columns"]))}


def facts_seen(task, query, table):
    """Indices of the facts that the table of a look shows."""
    cells = re.split(r" \| |\n", table.partition("\n")[2])
    indices = set()
    for index in looked_at(task, query):
        pattern = re.compile(task["facts"][index]["cell"])
        if any(map(pattern.fullmatch, cells)):
            indices.add(index)
    return indices


def in_one_line(statement):
    return " ".join(statement.split()).rstrip("; ")


# ---------------------------------------------------------------------------------------------------------------------
# the scripted agents

class Script(dialogue.ScriptedAgent):
    """A scripted agent that also asks the user about facts of a look, makes useless looks, and forgets."""

    VAGUE = ("Can you tell me more?", "What else should I know?", "Could you describe the data?")
    RATES, INFORMED_RATES = (0.03, 0.05, 0.12, 0.33), (0.01, 0.03, 0.04, 0.08)
    FORGET_RATE = 0.01

    def ask(self, fact, history, rng, is_new):
        if is_new and len(history) > 1 and fact["by"] == "ask":
            return rng.choice(OPENERS) + asking(fact, rng)
        return asking(fact, rng)

    def useless(self, task, known, history, rng):
        facts = task["facts"]
        unknown = sorted(set(range(len(facts))) - known)
        to_look = [index for index in unknown if facts[index]["by"] == "look"]
        idle = [index for index in unknown if not facts[index]["matters"]]
        luck = rng.random()
        if luck < 0.3:
            return f"{LOOK} {rng.choice(task['idle_looks'])}"
        indices = to_look if to_look and luck < 0.6 else idle or range(len(facts))
        index = rng.choice(indices)
        return rng.choice(facts[index]["questions"])


def asking(fact, rng):
    """The agent's message to learn a fact: a look, if a look shows it."""
    if fact["by"] == "look":
        return f"{LOOK} {rng.choice(fact['looks'])}"
    return rng.choice(fact["questions"])


# ---------------------------------------------------------------------------------------------------------------------
# running queries, and the user simulator

class QueryEnvironment(dialogue.FactEnvironment):
    """The scorer, the example databases, and the user simulator."""

    TAKES = ("unsafe_scorer",)
    VERDICTS = "databases"
    SIMULATOR_SYSTEM = beside("prompts/sql_simulator.txt")

    def __init__(self, unsafe_scorer=False):
        super().__init__(unsafe_scorer=unsafe_scorer)
        self.tables = {}                                # {(schema, example database, query): what came back}

    async def tool_reply(self, task, history):
        """The rows of a look, or the database's error message. It blocks, so that it cannot change which requests of a
        local model share a batch."""
        query = query_of(history[-1]["content"])
        if query is None:
            return None
        key = task["schema"], repr(task["databases"][0]), query
        if key not in self.tables:
            self.tables[key] = self.look(task, query)
        return self.tables[key]

    async def simulator_chat(self, task, history):
        """Without looks: their rows, which a query can turn into any text, would count as the user's own words."""
        talk = history[:1]
        for place in range(1, len(history), 2):
            if query_of(history[place]["content"]) is None:
                talk += history[place:place + 2]                     # the agent's turn and its reply
        return await super().simulator_chat(task, talk)

    def look(self, task, query):
        """The rows of a query on the example database, as a table or an error."""
        code = program(task, task["databases"][:1], query)

        def run(children):
            return children[1].run(code, ["table()"], self.scorer.time_limit_s, [])

        [([(status, text)], _)] = self.scorer.for_each(run, [()])
        if status == "ok":
            return text
        reason = text.partition(": ")[2] or text
        return f"Error: {reason}"[:600]

    async def verdicts(self, pairs, explain):
        """"databases": whether the rows agree, for each hidden database; "faults": why they do not."""
        function_pairs = []
        for task, answer in pairs:
            query = statement_of(answer)
            function_pairs.append((as_function_task(task), program(task, task["databases"][1:], query)))
        return await super().verdicts(function_pairs, explain)


def doubt_about(task, tables):
    """Why the rows of the solution on a database do not decide which answers are right, or None.

    The pragma only reveals an open order without ORDER BY, so ties are also sorted up and down."""
    solution = task["ground_truth"]
    runs = [((), 1, solution),
            (["reverse_unordered_selects = 1"], 1, solution),
            ((), 1, with_ties(solution)),
            ((), -1, with_ties(solution))]
    results = []
    for pragmas, step, query in runs:
        try:
            connection = open_database(task["schema"], tables, pragmas)
        except (sqlite3.Error, OverflowError) as error:
            return str(error)
        connection.create_function("tie", 0, itertools.count(0, step).__next__)
        with contextlib.suppress(sqlite3.Error, ValueError):        # a compound query has no column tie()
            results.append(canonical(*select(connection, query), is_ordered(solution)))
        connection.close()
    tolerance = tolerance_of([], rounding_of([tables]))
    if all(equal_values(encode(result), encode(results[0]), tolerance) for result in results):
        return None
    return "the solution leaves the order of its rows open: ties of ORDER BY, or LIMIT"


# ---------------------------------------------------------------------------------------------------------------------
# the domain

BY = record({"by": one_of("ask", "look")})
SHOWN = record({"looks": list_of(str, 1), "columns": list_of(str, 1), "cell": str})


def fact_kind(fact):
    """The kind (schema.py) of a fact that the user knows or the database shows."""
    return dialogue.fact_kind(fact) or BY(fact) or (SHOWN(fact) if fact["by"] == "look" else None)



class Sql(FactDomain):
    """Tasks with databases. To the scorer they are functions (as_function_task)."""

    NOUN = "query"
    COLUMNS = (
        ("databases_agree", "databases", ".3f"),
        ("success_seen", "seen", ".3f"),
        ("success_unseen", "unseen", ".3f"),
        ("all_known", "all known", ".3f"),
        ("success_when_known", "when known", ".3f"),
        ("looks", "looks", ".2f"))
    MEANINGS = {
        "databases": "mean share of the databases on which the answer is right",
        "seen": "success on tasks whose schema is one of the training tasks",
        "unseen": "success on tasks whose schema no training task has",
        "looks": "mean number of queries that the agent ran before its answer",
        **FactDomain.MEANINGS}
    SCORE_KEYS = "reward", "databases", "faults"
    AGENT_SYSTEM = beside("prompts/sql_agent.txt")
    JUDGE = beside("prompts/sql_judge.txt")
    FAMILIES = family_names()
    TASK = staticmethod(task_kind(
        {"schema": str, "databases": list_of(table_of(list_of(list)), 2)},
        {"seen": bool, "template": str, "facts": list_of(fact_kind), "idle_looks": list_of(str, 1)}))
    SCRIPT = Script
    Environment = QueryEnvironment

    def __init__(self):
        super().__init__()
        self.PLAYERS["script-asker"] = self.asker_turn

    def owns(self, task):
        return "databases" in task

    def check_task(self, task, where):
        super().check_task(task, where)
        if task.get("facts"):
            check_keys(task, {"idle_looks": list, "template": str}, where)

    def make_task(self, rng, name, told, accept):
        """Rejects a draw if no databases prove every decision. Tasks with an unseen schema are in the test split."""
        schema, pattern = name.split("_")
        words = schema_words(schema)
        template = put(PATTERNS[pattern]["query"], words)
        slots = {slot: put(DECISIONS[slot], words) for slot in re.findall(r"\{(\w+)\}", template)}
        codes = {slot: rng.choice(list(decision["options"])) for slot, decision in slots.items()}
        number = task_number(template.format(**codes), codes, "unseen" not in words)
        if reason := accept(f"{number:016x}"):
            return reason
        databases = draw_databases(random.Random(number), words, template, slots, codes)
        if not databases:
            return "a wrong query that no database shows"

        facts = [needed_fact(slot, decision, codes[slot]) for slot, decision in slots.items()]
        to_ask = [fact for fact in facts if fact["by"] == "ask"]
        one_or_none = rng.sample(to_ask, int(rng.random() < 0.3))       # drawn even if `told` does not need it
        hints = []
        for fact in {"none": [], "some": one_or_none, "all": facts}[told]:
            fact["told"] = True
            sentences = slots[fact["slot"]]["options"][fact["code"]]
            hints.append(rng.choice(sentences))
        request = put(rng.choice(PATTERNS[pattern]["requests"]), words)
        tables = re.findall("CREATE TABLE (.*);", re.sub(" TEXT| INTEGER", "", schema_text(words)))
        return {
            "task_id": f"{number:016x}",
            "problem_description": " ".join([request, *hints]) + "\n" + ", ".join(tables),
            "ground_truth": template.format(**codes),
            "schema": schema_text(words),
            "databases": databases,
            "family": name,
            "seen": "unseen" not in words,
            "template": template,
            "facts": facts + [put(QUERIES["idle fact"], {"topic": topic}) for topic in QUERIES["idle"]],
            "idle_looks": put(QUERIES["idle_looks"], words),
        }

    def answer_of(self, history, is_last):
        """The statement after the marker, or before it if nothing follows. In the last round a turn without a marker is
        the answer, unchanged."""
        content = history[-1]["content"]
        before, marker, after = content.partition(self.MARKER)
        if marker:
            return statement_of(after if after.strip("`~ \n") else before)
        return content if is_last else None

    def learned(self, task, message, reply):
        """The agent learns the facts that it asks about and the user answers, and those that a look shows."""
        query = query_of(message)
        if query is not None:
            return facts_seen(task, query, reply)
        answered = dialogue.facts_answered(task["facts"], message, reply)
        return [index for index in answered if task["facts"][index]["by"] == "ask"]

    def kind_of(self, task, known, history, message):
        """Kinds: "ask needed", "ask repeat", "ask idle" (does not matter), "ask for a look" (the database shows it),
        "ask vague" (no topic); "look needed", "look repeat", "look idle" (shows nothing that matters); "right answer",
        "wrong answer", "early answer", as for functions."""
        answer, query = self.answer_of([{"content": message}], False), query_of(message)
        if answer is not None:
            return answer_kind(task, known, in_one_line(answer) == in_one_line(task["ground_truth"]))
        if query is not None:
            indices = looked_at(task, query)
            if not known.issuperset(indices):
                return "look needed"
            is_repeated = message in [turn["content"] for turn in history]
            return "look repeat" if indices or is_repeated else "look idle"
        asked = topics_asked(task["facts"], message)
        asked_user = [index for index in asked if task["facts"][index]["by"] == "ask"]
        kind = asking_kind(task, known, asked_user)
        return "ask for a look" if len(asked_user) < len(asked) and kind != "needed" else f"ask {kind}"

    def text_of(self, fact):
        """A decision, and how it stands in the solution."""
        return f"{fact['topic']}: {fact['code'].strip()}"

    def asker_turn(self, task, history, max_rounds, rng):
        """The next message of an asker that needs no training.

        It knows the decisions of the family and their values, which it assumes equally likely. In each round it asks or
        looks for the fact with the most expected information. Then it answers, and guesses the other facts."""
        known = self.known_facts(task, history)
        unknown = [task["facts"][index] for index in needed_facts(task) if index not in known]
        if unknown and dialogue.num_agent_turns(history) + 1 < max_rounds:
            fact = max(unknown, key=lambda fact: len(fact["guesses"]))
            return asking(fact, rng)
        return self.best_answer(task, known, rng)

    def leak_of(self, task, reply):
        """How a reply of the simulator shows SQL: as code (FactDomain.leak_of), or "query" (select … from a table)."""
        leak = super().leak_of(task, reply)
        tables = "|".join(re.findall(r"CREATE TABLE (\w+)", task["schema"]))
        if leak != "fence" and re.search(rf"\bselect\b.+\bfrom\s+({tables})\b", reply, re.IGNORECASE | re.DOTALL):
            return "query"
        return leak

    def measure(self, trajectories):
        """"databases_agree": the mean reward. "looks": looks of a dialogue.
        "success_seen", "success_unseen": the success on schemas that are also in the training split, and on others."""
        num_looks, successes = 0, {}
        for trajectory in trajectories:
            num_looks += sum("tool" in turn for turn in trajectory["dialogue_history"])
            if "seen" in trajectory["task"]:
                name = "success_seen" if trajectory["task"]["seen"] else "success_unseen"
                successes.setdefault(name, []).append(self.eval_score(trajectory))
        metrics = {name: mean(values) for name, values in successes.items()}
        return {"databases_agree": mean([trajectory["reward"] for trajectory in trajectories]),
                "looks": num_looks / len(trajectories), **metrics, **super().measure(trajectories)}

    def check_data(self, tasks, unsafe_scorer):
        checks = check_with_two_scorers(list(map(as_function_task, tasks)), unsafe_scorer)
        for task, check in zip(tasks, checks):
            if doubt := self.doubt_of(task):
                check["findings"]["order"] = doubt
        return checks

    def doubt_of(self, task):
        """The rows of the solution on a database, or their order, are not determined."""
        for number, tables in enumerate(task["databases"][1:], 1):
            if doubt := doubt_about(task, tables):
                return f"database{number}: {doubt}"
        return None
