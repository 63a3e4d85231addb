"""colbench/sql_text.py: the query in what models write around it, in all places where an answer is scored."""
import asyncio
import json
import re
import time

import pytest

from colbench import make_tasks, sql
from colbench.sql_mutants import mutants_of
from colbench.sql_text import begins_as, is_ordered, MAX_CHARS, QUERY, statement_of
from conftest import ROOT


def by_clause(query):
    """The query with a line for each clause, as people write it."""
    return re.sub(r" (FROM|JOIN|WHERE|AND|GROUP BY|HAVING|ORDER BY|LIMIT) ", r"\n\1 ", query)


def commented(query):
    first, _, rest = query.partition(" FROM ")
    return f"-- it's the list\n{first}  -- what counts\nFROM {rest}\n/* that is all; */"


WRAPPINGS = json.loads((ROOT / "tests" / "queries.json").read_text())["wrappings"]       # {q}: the query
ONE_LINE = ("backticks", "double backticks", "bold query", "full stop", "prose before, in a line", "colon in a line",
            "tags in a line", "prompt", "backticks in prose")                # such texts hold no line breaks


def small(query):
    """The keywords in small letters."""
    return re.sub(r"\b[A-Z]{2,}\b(?=[^']*(?:'[^']*'[^']*)*$)", lambda match: match[0].lower(), query)


SHAPES = {"one line": str, "a line a clause": by_clause, "comments": commented, "small letters": small}


def fits(wrapping, shape):
    """Whether people write a query of this shape so."""
    if wrapping == "prose before, in a line":
        return shape == "one line"                                  # a sentence that goes on in small letters
    return shape != "comments" or wrapping not in ONE_LINE


@pytest.fixture(scope="module")
def tasks():
    return make_tasks(sql, 12, 5, "train", "some")


def wrapped(text):
    return [wrapping.replace("{q}", text) for wrapping in WRAPPINGS.values()]


def answers_of(text):
    """The answer of a dialogue that ends with this text: behind the marker, in the last round without it; and as a file
    has it that somebody else made."""
    behind = sql.answer_of([{"content": f"{sql.MARKER}\n{text}"}], False)
    on_its_line = sql.answer_of([{"content": f"{sql.MARKER} {text}"}], False)
    last = sql.answer_of([{"content": text}], True)
    return [behind, on_its_line, last, text]


def test_answers_in_every_wrapping_score_as_they_do_alone(tasks):
    """On one task. That the same statement is found in all wrappings is tested below, for all tasks."""
    task = next(task for task in tasks if task["family"].endswith("names"))
    mistake = list(mutants_of(task["ground_truth"], []))[3]
    queries = [task["ground_truth"], "SELECT 'nothing of that', 17 WHERE 2 > 1", mistake]
    with sql.Environment() as environment:
        for query in queries:
            answers = wrapped(query) + answers_of(WRAPPINGS["fence"].replace("{q}", query))
            scores = asyncio.run(environment.score([(task, answer) for answer in [query, *answers]]))
            first, *rewards = [score["reward"] for score in scores]
            assert [answer for answer, reward in zip(answers, rewards) if reward != first] == []
            assert (first == 1) == (query == queries[0]) and (first == 0 or query != queries[1])


def test_the_same_query_is_found_in_every_shape(tasks):
    def plain(query):
        query = query.removeprefix("-- it's the list\n").removesuffix(";").removesuffix("/* that is all; */")
        return " ".join(query.split()).rstrip("; ")

    for task in tasks:
        for shape, change in SHAPES.items():
            query = change(task["ground_truth"])
            for name, wrapping in WRAPPINGS.items():
                if fits(name, shape):
                    text = wrapping.replace("{q}", query)
                    found = {plain(statement_of(answer)) for answer in answers_of(text)}
                    assert found == {plain(query)}, (name, shape, text)


@pytest.mark.parametrize("message", [
    "```sql\n-- {m}\n{q}\n```", "```sql\n{m}\n{q}\n```\nThat is all.", "```\n{m} {q}```", "{q};\n\n{m}",
    "```sql\n{q}\n```\n{m}\n", '{m}\n<tool_call>\n{"name": "submit", "arguments": {"query": {j}}}\n</tool_call>',
    '{m}\n```json\n{"query": {j}}\n```'])
def test_the_query_is_found_wherever_the_marker_stands(tasks, message):
    for task in tasks[:5]:
        query = task["ground_truth"]
        text = message.replace("{m}", sql.MARKER).replace("{q}", query).replace("{j}", json.dumps(query))
        assert sql.answer_of([{"content": text}], False).rstrip("; ") == query, text


SAME = ["SELECT 1; SELECT 2", "SELECT 1; DROP TABLE orders", "SELECT 1; -- one\nSELECT 2",
        "INSERT INTO orders SELECT * FROM orders", "CREATE TABLE t AS\nSELECT 1", "EXPLAIN SELECT 1", "QUERY: SELECT 1",
        "-- SELECT 1", "", "I do not know", "Select what you like!", "SELECT 1\nUNION SELECT 2",
        "SELECT a\n\nFROM t\n\nWHERE a = 'x; y'\n\n  AND b > 1", "SELECT\n  Name,\n  Total\nFROM t",
        "SELECT `name` FROM `t`", "SELECT 'It is. So it is' FROM t", "SELECT a FROM t WHERE b = '```'",
        "SELECT a FROM t WHERE b IN (SELECT c\n\nFrom u)", "(SELECT 1) UNION (SELECT 2)", "VALUES (1), (2)"]


@pytest.mark.parametrize("text, statement", [
    *zip(SAME, SAME), ("```sql\nSELECT 1;\nSELECT 2;\n```", "SELECT 1;\nSELECT 2;"),
    ("```\nDROP TABLE orders\n```", "DROP TABLE orders"), ("```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", "SELECT 1"),
    ("SELECT a FROM t WHERE b = 'c'\n\nIt is so", "SELECT a FROM t WHERE b = 'c'"), ("((SELECT 1))", "SELECT 1"),
    ("With these: WITH t AS (SELECT 1) SELECT * FROM t", "WITH t AS (SELECT 1) SELECT * FROM t"),
    ("WITH RECURSIVE t(n) AS (VALUES (1)) SELECT n FROM t; With that it's done.",
     "WITH RECURSIVE t(n) AS (VALUES (1)) SELECT n FROM t;")])
def test_statements_by_hand(text, statement):
    assert statement_of(text) == statement
    assert statement_of(statement) == statement


def test_any_text_is_read_fast():
    pieces = ("'", '"', "`", "[", "(", ")", "/*", "--", ";", "\n\n", "\nA b c.", "```", "~~~", "<sql>", "SELECT ", ":",
              "WITH a AS (", "/**/", "**", "```sql\n", ". A", "WITH (", "\n(", "``")
    texts = [first + piece * (MAX_CHARS // len(piece)) for piece in pieces for first in ("", "SELECT ", "So: ")]
    texts += [piece * 50_000 for piece in pieces]
    for text in texts:
        begin = time.process_time()                                 # other work on the machine does not count
        statement_of(text[:MAX_CHARS] if len(text) < 2 * MAX_CHARS else text)
        assert time.process_time() - begin < 20, text[:40]          # below 1 s; once it took hours


def test_an_order_is_outside_of_comments_strings_and_names():
    assert not any(map(is_ordered, (
        "SELECT a FROM t /* order by */", "SELECT a /* ORDER BY a", "SELECT a FROM t -- order by a",
        "SELECT 'it''s' FROM t -- order by", 'SELECT a AS "order by" FROM t', "SELECT a AS [order by] FROM t",
        "SELECT a FROM (SELECT b FROM t ORDER BY b)")))
    assert all(map(is_ordered, (
        "SELECT a FROM t ORDER BY a", "SELECT '-- ' FROM t ORDER BY a", "SELECT '/*' FROM t order /* */ by a",
        "SELECT a FROM t -- it's\nORDER BY a")))


def test_what_begins_a_query():
    assert begins_as(QUERY, " ( -- a\n/* b */ SELECT 1")
    assert begins_as(QUERY, "with a(b) as not materialized (select 1)")
    assert not begins_as(QUERY, "With this query AS (") and not begins_as(QUERY, "selected")
