"""colbench/sql.py: tasks whose decisions matter, looks, kinds of turns, simulators, scripted agents, scores of hostile
and of ordinary queries; the query in what models write around it (sql_text.py)."""
import asyncio
import collections
import contextlib
import itertools
import json
import random
import re
import time

import pytest

from colbench import in_split, make_tasks, sql, sql_mutants
from colbench.dialogue import topics_asked
from colbench.sql import BIG, LAST_YEAR, looked_at, SCHEMAS, Sql
from colbench.sql_child import canonical
from colbench.sql_text import begins_as, is_ordered, MAX_CHARS, QUERY, statement_of
from colbench.values import encode, equal_values
from conftest import call, read, ROOT, turns, write
from lib.statistics import measure_turns

# schema, databases and references; {"ordinary": {reference: other ways to write it}, "hostile": {the first fault, or a
# part of it: answers}}; {"wrappings", "with marker": what stands around {q}, the query}; {"statements": [a text, its
# statement (none: the text)]}; {"mutants": {a query: parts that each stand in one of its mutants}}.
GIVEN = json.loads((ROOT / "tests" / "queries.json").read_text())
SCHEMA, DATABASES, REFERENCES, WRAPPINGS = (GIVEN[key] for key in ("schema", "databases", "references", "wrappings"))


def task_of(reference):
    return {"problem_description": "How much?", "ground_truth": REFERENCES[reference], "schema": SCHEMA,
            "databases": DATABASES}


@pytest.fixture(scope="module")
def environment():
    with sql.Environment() as environment:
        yield environment


def score(environment, reference, *answers):
    """The verdicts of answers, each on six databases."""
    verdicts = asyncio.run(environment.score([(task_of(reference), answer) for answer in answers]))
    for verdict in verdicts:
        assert len(verdict["databases"]) == 6 and verdict["reward"] == sum(verdict["databases"]) / 6
    return verdicts


def look(environment, query, task=None):
    return asyncio.run(environment.tool_reply(task or task_of("sum"), turns("?", f"QUERY: {query}")))


@pytest.mark.parametrize("reference", REFERENCES)
def test_ordinary_variants_pass(environment, reference):
    answers = GIVEN["ordinary"][reference]
    verdicts = score(environment, reference, *answers)
    assert [answer for answer, verdict in zip(answers, verdicts) if verdict["faults"] != [None] * 6] == []


def test_rows_are_a_list_only_where_the_reference_orders(environment):
    turned = REFERENCES["ordered"].replace("COUNT(*) DESC, c.name", "COUNT(*), c.name DESC")
    unordered = REFERENCES["ordered"].partition("ORDER")[0]
    assert all(0 < verdict["reward"] < 1 for verdict in score(environment, "ordered", turned, unordered))


HOSTILE = GIVEN["hostile"]
for fault, answer in {
        "one statement": REFERENCES["sum"] + "; --\nATTACH ':memory:' AS x",
        "overflow": "SELECT " + "(" * 2000 + "1" + ")" * 2000, "too many columns": "SELECT " + "1, " * 500 + "1",
        "too many terms": "SELECT 1 " + "UNION ALL SELECT 1 " * 100, "too large": "SELECT 1" + " " * 20_000,
        "larger than": "SELECT 1 -- " + "x" * (1 << 21), "null character": "SELECT \0 1",
        "surrogates": "SELECT '\ud800'"}.items():
    HOSTILE.setdefault(fault, []).append(answer)


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_and_odd_answers_fail_and_harm_nobody(environment, fault):
    assert sum(map(len, HOSTILE.values())) == 57
    task = {**task_of("sum"), "databases": DATABASES[:3]}
    answers = [*HOSTILE[fault], REFERENCES["sum"]]
    *verdicts, right = asyncio.run(environment.score([(task, answer) for answer in answers]))
    for verdict, answer in zip(verdicts, HOSTILE[fault]):
        assert verdict["reward"] < 1 and fault in verdict["faults"][0], (answer[:80], verdict["faults"])
    assert right["reward"] == 1


@pytest.mark.parametrize("rows, other_rows, equal", [
    ([(1,), (1,)], [(1,)], False), ([("1",)], [(1,)], False), ([(1,)], [(None,)], False), ([], [], True),
    ([(float("inf"),)], [(float("inf"),)], True), ([(0.1 + 0.2,)], [(0.3,)], True), ([(0.3,)], [(0.31,)], False),
    ([(5.6e-17,)], [(0,)], True), ([(1e-8,)], [(0,)], False),
    ([(12345.678901,)], [(12345.678901000002,)], True), ([(12345.67890,)], [(12345.67899,)], False),
    ([(1234567891,)], [(1234567891.0,)], True), ([(1234567891,)], [(1234567891.0000002,)], True),
    ([(1234567891,)], [(1234567892.0,)], False), ([(-123456789012,)], [(-123456789012.0,)], True),
    ([(1234567891.0,)], [(1234567892.0,)], False),
    # on both sides of where rounding would make two numbers of them, alone and beside a row of the same name
    ([(1234567891.5,)], [(1234567891.4999998,)], True), ([(123456789.5,)], [(123456789.49999999,)], True),
    ([(0.1234567895,)], [(0.12345678949999999,)], True),
    ([("z", 1234567891.5), ("a", 1234567892.2)], [("a", 1234567892.2), ("z", 1234567891.4999998)], True),
    ([("z", 1234567891.5), ("a", 1234577892.2)], [("a", 1234567891.5), ("z", 1234577892.2)], False)])
def test_which_rows_are_equal(rows, other_rows, equal):
    """Whatever the names of columns and, unless ordered, the order of rows; numbers within rounding."""
    names = range(len(rows[0])) if rows else "a"
    assert equal_values(encode(canonical(names, rows, False)), encode(canonical(names, other_rows, False))) == equal
    assert canonical("ab", [], False) != canonical("a", [], False) == canonical("n", [], True)
    assert canonical("a", [(1,), (2,)], True) != canonical("a", [(2,), (1,)], True)
    assert canonical(range(100), [], False) == [100, []]            # columns that hold the same: 100! orders


def test_sums_may_differ_by_the_rounding_of_what_they_sum(environment):
    """Sums of large amounts, and sums that cancel."""
    def rewards(databases, *columns):
        task = {"schema": "CREATE TABLE t (id INTEGER PRIMARY KEY, a REAL, b REAL);", "databases": databases,
                "ground_truth": "SELECT SUM(a) - SUM(b) FROM t", "problem_description": "?"}
        verdicts = asyncio.run(environment.score([(task, f"SELECT {column} FROM t") for column in columns]))
        return [verdict["reward"] for verdict in verdicts]

    draw, large, cancelling = random.Random(0), [], []
    for _ in range(20):
        large.append({"t": [[n, draw.randrange(10 ** 9) + 0.7, draw.randrange(10 ** 8) + 0.2] for n in range(9)]})
    assert rewards(large, "SUM(a - b)", "SUM(a - b) + 100") == [1, 0]
    for _ in range(6):
        prices = [round(draw.uniform(100, 50_000), 2) for _ in range(300)]
        rows = [[n, price, round(price + draw.uniform(-5, 5), 2)] for n, price in enumerate(prices)]
        cancelling.append({"t": rows})
    assert rewards(cancelling, "SUM(a - b)", "ROUND(SUM(a - b), 2)", "SUM(a - b) + 0.01") == [1, 1, 0]


def test_tables_are_equal_if_an_order_of_their_columns_makes_them_so():
    rng = random.Random(0)
    for _ in range(150):
        width, height = rng.randint(1, 6), rng.randint(1, 5)
        names = "abcdef"[:width]
        rows = [tuple(rng.choice((1, 2, "x", None)) for _ in names) for _ in range(height)]
        columns = rng.sample(range(width), width)
        same = [tuple(row[i] for i in columns) for row in rows]
        assert canonical(names, rows, True) == canonical(names, same, True)
        rng.shuffle(same)
        assert canonical(names, rows, False) == canonical(names, same, False)
        mixed = [rng.sample(column, height) for column in zip(*rows)]   # each column has its values, in other rows
        orders = [sorted(zip(*order), key=repr) for order in itertools.permutations(mixed)]
        assert (sorted(rows, key=repr) in orders) == (canonical(names, rows, False) ==
                                                      canonical(names, list(zip(*mixed)), False))


def test_a_look_shows_a_short_table_or_the_database_s_error(environment):
    assert look(environment, "SELECT id, status FROM customers WHERE id > 2") == "id | status\n3 | active\n4 | NULL"
    assert look(environment, "```sql\nSELECT MAX(placed) FROM orders\n```") == "MAX(placed)\n2025-01-01"
    assert look(environment, "SELECT 1 WHERE 0") == "1\n(no rows)"
    many = look(environment, "SELECT a.id FROM customers a, customers b")
    assert many == "id\n" + "1\n" * 4 + "2\n" * 4 + "(16 rows)"
    assert len(look(environment, "SELECT hex(zeroblob(2000)), 1 FROM customers a, customers b")) == 600
    assert look(environment, "SELECT x FROM orders") == "Error: no such column: x"
    assert look(environment, "DELETE FROM orders") == "Error: not authorized"
    assert asyncio.run(environment.tool_reply(task_of("sum"), turns("?", "Which year?"))) is None
    task = task_of("sum")
    key = task["schema"], repr(task["databases"][0]), "DELETE FROM orders"
    assert environment.tables[key] == "Error: not authorized"        # kept


class Unseen(Sql):
    """The families whose schemas are in the test split alone."""

    FAMILIES = [name for name in sql.FAMILIES if "unseen" in SCHEMAS[name.split("_")[0]]]


@pytest.fixture(scope="module")
def tasks():
    """{split: tasks}: of each family one, 15 without stated decisions, and of each unseen family one."""
    return {"train": make_tasks(sql, len(sql.FAMILIES), 0, "train", "some"),
            "validation": make_tasks(sql, 15, 1, "validation", "none"),
            "test": make_tasks(Unseen(), len(Unseen.FAMILIES), 0, "test", "all")}


@pytest.fixture(scope="module")
def parts(tasks):
    """[(task, {slot: fact} of its decisions, names of its tables)] of all tasks."""
    return [(task, {fact["slot"]: fact for fact in task["facts"] if fact["matters"]}, list(task["databases"][0]))
            for task in itertools.chain(*tasks.values())]


def test_unseen_schemas_are_in_the_test_split_alone_and_of_known_words(tasks):
    for split, split_tasks in tasks.items():
        assert all(task["seen"] == (split != "test") and in_split(task["task_id"], split) for task in split_tasks)
    assert {task["family"].split("_")[0] for task in tasks["test"]} == {"theatre", "bank", "garage"}
    words = {True: set(), False: set()}                             # {whether a schema is unseen: its words}
    for schema in SCHEMAS.values():
        words["unseen" in schema].update(str(word) for key, word in schema.items() if key != "unseen")
    assert words[True] and words[True] <= words[False]
    # a schema has "places" or "best"
    assert {"rental_count", "rental_places", "gym_best"} <= set(sql.FAMILIES) and "gym_places" not in sql.FAMILIES


def test_hidden_databases_show_each_wrong_decision_and_each_likely_mistake(parts):
    kinds = collections.Counter()
    for task, facts, (parents, *_) in parts:
        reference, template = task["ground_truth"], task["template"]
        codes = {slot: fact["code"] for slot, fact in facts.items()}
        assert 3 <= len(facts) <= 6 and "look" in [fact["by"] for fact in facts.values()]
        assert template.format(**codes) == reference
        statuses = {row[2] for tables in task["databases"] for row in tables[parents]} - {None}
        mutants = sql_mutants.mutants_of(reference, sorted(statuses))
        kinds.update(mutants.values())
        assert len(mutants) > 10
        left = {*mutants}
        for slot, fact in facts.items():
            left.update(template.format(**{**codes, slot: code}) for code in fact["guesses"][1:])
        with contextlib.closing(sql_mutants.open_empty(task["schema"])) as connection:
            for tables in task["databases"][1:]:
                left = sql_mutants.agreeing(connection, reference, tables, left)
        assert left == [], reference
    assert set(kinds) == {"threshold", "limit", "aggregate", "tie", "missing value", "year", "unit", "status"}
    assert min(kinds.values()) > 5


@pytest.mark.parametrize("query, parts", GIVEN["mutants"].items())
def test_mutants_by_hand(query, parts):
    mutants = list(sql_mutants.mutants_of(query, ["A", "B"]))
    for part in parts:
        assert len([mutant for mutant in mutants if part in mutant]) == 1, part
    assert query not in mutants


def test_databases_keep_what_the_domain_tells_the_agent(parts):
    """Keys lead somewhere, names differ, amounts are positive, a status is stored in one way, no date is behind this
    year. The last one has no children; the one before it many parents, or nothing of this year."""
    for task, facts, (parents, children, *places) in parts:
        statuses = {row[2] for row in task["databases"][0][parents]}
        dates = [[date for row in tables[children] for date in row[4:6] if date] for tables in task["databases"]]
        assert all(re.fullmatch(r"20\d\d-(0[1-9]|1[012])-(0[1-9]|[12]\d|3[01])", date) for date in sum(dates, []))
        codes = {slot: fact["code"] for slot, fact in facts.items()}
        year, most = codes.get("year", LAST_YEAR), 20_000 if codes.get("unit") else 400
        assert max(sum(dates, []))[:4] == year == max(row[4] for row in task["databases"][0][children] if row[4])[:4]
        for tables in task["databases"]:
            for table in (parents, *places):
                assert len({row[1] for row in tables[table]}) == len(tables[table])
            assert {row[2] for row in tables[parents]} <= statuses | {None}
            assert {row[1] for row in tables[children]} <= {row[0] for row in tables[parents]}
            assert not places or {row[3] for row in tables[parents]} <= {row[0] for row in tables[places[0]]}
            amounts = {cell for row in tables[children] for cell in row[2:4]} - {None}
            assert all(type(amount) is int and 0 < amount < most for amount in amounts)
        assert task["databases"][-1][children] == [] and len(task["databases"]) == 7
        pattern = task["family"].split("_")[1]
        if pattern == "names":
            assert len(task["databases"][-2][parents]) == 18
        elif pattern != "status":
            assert max(dates[-2])[:4] < year


def test_the_databases_of_a_reference_are_the_same_whatever_the_seed():
    def make(seed):
        rng = random.Random(0)
        return sql.make_task(rng, "gym_names", "some", lambda task_id: rng.seed(seed))       # once it has the reference

    first, second = make(1), make(2)
    assert first["databases"] == second["databases"]
    assert first["problem_description"] != second["problem_description"]


def limit_in(tables, children, columns=slice(2, 4)):
    """The limit that the amounts of a database lie at, by the looks of them."""
    amounts = [amount for row in tables[children] for amount in row[columns]]
    return max(BIG, key=lambda limit: sum(abs(amount - limit) <= 5 for amount in amounts if amount))


def test_a_look_does_not_show_what_is_big(parts):
    found = [limit_in(task["databases"][0], children) == int(facts["big"]["code"])
             for task, facts, (_, children, *_) in parts if "big" in facts]
    assert len(found) > 20 and sum(found) < 0.3 * len(found)        # by chance a tenth


def test_a_query_that_takes_the_limit_from_the_amounts_fails(parts):
    guess = ("(SELECT column1 FROM (VALUES {limits}) ORDER BY (SELECT COUNT(*) FROM (SELECT {0} AS a FROM {table} "
             "UNION ALL SELECT {1} FROM {table}) WHERE abs(a - column1) <= 5) DESC LIMIT 1)")
    limits, passed = ", ".join(f"({limit})" for limit in BIG), []
    for task, facts, (_, children, *_) in parts:
        if "big" in facts:
            amounts = re.search(rf"{children}\(\w+ \w+, \w+ \w+, (\w+) \w+, (\w+)", task["schema"]).groups()
            query = re.sub(rf"(>=?) {facts['big']['code']}\b", r"\1 " + guess.format(
                *amounts, limits=limits, table=children), task["ground_truth"])
            with contextlib.closing(sql_mutants.open_empty(task["schema"])) as connection:
                passed.append(all(sql_mutants.agreeing(connection, task["ground_truth"], tables, [query])
                                  for tables in task["databases"][1:]))
    assert len(passed) > 20 and sum(passed) < 0.3 * len(passed)     # all of them, if all amounts lay at the limit


def test_what_the_request_states(tasks):
    stated = [sum(fact["told"] for fact in task["facts"]) for task in tasks["train"]]
    assert set(stated) == {0, 1} and 0.12 < sum(stated) / len(stated) < 0.5                       # 30 %
    assert not any(fact["told"] for task in tasks["validation"] for fact in task["facts"])
    assert all(sql.all_known(task, turns("?")) for task in tasks["test"])
    requests, tables = zip(*(task["problem_description"].split("\n") for task in tasks["train"]))
    assert len({*requests}) > 40
    assert all(task["schema"].startswith(f"CREATE TABLE {first.split('(')[0]}(")
               for task, first in zip(tasks["train"], tables))


def test_every_look_shows_what_it_is_for_and_the_simulator_shows_no_sql(tasks, environment):
    looks = collections.Counter()
    for task in tasks["validation"]:
        for i, fact in enumerate(task["facts"]):
            assert all(sql.leak_of(task, reply) is None for reply in fact["replies"])
            for question in fact["questions"]:
                asked = topics_asked(task["facts"], question)
                assert asked == [i], (question, [task["facts"][j]["topic"] for j in asked])
            for query in fact.get("looks", ()):
                rows = look(environment, query, task)
                history = turns("?", f"QUERY: {query}", rows)
                assert sql.known_facts(task, history) == {i} and sql.known_facts(task, history[:2]) == set(), rows
                looks[fact["slot"]] += 1
        assert not any(looked_at(task, query) for query in task["idle_looks"])
    assert set(looks) == {"code", "year", "unit"}


def answer(text, is_last=False):
    return sql.answer_of(turns("?", text), is_last)


def test_the_answer_of_a_turn():
    look = "QUERY: SELECT 1"
    assert answer("Which year?") is None and answer(look) is None and answer(look, True) == look
    assert answer(f"So: {sql.MARKER} ```sql\nSELECT 1\n```") == answer(f"{sql.MARKER}\nSELECT 1\n") == "SELECT 1"


def test_scripted_agents(tasks, tmp_path):
    played = {}
    for name, agent, num_tasks, max_rounds in (("asker", "script-asker", 4, 8), ("few rounds", "script-asker", 4, 4),
                                               ("informed", "script-informed", 5, 8), ("noisy", "script", 14, 8)):
        call(2, "--tasks", write(tmp_path / "tasks", tasks["train"][:num_tasks]), "--agent", agent, "--max-rounds",
             max_rounds, "--out", tmp_path / name)
        played[name] = read(tmp_path / name)
    mean = {name: sum(map(sql.eval_score, rows)) / len(rows) for name, rows in played.items()}
    assert mean["asker"] == 1 and mean["few rounds"] < 0.8                                        # patience is short
    assert mean["informed"] > 0.8 and 0.2 < mean["noisy"] < 0.8
    asker, noisy = (sql.measure(played[name]) | measure_turns(played[name], sql) for name in ("asker", "noisy"))
    assert set(asker["turns"]) == {"ask needed", "look needed", "right answer"} and asker["all_known"] == 1
    assert {"ask for a look", "ask idle", "look idle", "early answer"} <= set(noisy["turns"])
    assert sum(noisy["turns"].values()) == pytest.approx(1)
    assert noisy["success_seen"] == mean["noisy"] and "success_unseen" not in noisy and noisy["looks"] > 0.5
    assert noisy["success_when_known"] > noisy["success_when_not_known"]
    assert any(turn.get("tool") for turn in played["noisy"][0]["dialogue_history"])


@pytest.mark.parametrize("reference", [*GIVEN["open order"], *GIVEN["certain order"], *REFERENCES.values()])
def test_a_reference_that_leaves_the_order_of_rows_open(reference):
    doubt = sql.doubt_of({**task_of("sum"), "ground_truth": reference})
    assert (doubt is not None) == (reference in GIVEN["open order"])
    assert sql.doubt_of({**task_of("sum"), "schema": "CREATE TABLE other(x)"}).startswith("database1: no such table")


def test_check_finds_nothing_but_a_reference_that_leaves_the_order_open_which_is_named_at_import(tasks, tmp_path):
    tied = {**task_of("sum"), "task_id": "tied", "ground_truth": "SELECT name FROM customers ORDER BY status"}
    path = write(tmp_path / "tasks.jsonl", [*tasks["validation"][:3], tied])
    doubt = "database1: the solution leaves the order of its rows open: ties of ORDER BY, or LIMIT"
    call(1, "--check", path, "--out", tmp_path / "checks.jsonl")
    checks = [(check["num_tests"], check["findings"]) for check in read(tmp_path / "checks.jsonl")]
    assert checks == [(6, {})] * 3 + [(6, {"order": doubt})]
    printed = call(1, "--source", "colbench", "--domain", "sql", "--path", path, "--out", tmp_path / "imported.jsonl")
    assert f"task tied: right answers may be graded wrong: {doubt}\n" in printed


def commented(query):
    first, _, rest = query.partition(" FROM ")
    return f"-- it's the list\n{first}  -- what counts\nFROM {rest}\n/* that is all; */"


CLAUSE = r" (FROM|JOIN|WHERE|AND|GROUP BY|HAVING|ORDER BY|LIMIT) "
KEYWORD = r"\b[A-Z]{2,}\b(?=[^']*(?:'[^']*'[^']*)*$)"               # outside of strings
SHAPES = {
    "one line": str,
    "a line a clause": lambda query: re.sub(CLAUSE, r"\n\1 ", query),
    "small letters": lambda query: re.sub(KEYWORD, lambda match: match[0].lower(), query),
    "comments": commented}
ONE_LINE = ("backticks", "double backticks", "bold query", "full stop", "prose before, in a line", "colon in a line",
            "tags in a line", "prompt", "backticks in prose")       # such texts hold no line breaks, so no comments


def answers_of(text):
    """The answer of a dialogue that ends with this text: behind the marker, in the last round without it; and as a file
    has it that somebody else made."""
    return [answer(f"{sql.MARKER}\n{text}"), answer(f"{sql.MARKER} {text}"), answer(text, is_last=True), text]


def test_the_same_query_is_found_in_every_wrapping_and_shape(tasks):
    def plain(query):
        query = query.removeprefix("-- it's the list\n").removesuffix(";").removesuffix("/* that is all; */")
        return " ".join(query.split()).rstrip("; ")

    for task in tasks["train"][::6]:
        for (shape, change), (name, wrapping) in itertools.product(SHAPES.items(), WRAPPINGS.items()):
            if shape == "comments" and name in ONE_LINE or name == "prose before, in a line" and shape != "one line":
                continue                                            # nobody writes it so
            query = change(task["ground_truth"])
            text = wrapping.replace("{q}", query)
            assert {plain(statement_of(answer)) for answer in answers_of(text)} == {plain(query)}, text


@pytest.mark.parametrize("message", GIVEN["with marker"])
def test_the_query_is_found_wherever_the_marker_stands(tasks, message):
    for task in tasks["train"][::12]:
        query = task["ground_truth"]
        text = message.replace("{m}", sql.MARKER).replace("{q}", query).replace("{j}", json.dumps(query))
        assert answer(text).rstrip("; ") == query, text


@pytest.mark.parametrize("text, statement", [(texts[0], texts[-1]) for texts in GIVEN["statements"]])
def test_statements_by_hand(text, statement):
    assert statement_of(text) == statement
    assert statement_of(statement) == statement


def test_any_text_is_read_fast():
    pieces = ("'", '"', "`", "[", "(", ")", "/*", "--", ";", "\n\n", "\nA b c.", "```", "~~~", "<sql>", "SELECT ", ":",
              "WITH a AS (", "/**/", "**", "```sql\n", ". A", "WITH (", "\n(", "``")
    begin = time.process_time()                                     # other work on the machine does not count
    for piece, first in itertools.product(pieces, ("", "SELECT ", "So: ")):
        statement_of((first + piece * MAX_CHARS)[:MAX_CHARS])        # a longer one is not read
        statement_of(first + piece * 50_000)
    statement_of("(" * 9_000 + "SELECT 1" + ")" * 9_000)            # 10 s, if each pair is dropped
    assert time.process_time() - begin < 20                         # 1 to 5 s; once it took hours


def test_what_begins_a_query_and_what_is_an_order():
    """An order is outside of comments, strings, names and parentheses."""
    assert begins_as(QUERY, " ( -- a\n/* b */ SELECT 1")
    assert begins_as(QUERY, "with a(b) as not materialized (select 1)")
    assert not begins_as(QUERY, "With this query AS (") and not begins_as(QUERY, "selected")
    assert all(map(is_ordered, GIVEN["ordered"])) and not any(map(is_ordered, GIVEN["unordered"]))
