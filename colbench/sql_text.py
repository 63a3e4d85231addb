"""Parses the text of an answer or a look: the statement without a model's words around it, and whether its rows are
ordered. Only the text decides; no SQL runs here.

statement_of(text) takes the first of these that exists:
1. the text itself, if it starts as a query;
2. the first fence (``` or ~~~, of any language, on one line or several, closed or not) that holds a query;
3. the first query in backticks;
4. the first query in prose: at the beginning of a line, or behind a colon;
5. the first query in quotes: a string of JSON, as in a call of a tool;
6. the first query in prose that begins in capitals;
7. the content of the first fence, or the whole text: it is not a query, so the database reports an error.

A query ends with a semicolon, before a fence, a line or a paragraph that is prose, or with the text. A further
statement after a semicolon is kept, so that two statements are refused. Parentheses around a whole query are dropped.
"""
import itertools
import re

from colbench.extract_code import strings_of

LOOK = "QUERY:"
MAX_CHARS = 20_000              # a longer text stays as it is; sqlite3 is told to refuse a statement of 10,000
MAX_DEPTH = 20                  # parentheses around a query that are dropped; for each pair the whole text is read

STRING = r"""'(?:[^']|'')*'|"(?:[^"]|"")*\""""
QUOTED = STRING + r"|`[^`\n]*`|\[[^\]\n]{0,100}\]"
COMMENT = r"--[^\n]*|/\*.*?(?:\*/|\Z)"
NAME = r"""(?:\w+|"[^"]*"|`[^`]*`|\[[^\]]*\])"""
TO_SKIP = re.compile(rf"[\s(]+|{COMMENT}", re.DOTALL)
GAP = rf"(?s:\s|{COMMENT})"
QUERY = re.compile(
    rf"SELECT\b|VALUES\s*\(|WITH{GAP}++(?:RECURSIVE{GAP}++)?{NAME}{GAP}*+(?:\([^()]*\){GAP}*+)?AS{GAP}*+"
    rf"(?:(?:NOT\s+)?MATERIALIZED\s*)?\(", re.IGNORECASE)
END = r"(?:;|\Z)"
OTHER_STATEMENT = re.compile(                                       # not only its first word, which may begin prose
    r"ALTER\s+TABLE\b|(?:ANALYZE|REINDEX|VACUUM)(?:\s+[\w.]+)?\s*" + END + r"|(?:ATTACH|DETACH)\s+(?:DATABASE\b|['\"])|"
    r"(?:BEGIN|COMMIT|ROLLBACK)(?:\s+(?:DEFERRED|IMMEDIATE|EXCLUSIVE))?(?:\s+TRANSACTION)?\s*" + END + "|"
    r"CREATE\s+(?:TEMP|TEMPORARY|TABLE|VIEW|UNIQUE|INDEX|TRIGGER|VIRTUAL)\b|DROP\s+(?:TABLE|VIEW|INDEX|TRIGGER)\b|"
    r"DELETE\s+FROM\b|(?:INSERT|REPLACE)\s+(?:OR\s+\w+\s+)?INTO\b|PRAGMA\b|"
    rf"UPDATE\s+(?:OR\s+\w+\s+)?{NAME}\s+SET\b|EXPLAIN\s+(?:QUERY\s+PLAN|SELECT|WITH)\b|"
    r"(?:SAVEPOINT|RELEASE)\s+\w+\s*" + END, re.IGNORECASE)
CLAUSE = re.compile(                                                # how a query can go on in a new line
    r"[(),*/+<>=|-]|(?:FROM|WHERE|GROUP|HAVING|ORDER|LIMIT|OFFSET|WINDOW|LEFT|RIGHT|FULL|INNER|OUTER|CROSS|NATURAL|"
    r"JOIN|ON|USING|AND|OR|NOT|AS|BY|UNION|EXCEPT|INTERSECT|SELECT|DISTINCT|CASE|WHEN|THEN|ELSE|END|IN|LIKE|BETWEEN|"
    r"IS|DESC|ASC|VALUES|OVER|PARTITION)\b", re.IGNORECASE)
UNFINISHED = re.compile(r"(?:[,(=<>+*/|-]|\b(?:WITH|RECURSIVE|SELECT|DISTINCT|FROM|JOIN|WHERE|BY|HAVING|AND|OR|ON|AS|"
                        r"CASE|WHEN|THEN|ELSE|LIMIT))\s*\Z", re.IGNORECASE)

FENCE_END = re.compile(r"```|^[ \t]*~~~", re.MULTILINE)
FENCE = re.compile(r"(```+|~~~+)(.*?)(?:\1[`~]*|\Z)", re.DOTALL)
LANGUAGE = re.compile(r"\s*(?:sql|sqlite3?|mysql|postgres(?:ql)?|text|plaintext)\b", re.IGNORECASE)
BACKTICKS = re.compile(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
TAG = re.compile(r"</?(?:answer|final|query|sql|code|pre)>", re.IGNORECASE)
ANNOUNCED = (re.compile(r"^(?:sqlite)?[ \t>*]*(?=[(\w])|:[ \t*]*(?=SELECT\b|WITH\b)", re.MULTILINE),
             re.compile(r":[\s*]*(?=[(\w])"))                       # at the beginning of a line; behind a colon
IN_CAPITALS = (re.compile(r"(?<=\s)(?=SELECT\b|WITH\b)"),)
ENDS = re.compile(
    r";"
    r"|\n\s*\n"                                                     # a paragraph
    r"|\n(?=[^\n]*[A-Za-z)][.!?:]\)?\s*(?:\n|\Z))"                  # a line that ends as a sentence
    r"|\n(?=[A-Z][a-z]+ [a-z]+ [a-z]+\b)"                           # a line that begins as one
    r"|\n(?=\s*(?:\#+ |\*\*))"                                      # a heading
    r"|[.!](?=\s+[A-Z])")                                           # a sentence in the same line
PROSE = re.compile(r"\(?[A-Z][a-z]+\b.*[A-Za-z)`][.!?:]\)?\Z|[-*+]\s+[A-Z`*]|\d+[.)] |\#+ |\*\*", re.DOTALL)


def masked(text, quoted=QUOTED):
    """A text of the same length with _ for the content of strings and quoted names, and blanks for comments."""
    def blanked(match):
        return re.sub(r"[^\n]", " " if match[0][:2] in ("--", "/*") else "_", match[0])

    return re.sub(f"{quoted}|{COMMENT}", blanked, text, flags=re.DOTALL)


def outer(query):
    """A text of the same length with blanks also for the content of parentheses."""
    query, count = masked(query), 1
    while count:
        query, count = re.subn(r"\([^()]*\)", lambda match: " " * len(match[0]), query)
    return query


def is_ordered(query):
    """Whether a query has ORDER BY outside all parentheses."""
    return re.search(r"\border\s+by\b", outer(query), re.IGNORECASE) is not None


def with_ties(query):
    """The query, with the rows that its ORDER BY leaves open in the order of the SQL function tie()."""
    end = re.search(r"\s*\blimit\b|[\s;]*\Z", outer(query), re.IGNORECASE).start()
    order = ", tie()" if is_ordered(query) else " ORDER BY tie()"
    return query[:end] + order + query[end:]


def first_word(text, position=0):
    """Index of the first word from a position on, behind comments and opening parentheses."""
    while match := TO_SKIP.match(text, position):
        position = match.end()
    return position


def begins_as(pattern, text):
    """Whether a text matches `pattern` behind comments and opening parentheses."""
    return pattern.match(text, first_word(text)) is not None


def statement_of(text):
    """The statement in an agent's text (see above). A statement alone stays as it is."""
    if len(text) > MAX_CHARS:
        return text
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    if begins_as(QUERY, text):
        return whole_query(text)
    if text.startswith(LOOK):                                       # in the last round: no answer
        return text
    text = TAG.sub("\n", text).strip()
    blocks = [without_language(block) for _, block in FENCE.findall(text)]
    prose = FENCE.sub("\n\n", text).strip()
    spans = [span for _, span in BACKTICKS.findall(prose)]
    announced, in_capitals = query_in_prose(prose, ANNOUNCED), query_in_prose(prose, IN_CAPITALS)
    for candidate in [*blocks, *spans, announced, *strings_of(text), in_capitals]:
        if begins_as(QUERY, candidate):
            return whole_query(candidate)
    return blocks[0] if blocks and blocks[0] else text


def without_language(block):
    """The content of a fence, without the name of its language."""
    first, _, rest = block.partition("\n")
    for content in (block, LANGUAGE.sub("", block, count=1), rest):
        if begins_as(QUERY, content):
            return content.strip()
    return (rest if re.fullmatch(r"[\w+#.-]*\s*", first) else block).strip()


def query_in_prose(text, begins):
    """The text from its first query on; "" if it has none or begins as another statement."""
    if begins_as(OTHER_STATEMENT, text):
        return ""
    for begin in begins:
        looked_to = -1
        for match in begin.finditer(text):
            if match.end() <= looked_to:                            # the same word again
                continue
            looked_to = first_word(text, match.end())
            if QUERY.match(text, looked_to) and not is_remark(text, match.end()):
                return text[match.end():]
    return ""


def is_remark(text, position):
    """Whether a position is in a comment, or in a line that ends as a sentence."""
    line_begin = text.rfind("\n", 0, position) + 1
    line = text[line_begin:].partition("\n")[0]
    return "--" in text[line_begin:position] or re.search(r"[A-Za-z)][!?:]\s*\Z", line) is not None


def whole_query(text):
    """The query at the start of a text, without the text behind it, and without parentheses around the whole."""
    fence = FENCE_END.search(masked(text, STRING))                   # of one that began before the text
    text = text[:fence.start()] if fence else text
    query = text[:end_of(text)].strip()
    query = re.sub(r"(?:\s*</?[a-z]+>)+\Z", "", query)
    query = re.sub(r"(?<=[\w)'])(?:\.|\*\*|\.\*\*)\Z", "", query)    # the full stop of a sentence, bold letters
    for _ in range(MAX_DEPTH):
        inner = without_parentheses(query)
        if inner is None:
            break
        query = inner
    return query


def end_of(text):
    """Index of the end of the query at the start of a text."""
    bare = masked(text)
    for match in ENDS.finditer(bare):
        before, after = bare[:match.start()], text[match.end():].lstrip()
        if match[0] == ";":
            is_further = begins_as(QUERY, after) or begins_as(OTHER_STATEMENT, after)
            return len(text) if is_further else match.end()
        is_open = before.count("(") > before.count(")") or UNFINISHED.search(before[-100:])
        paragraph = after.partition("\n\n")[0].strip()
        if not is_open and (PROSE.match(paragraph) or not CLAUSE.match(paragraph)):
            return match.start()
    return len(text)


def without_parentheses(query):
    """The query inside parentheses around a whole query; None if there are none."""
    bare = masked(query).rstrip("; \n")
    depths = list(itertools.accumulate({"(": 1, ")": -1}.get(sign, 0) for sign in bare))
    is_whole = bare.startswith("(") and 0 not in depths[:-1] and depths[-1] == 0
    return query[1:len(bare) - 1].strip() if is_whole else None
