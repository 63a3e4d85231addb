"""colbench/sql.py: tasks whose decisions matter, looks, kinds of turns, simulators, scripted agents, scores of hostile
and of ordinary queries."""
import asyncio
import collections
import itertools
import json
import random
import re
import types

import pytest

from colbench import check_kind, ColBenchError, in_split, make_tasks, sql, sql_mutants
from colbench.sql_child import canonical
from conftest import call, read, refused, ROOT, write
from lib.statistics import measure_turns

SCHEMA = ("CREATE TABLE customers(id INTEGER, name TEXT, status TEXT);\n"
          "CREATE TABLE orders(id INTEGER, customer_id INTEGER, total INTEGER, net INTEGER, placed TEXT);\n")


def database(*orders, names="Ada Ben Cora Dan"):
    """Customers 1 to 4, the second closed, the fourth without a status; orders are (customer, total, net, placed)."""
    statuses = ("active", "closed", "active", None)
    return {"customers": [[i, *pair] for i, pair in enumerate(zip(names.split(), statuses), 1)],
            "orders": [[i, *order] for i, order in enumerate(orders, 1)]}


DATABASES = [database((1, 50, 40, "2024-05-01"), (2, 70, 60, "2025-01-01")),
             database((1, 50, 40, "2025-01-01"), (1, 60, 50, "2025-12-31"), (3, 110, 10, "2025-03-01"),
                      (2, 500, 9, "2025-02-02")),
             database((3, 100, 90, "2025-01-01"), (3, None, 90, "2025-01-02"), (1, 10, 5, "2024-12-31"),
                      names="B A D C"),
             database(), database((4, 300, 1, "2025-06-06"), (1, 99, 99, None)),
             database((1, 40, 1, "2025-06-06"), (3, 40, 1, "2025-06-06"), (3, 1, 1, "2025-06-06")),
             database((1, 5, 1, "2025-06-06"), (3, 7, 3, "2025-06-06"), (None, 9, 1, "2025-06-06"))]
REFERENCES = {
    "sum": "SELECT c.name, SUM(o.total) FROM customers c JOIN orders o ON o.customer_id = c.id "
           "WHERE c.status = 'active' GROUP BY c.id",
    "ordered": "SELECT c.name FROM customers c JOIN orders o ON o.customer_id = c.id WHERE o.placed LIKE '2025%' "
               "GROUP BY c.id ORDER BY COUNT(*) DESC, c.name",
    "mean": "SELECT ROUND(AVG(total), 2) FROM orders"}


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
    history = [{"role": "assistant", "content": f"QUERY: {query}"}]
    return asyncio.run(environment.tool_reply(task or task_of("sum"), history))


# --- scores

# {"ordinary": {reference: other ways to write it}, "hostile": {the first fault, or a part of it: answers}}
ANSWERS = json.loads((ROOT / "tests" / "queries.json").read_text())


@pytest.mark.parametrize("reference", REFERENCES)
def test_ordinary_variants_pass(environment, reference):
    answers = ANSWERS["ordinary"][reference]
    verdicts = score(environment, reference, *answers)
    assert [answer for answer, verdict in zip(answers, verdicts) if verdict["faults"] != [None] * 6] == []


def test_rows_are_a_list_only_where_the_reference_orders(environment):
    turned = REFERENCES["ordered"].replace("COUNT(*) DESC, c.name", "COUNT(*), c.name DESC")
    unordered = REFERENCES["ordered"].partition("ORDER")[0]
    assert max(verdict["reward"] for verdict in score(environment, "ordered", turned, unordered)) < 1


LONG = {
    "one statement": REFERENCES["sum"] + "; --\nATTACH ':memory:' AS x",
    "overflow": "SELECT " + "(" * 2000 + "1" + ")" * 2000, "too many columns": "SELECT " + "1, " * 500 + "1",
    "too many terms": "SELECT 1 " + "UNION ALL SELECT 1 " * 100, "too large": "SELECT 1" + " " * 20_000,
    "larger than": "SELECT 1 -- " + "x" * (1 << 21), "null character": "SELECT \0 1", "surrogates": "SELECT '\ud800'"}
HOSTILE = {**ANSWERS["hostile"], **{fault: [answer] for fault, answer in LONG.items()}}
HOSTILE["one statement"] = [*ANSWERS["hostile"]["one statement"], LONG["one statement"]]


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
    ([(1,), (1,)], [(1,)], False), ([("1",)], [(1,)], False), ([(1,)], [(None,)], False),
    ([(float("inf"),)], [(float("inf"),)], True), ([(0.1 + 0.2,)], [(0.3,)], True), ([(0.3,)], [(0.31,)], False),
    ([(12345.678901,)], [(12345.678902,)], True), ([(12345.67890,)], [(12345.67899,)], False),
    ([(1234567891,)], [(1234567891.0,)], True), ([(1234567891,)], [(1234567891.0000002,)], True),
    ([(1234567891,)], [(1234567892.0,)], False), ([(-123456789012,)], [(-123456789012.0,)], True),
    ([(1, 2), (2, 3), (3, 1)], [(2, 1), (3, 2), (1, 3)], True),
    ([(1, 2), (2, 3), (3, 1)], [(1, 1), (2, 2), (3, 3)], False),
    ([(1, "x"), (2, "y")], [("y", 2.0), ("x", 1.0)], True), ([(1, 2), (2, 1)], [(1, 1), (2, 2)], False)])
def test_which_rows_are_equal(rows, other_rows, equal):
    """Whatever the names and order of columns and, unless ordered, of rows; numbers within rounding."""
    names, other_names = ["a", "b"][:len(rows[0])], ["n", "m"][:len(rows[0])]
    assert (canonical(names, rows, False) == canonical(other_names, other_rows, False)) == equal


def test_empty_rows_differ_by_their_columns_and_ordered_ones_by_their_order():
    assert canonical(["a"], [], False) != canonical(["a", "b"], [], False)
    assert canonical(["a"], [(1,), (2,)], True) != canonical(["a"], [(2,), (1,)], True)


def test_tables_are_equal_if_an_order_of_their_columns_makes_them_so():
    rng = random.Random(0)
    for _ in range(150):
        width, height = rng.randint(1, 4), rng.randint(1, 5)
        names = "abcd"[:width]
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


# --- looks

def test_a_look_shows_a_short_table_or_the_database_s_error(environment):
    assert look(environment, "SELECT id, status FROM customers WHERE id > 2") == "id | status\n3 | active\n4 | NULL"
    assert look(environment, "```sql\nSELECT MAX(placed) FROM orders\n```") == "MAX(placed)\n2025-01-01"
    assert look(environment, "SELECT 1 WHERE 0") == "1\n(no rows)"
    many = look(environment, "SELECT a.id FROM customers a, customers b")
    assert many == "id\n" + "1\n" * 4 + "2\n" * 4 + "(16 rows)"
    assert len(look(environment, "SELECT hex(zeroblob(2000)), 1 FROM customers a, customers b")) == 600
    assert look(environment, "SELECT x FROM orders") == "Error: no such column: x"
    assert look(environment, "DELETE FROM orders") == "Error: not authorized"
    history = [{"role": "assistant", "content": "Which year?"}]
    assert asyncio.run(environment.tool_reply(task_of("sum"), history)) is None
    assert environment.tables[sql.task_id(task_of("sum")), "DELETE FROM orders"] == "Error: not authorized"    # kept


# --- tasks

UNSEEN = types.SimpleNamespace(FAMILIES=[name for name in sql.FAMILIES if "unseen" in sql.SCHEMAS[name.split("_")[0]]],
                               make_task=sql.make_task)


@pytest.fixture(scope="module")
def tasks():
    """{split: tasks}: of each family one, 15 without stated decisions, and of each unseen family one."""
    return {"train": make_tasks(sql, len(sql.FAMILIES), 0, "train", "some"),
            "validation": make_tasks(sql, 15, 1, "validation", "none"),
            "test": make_tasks(UNSEEN, len(UNSEEN.FAMILIES), 0, "test", "all")}


def test_schemas_and_families():
    assert len(sql.SCHEMAS) >= 10
    assert {sql.schema_text(words).count("CREATE TABLE") for words in sql.SCHEMAS.values()} == {2, 3}
    for pattern in sql.PATTERNS.values():
        slots = set(re.findall(r"(?<!\$)\{(\w+)\}", pattern["query"]))
        assert 3 <= len(slots) <= 6 and slots <= set(sql.DECISIONS) and len(pattern["requests"]) >= 3
        assert any("looks" in sql.DECISIONS[slot] for slot in slots)
    assert {"rental_count", "rental_places", "gym_best"} <= set(sql.FAMILIES) and "gym_places" not in sql.FAMILIES


def test_unseen_schemas_are_in_the_test_split_alone_and_of_known_words(tasks):
    assert all(task["seen"] == (split != "test") for split in tasks for task in tasks[split])
    assert {task["family"].split("_")[0] for task in tasks["test"]} == {"theatre", "bank", "garage"}
    assert all(in_split(task["task_id"], split) for split in tasks for task in tasks[split])
    words = {True: set(), False: set()}                             # {whether a schema is unseen: its words}
    for schema in sql.SCHEMAS.values():
        words["unseen" in schema].update(str(word) for key, word in schema.items() if key != "unseen")
    assert words[True] and words[True] <= words[False]


def test_hidden_databases_show_each_wrong_decision_and_each_likely_mistake(tasks):
    kinds = collections.Counter()
    for task in itertools.chain(*tasks.values()):
        reference, template = task["ground_truth"], task["template"]
        assert len(task["databases"]) == 7 and not list(task["databases"][-1].values())[1]
        facts = [fact for fact in task["facts"] if fact["matters"]]
        codes = {fact["slot"]: fact["code"] for fact in facts}
        assert 3 <= len(facts) <= 6 and template.format(**codes) == reference
        statuses = {row[2] for tables in task["databases"] for row in list(tables.values())[0]} - {None}
        mutants = sql_mutants.mutants_of(reference, sorted(statuses))
        kinds.update(mutants.values())
        assert len(mutants) > 10
        left = {*mutants}
        for fact in facts:
            left.update(template.format(**{**codes, fact["slot"]: code}) for code in fact["guesses"][1:])
        connection = sql_mutants.open_empty(task["schema"])
        for tables in task["databases"][1:]:
            left = sql_mutants.agreeing(connection, reference, tables, left)
        connection.close()
        assert left == [], reference
    assert set(kinds) == {"threshold", "limit", "aggregate", "tie", "missing value", "year", "unit", "status"}
    assert min(kinds.values()) > 5


@pytest.mark.parametrize("query, parts", [
    ("SELECT COUNT(c.a) FROM t c WHERE c.d LIKE '2020%' AND c.x > 50",
     ("c.x > 49", "c.x > 51", "c.x >= 50", "(c.x > 50 OR c.x IS NULL)", "(c.d LIKE '2020%' OR c.d IS NULL)",
      "c.d > '2020-01-01' AND", "c.d < '2020-12-31' AND", "c.d >= '2019-12-31' AND", "SELECT SUM(c.a)",
      "substr(c.d, 1, 4) = (SELECT substr(MAX(d), 1, 4) FROM t)", "COUNT(DISTINCT c.a)")),
    ("SELECT p.name FROM q p JOIN t c ON c.a = p.id WHERE p.status = 'A' GROUP BY p.id HAVING SUM(c.x) >= 50 "
     "ORDER BY p.name DESC",
     ("SUM(c.x) >= 51", "MAX(c.x) >= 50", "(SUM(c.x) >= 50 OR SUM(c.x) IS NULL)", "DESC LIMIT 10",
      "(p.status = 'A' OR p.status IS NULL)", "p.status IN ('A', 'B')", "SUM(DISTINCT c.x)")),
    ("SELECT p.name FROM q p JOIN t c ON c.a = p.id WHERE c.d LIKE '2020%' GROUP BY p.id ORDER BY MAX(c.x) DESC, "
     "p.name LIMIT 3",
     ("p.name LIMIT 2", "p.name LIMIT 4", "MAX(c.x) DESC LIMIT 3", "p.id LIMIT 3", "SUM(c.x)"))])
def test_mutants_by_hand(query, parts):
    mutants = list(sql_mutants.mutants_of(query, ["A", "B"]))
    for part in parts:
        assert len([mutant for mutant in mutants if part in mutant]) == 1, part
    assert query not in mutants


def test_databases_keep_what_the_domain_tells_the_agent(tasks):
    """Keys lead somewhere, names differ, amounts are positive, a status is stored in one way, no date is behind this
    year."""
    for task in itertools.chain(*tasks.values()):
        codes = {fact.get("slot"): fact["code"] for fact in task["facts"] if fact["matters"]}
        parents, children, *places = task["databases"][0]
        statuses = {row[2] for row in task["databases"][0][parents]}
        dates = [date for tables in task["databases"] for row in tables[children] for date in row[4:6] if date]
        assert all(re.fullmatch(r"20\d\d-(0[1-9]|1[012])-(0[1-9]|[12]\d|3[01])", date) for date in dates)
        year = codes.get("year", sql.LAST_YEAR)
        assert max(dates)[:4] == year == max(row[4] for row in task["databases"][0][children] if row[4])[:4]
        for tables in task["databases"]:
            for table in (parents, *places):
                assert len({row[1] for row in tables[table]}) == len(tables[table])
            assert {row[2] for row in tables[parents]} <= statuses | {None}
            assert {row[1] for row in tables[children]} <= {row[0] for row in tables[parents]}
            assert not places or {row[3] for row in tables[parents]} <= {row[0] for row in tables[places[0]]}
            assert all(cell is None or type(cell) is int and 0 < cell < (20_000 if codes.get("unit") else 400)
                       for row in tables[children] for cell in row[2:4])


def test_shapes_of_hidden_databases(tasks):
    for task in tasks["train"]:
        parents, children, *_ = task["databases"][0]
        special, last = task["databases"][-2:]
        pattern = task["family"].split("_")[1]
        assert last[children] == [] and len(task["databases"]) == 7
        if pattern == "names":
            assert len(special[parents]) == 18
        elif pattern != "status":                                   # nothing has happened yet this year
            year = next(fact["code"] for fact in task["facts"] if fact.get("slot") == "year")
            assert all(date is None or date[:4] < year for row in special[children] for date in row[4:6])


def test_the_databases_of_a_reference_are_the_same_whatever_the_seed():
    def make(seed):
        rng = random.Random(seed)
        tasks = [sql.make_task(rng, "gym_names", "some", lambda name: None) for _ in range(12)]
        return {task["task_id"]: task["databases"] for task in tasks}

    first, second = make(0), make(1)
    assert len(first.keys() & second.keys()) > 0
    assert all(first[name] == second[name] for name in first.keys() & second.keys())


def test_what_the_request_states(tasks):
    stated = [sum(fact["told"] for fact in task["facts"]) for task in tasks["train"]]
    assert set(stated) == {0, 1} and 0.12 < sum(stated) / len(stated) < 0.5                       # 30 %
    assert not any(fact["told"] for task in tasks["validation"] for fact in task["facts"])
    assert all(sql.all_known(task, START) for task in tasks["test"])
    lines = [task["problem_description"].split("\n") for task in tasks["train"]]
    assert len({request for request, _ in lines}) > 40
    assert all(tables.startswith(task["schema"][13:20].split("(")[0])
               for (_, tables), task in zip(lines, tasks["train"]))


def test_every_look_shows_what_it_is_for_and_the_simulator_shows_no_sql(tasks, environment):
    looks = collections.Counter()
    for task in tasks["validation"]:
        for i, fact in enumerate(task["facts"]):
            assert all(sql.leak_of(task, reply) is None for reply in fact["replies"])
            for question in fact["questions"]:
                asked = sql.topics_asked(task["facts"], question)
                assert asked == [i], (question, [task["facts"][j]["topic"] for j in asked])
            for query in fact.get("looks", ()):
                rows = look(environment, query, task)
                history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"QUERY: {query}"},
                           {"role": "user", "content": rows}]
                assert sql.known_facts(task, history) == {i} and sql.known_facts(task, history[:2]) == set(), rows
                looks[fact["slot"]] += 1
        assert not any(sql.looked_at(task, query) for query in task["idle_looks"])
    assert set(looks) == {"code", "year", "unit"}


def task_by_hand():
    def fact(topic, **more):
        return {"topic": topic, "questions": [f"What is {topic}?"], "replies": ["It is so."], "matters": True,
                "told": False, "by": "ask", "guesses": ["1", "2"], "code": "1", "slot": topic.split()[-1], **more}

    return {**task_of("mean"), "template": "SELECT {limit}, {now}", "ground_truth": "SELECT 1, 1", "facts": [
        fact("the limit"),
        fact("which year it is now", by="look", looks=["SELECT MAX(placed) FROM orders"], columns=["placed"],
             cell="2025-.*", guesses=["1", "2", "3"]),
        {**fact("the deadline"), "matters": False}], "idle_looks": ["SELECT COUNT(*) FROM orders"]}


START = [{"role": "user", "content": "How many?"}]
LOOK, SHOWN = "QUERY: SELECT MAX(placed) FROM orders", {"role": "user", "content": "MAX(placed)\n2025-01-01"}
ASKED = [{"role": "assistant", "content": "What is the limit?"}, {"role": "user", "content": "1"}]
LOOKED = [{"role": "assistant", "content": LOOK}, SHOWN]


@pytest.mark.parametrize("history, message, kind", [
    (START, "What is the limit?", "ask needed"), (START + ASKED, "The limit?", "ask repeat"),
    (START, "What is the deadline?", "ask idle"), (START, "Well?", "ask vague"),
    (START, "Which year is it now?", "ask for a look"), (START, LOOK, "look needed"),
    (START + LOOKED, LOOK, "look repeat"), (START + LOOKED, "QUERY: SELECT MIN(placed) FROM orders", "look repeat"),
    (START, "QUERY: SELECT * FROM orders", "look needed"), (START, "QUERY: SELECT COUNT(*) FROM orders", "look idle"),
    (START, f"{sql.MARKER}\nselect 1", "early answer"), (START, f"{sql.MARKER}\nSELECT 1,\n 1;", "right answer"),
    (START + ASKED + LOOKED, f"{sql.MARKER}\nSELECT 1, 2", "wrong answer")])
def test_kinds_of_turns(history, message, kind):
    assert sql.turn_kind(task_by_hand(), history, message) == kind
    ended = {**task_by_hand(), "ground_truth": task_by_hand()["ground_truth"] + ";\n"}          # as files of others may
    assert sql.turn_kind(ended, history, message) == kind


def test_what_is_known_decision_by_decision():
    task, failed = task_by_hand(), [LOOKED[0], {"role": "user", "content": "Error: no such column: placed"}]
    for more, known in (([], [False, False]), (ASKED, [True, False]), (LOOKED, [False, True]), (failed, [False, False]),
                        (LOOKED + ASKED, [True, True])):
        facts = sql.facts(task, START + more)
        assert [is_known for _, is_known in facts] == known
        assert sql.all_known(task, START + more) == all(known)
    assert facts[0] == ("the limit: 1", True)
    assert sql.facts(task_of("sum"), START) is None and sql.turn_kind(task_of("sum"), START, "Well?") is None


@pytest.mark.parametrize("reply, kind", [
    ("```SELECT 1```", "fence"), ("Use SELECT name FROM customers c WHERE it fits", "query"),
    ("select name from customers", "query"), ("It is COUNT(o.id) FROM orders o WHERE o.total then", "code"),
    ("Select what you like from it.", None), ("The total counts.", None)])
def test_leaks(reply, kind):
    task = {"ground_truth": "SELECT COUNT(o.id) FROM orders o WHERE o.total > 5", "schema": SCHEMA}
    assert sql.leak_of(task, reply) == kind


def test_the_answer_of_a_turn():
    def answer(text, is_last=False):
        return sql.answer_of([{"content": text}], is_last)

    assert answer("Which year?") is None and answer(LOOK) is None and answer(LOOK, True) == LOOK
    assert answer(f"So: {sql.MARKER} ```sql\nSELECT 1\n```") == answer(f"{sql.MARKER}\nSELECT 1\n") == "SELECT 1"


# --- the stages

def play(tasks, folder, agent, max_rounds):
    call(2, "--tasks", write(folder / "tasks", tasks), "--agent", agent, "--max-rounds", max_rounds, "--out",
         folder / agent, "--overwrite")
    return read(folder / agent)


def test_scripted_agents(tasks, tmp_path):
    asked, few, informed = (play(tasks["train"][:5], tmp_path, agent, max_rounds) for agent, max_rounds in (
        ("script-asker", 8), ("script-asker", 4), ("script-informed", 8)))
    noisy = play(tasks["train"][:20], tmp_path, "script", 8)
    mean = [sum(map(sql.eval_score, rows)) / len(rows) for rows in (asked, few, informed, noisy)]
    assert mean[0] == 1 and mean[1] < 0.8 and mean[2] > 0.8 and 0.2 < mean[3] < 0.8               # patience is short
    asker, script = (sql.measure(rows) | measure_turns(rows, sql) for rows in (asked, noisy))
    assert set(asker["turns"]) == {"ask needed", "look needed", "right answer"} and asker["all_known"] == 1
    assert {"ask for a look", "ask idle", "look idle", "early answer"} <= set(script["turns"])
    assert sum(script["turns"].values()) == pytest.approx(1)
    assert script["success_seen"] == mean[3] and "success_unseen" not in script and script["looks"] > 0.5
    assert script["success_when_known"] > script["success_when_not_known"]
    assert any(turn.get("tool") for turn in noisy[0]["dialogue_history"])


def test_an_asker_takes_what_has_most_values_first():
    task = task_by_hand()
    assert sql.asker_turn(task, START, 8, random.Random(0)) == LOOK
    assert sql.asker_turn(task, START + LOOKED, 8, random.Random(0)) == "What is the limit?"
    assert sql.asker_turn(task, START, 1, random.Random(0)).startswith(sql.MARKER)


def test_check_finds_nothing(tasks, tmp_path):
    call(1, "--check", write(tmp_path / "tasks", tasks["validation"][:3]), "--out", tmp_path / "checks")
    assert [(check["num_tests"], check["findings"]) for check in read(tmp_path / "checks")] == [(6, {})] * 3


LOOK_FACT = {"topic": "t", "questions": ["?"], "matters": False, "told": False, "by": "look"}


@pytest.mark.parametrize("change, line", [
    ({"schema": 1}, '"schema" is a int, not a str'), ({"databases": [{}]}, "not of 2 or more"),
    ({"databases": [{}, {"a": 1}]}, '"a" is a int, not a list'), ({"databases": [{}, []]}, "a list, not an object"),
    ({"facts": [LOOK_FACT]}, 'facts: item 0: missing "looks"'),
    ({"facts": [{**LOOK_FACT, "matters": True}]}, 'facts: item 0: missing "slot"')])
def test_bad_tasks_are_one_line(change, line):
    with pytest.raises(ColBenchError, match=re.escape(line)):
        check_kind({**task_of("sum"), **change}, sql.TASK, "file:1")


def test_what_agents_of_the_domain_need(tmp_path):
    path = write(tmp_path / "tasks", [task_of("sum")])
    assert 'missing "facts"' in refused(2, "--tasks", path, "--agent", "script", "--out", tmp_path / "x")
    assert "script-asker" in refused(2, "--tasks", path, "--agent", "script-x", "--out", tmp_path / "x")


def test_a_simulating_model_is_told_its_part(environment):
    chat = asyncio.run(environment.simulator_chat(task_of("sum"), START + ASKED[:1]))
    assert REFERENCES["sum"] in chat[0]["content"]
    assert chat[1] == {"role": "user", "content": "What is the limit?"}


# --- references whose order is not determined

JOINED = "FROM customers c JOIN orders o ON o.customer_id = c.id"


@pytest.mark.parametrize("reference, is_open", [
    (f"SELECT c.name, o.net {JOINED} ORDER BY o.net", True), (f"SELECT c.name {JOINED} ORDER BY o.net LIMIT 1", True),
    (f"SELECT c.name {JOINED} GROUP BY c.id ORDER BY COUNT(*) DESC LIMIT 2", True),
    ("SELECT name FROM customers LIMIT 2", True), ("SELECT DISTINCT net FROM orders LIMIT 1;", True),
    ("SELECT name FROM customers ORDER BY status -- as it is\nLIMIT (2)", True),
    ("SELECT name FROM customers WHERE id IN (SELECT customer_id FROM orders LIMIT 1)", True),
    ("SELECT net FROM orders ORDER BY net LIMIT 1", False),         # equal rows: either will do
    ("SELECT id FROM customers UNION SELECT id FROM orders ORDER BY id LIMIT 2", False),
    *((reference, False) for reference in REFERENCES.values())])
def test_a_reference_that_leaves_the_order_of_rows_open(reference, is_open):
    task = {**task_of("sum"), "ground_truth": reference}
    assert (sql.doubt_of(task) is not None) == is_open


def test_a_reference_that_leaves_the_order_open_is_found_by_check_and_named_at_import(tasks, tmp_path):
    tied = {**task_of("sum"), "task_id": "tied", "ground_truth": "SELECT name FROM customers ORDER BY status"}
    path = write(tmp_path / "tasks.jsonl", [*tasks["validation"][:3], tied])
    doubt = "database1: the reference leaves the order of its rows open: ties of ORDER BY, or LIMIT"
    call(1, "--check", path, "--out", tmp_path / "checks.jsonl")
    assert [check["findings"] for check in read(tmp_path / "checks.jsonl")] == [{}, {}, {}, {"order": doubt}]
    printed = call(1, "--source", "colbench", "--domain", "sql", "--path", path, "--out", tmp_path / "imported.jsonl")
    assert f"task tied: right answers may be graded wrong: {doubt}\n" in printed
