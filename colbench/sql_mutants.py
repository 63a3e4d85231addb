"""Likely mistakes in a query, as mutants of a solution, and whether databases show them.

sql.py draws hidden databases until each mutant gives other rows on one of them. docs/sql.md says how many wrong queries
pass.
"""
import re
import sqlite3

from colbench.sql_child import canonical, insert, rounded
from colbench.sql_text import is_ordered

# (kind of mistake, pattern, replacement …): each match of the pattern is replaced by each of the texts. {all} is the
# match, {0}, {1} … are its groups, {less} and {more} its number minus and plus 1, {table} is the table of children,
# {code} each way in which a status is stored. Written for the solutions of queries.json.
RULES = [
    ("threshold", r"([<>]=?) (\d+)",
     "{0} {less}", "{0} {more}", "> {1}", ">= {1}", "< {1}", "<= {1}", "= {1}", "<> {1}"),
    ("limit", r" LIMIT (\d+)$", " LIMIT {less}", " LIMIT {more}", ""),
    ("limit", r"ORDER BY (?!.* LIMIT ).*$", "{all} LIMIT 1", "{all} LIMIT 3", "{all} LIMIT 5", "{all} LIMIT 10"),
    ("aggregate", r"\b(?:COUNT|SUM|AVG|MAX|MIN)\((DISTINCT )?(?=[^*])",
     "COUNT({0}", "SUM({0}", "AVG({0}", "MAX({0}", "MIN({0}"),
    ("aggregate", r"\b(COUNT|SUM|AVG)\((?!DISTINCT |\*)", "{0}(DISTINCT "),
    ("aggregate", r"\(DISTINCT ", "("),
    ("tie", r", (\w)\.name( DESC)?(?= LIMIT)", "", ", {0}.id"),
    ("missing value", r"(\w\.\w+) (?:LIKE|=|[<>]=?) ('[^']*'|\d+)", "({all} OR {0} IS NULL)"),
    ("missing value", r"(SUM\(\w\.\w+\)) >= \d+", "({all} OR {0} IS NULL)"),
    ("year", r"\bc\.(\w+) LIKE '(\d{4})%'",
     "c.{0} > '{1}-01-01'",
     "c.{0} >= '{1}-01-01' AND c.{0} < '{1}-12-31'",
     "c.{0} >= '{less}-12-31'",
     "c.{0} >= '{less}-01-01'",
     "c.{0} < '{more}'",
     "substr(c.{0}, 1, 4) = (SELECT substr(MAX({0}), 1, 4) FROM {table})"),
    ("unit", r"AVG\((.*)\) / 100", "AVG({0} / 100)"),
    ("status", r"(\w\.status) = ('[^']*')", "{0} IN ({1}, '{code}')")]


def mutants_of(solution, codes):
    """{mutant: kind of mistake} of a solution of queries.json. codes: the statuses as they are stored."""
    table = re.search(r"(?:FROM|JOIN) (\w+) c\b", solution)[1]
    other_codes = [code for code in codes if f"'{code}'" not in solution]
    mutants = {}
    for kind, pattern, *texts in RULES:
        for match in re.finditer(pattern, solution):
            before, after = solution[:match.start()], solution[match.end():]
            number = int((re.search(r"\d+", match[0]) or [0])[0])
            words = {"all": match[0], "less": number - 1, "more": number + 1, "table": table}
            for text in texts:
                for code in other_codes if "{code}" in text else [None]:
                    changed = text.format(*match.groups(""), **words, code=code)
                    mutants.setdefault(before + changed + after, kind)
    mutants.pop(solution, None)
    return mutants


def open_empty(schema):
    """A connection to a database with these tables, for queries that this package made. sqlite3 caches the prepared
    ones."""
    connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=500)
    connection.executescript(schema)
    return connection


def agreeing(connection, solution, tables, queries):
    """The queries that give the rows of the solution on the database `tables`, {name: rows}."""
    ordered = is_ordered(solution)

    def rows(query):
        cursor = connection.execute(query)
        names = [column[0] for column in cursor.description]
        return canonical(names, [list(map(rounded, row)) for row in cursor], ordered)

    for name in tables:
        connection.execute(f"DELETE FROM {name}")
    insert(connection, tables)
    wanted = rows(solution)
    return [query for query in queries if rows(query) == wanted]
