"""The text of an answer -> its code. Standard library alone.

A message of a model is prose with pieces of code in it. `pieces` finds them: fences show where code may stand, and
Python's own parser decides what is code. `chosen_pieces` picks those that the tested function needs.
docs/scorer.md has the rules.
"""
import __future__

import ast
import bisect
import builtins
import collections
import functools
import html
import json
import keyword
import re

MARKER = re.compile(r"[^\w\n]*I[ _]WANT[ _]TO[ _]ANSWER\b[ \t:*_.`–—-]*", re.IGNORECASE)
FENCE_RUN = re.compile(r"`{3,}|~{3,}")
FENCE_LINE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")
LANGUAGE = re.compile(r"[\w.+-]*")
TICKS = re.compile(r"`+|~{3,}")
QUOTED = re.compile(r"[ \t]*(?:(?:>>>|\.\.\.)(?: |$)|> ?)")         # the marks of a session and of a quotation
OPENING_TAGS = re.compile(r"[ \t]*(?:<\|?[A-Za-z][^<>]*>[ \t]*)+")
CLOSING_TAG = r"</\w+>|<\|\w+\|>|\[/\w+\]"
LABEL = re.compile(r"[^`]*?:[\s*_]*(?=(?:async|def|class|import|from|@|<\|?)\b)")        # before what may be code
WIDE_BLANKS = "\u00a0\u2002\u2003\u2009\u202f\u3000"                # no-break, en, em, thin, narrow, ideographic
ODD_BLANKS = {0xFEFF: None, 0x200B: None, **dict.fromkeys(map(ord, WIDE_BLANKS), " ")}      # None: they have no width
BLANKS = " \t" + WIDE_BLANKS
OPERATORS = {"and", "if", "in", "is", "not", "or"}
TWO_WORDS = re.compile(r"[ \t]*([^\W\d]\w*)[ \t]+([^\W\d]\w*)(?!['\"\w])")
LEXEME = re.compile(rf"""\"{{3}}|'{{3}}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|#.*|(?P<end>`|{CLOSING_TAG})|\\(?:.|$)|"""
                    r"[()\[\]{}]")
STRING_END = {quote: re.compile(rf"(?:\\.|(?!{quote}).)*+{quote}") for quote in ('"""', "'''")}
CLAUSE = re.compile(r"(?:else|elif|except|finally)\b")

OPENED_THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
HTML_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
HTML_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|#\d{1,5});")
THOUGHTS = re.compile(r".*(?:</think(?:ing)?>|\[/THINK\])", re.DOTALL)      # their beginning may be in the prompt
STRING = re.compile(r"""(?P<quotes>"{3}|'{3})(?P<content>.*?)(?:(?P=quotes)|\Z)|"(?:\\.|[^"\\])*+(?:"|\\?\Z)""",
                    re.DOTALL)

INLINE, PLAIN, FENCED = 0, 1, 2      # where a piece stands: between backticks in a line, in the open, in a fence
NUM_CLOSINGS = 12                    # lines with a fence that are tried as the end of one
LINE_EFFORT = 10                     # a line takes as long as so many characters, and its own
MAX_QUOTES = 3                       # a quotation in a quotation in a quotation

DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
IMPORTS = ast.Import, ast.ImportFrom
NAMING = *IMPORTS, ast.Assign, ast.AnnAssign

# A piece of code: does it follow the marker, where does it stand, its text, its statements (syntax trees), and was it
# cut at a fault.
Piece = collections.namedtuple("Piece", "is_marked place source nodes is_cut")


def extract_code(answer, calls=()):
    """The code of an answer, as a list of sources that are executed one after the other in one namespace.

    calls: the test calls; what defines a name that they use goes before what does not. Without code: [the text]."""
    return code_that_defines(answer, names_of_calls(calls))


def code_that_defines(answer, tested):
    """extract_code for calls that use the names in `tested`."""
    text = answer.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").strip("\n")
    sources = []
    for number, reading in enumerate(readings(text)):
        chosen, is_whole = chosen_pieces(pieces(reading), tested)
        if is_whole or number == 0:
            sources = [piece.source for piece in chosen]
        if is_whole:
            break
    return sources or [text]


def readings(text):
    """The text without thoughts, and in what other ways it may be read where it does not define a tested name."""
    text = OPENED_THOUGHTS.sub("", text, count=1)
    if is_escaped_html(text):
        text = html.unescape(text)
    thoughts = THOUGHTS.match(text)
    ways = [text[thoughts.end():]] if thoughts else []
    ways += [text, "\n\n".join(strings_of(text))]
    if "\n" not in text:
        ways.append(text.replace("\\n", "\n"))
    return dict.fromkeys(ways)


def is_escaped_html(text):
    """Has a text tags, and `&lt;` for `<`? (`a &lt; b` is Python, too: the parser does not tell.)"""
    between_tags, num_tags = HTML_TAG.subn("", text)
    return num_tags > 0 and bool(HTML_ENTITY.search(text)) and "<" not in between_tags and ">" not in between_tags


def strings_of(text):
    """The strings in a text, of JSON or between three quotes: one may be code."""
    strings = []
    for match in STRING.finditer(text):
        try:
            strings.append(match["content"] if match["quotes"] else json.loads(match[0], strict=False))
        except ValueError:
            pass
    return strings


def compiled_statements(source):
    """Code objects of a source, one for each statement at its top level, so that a fault of one costs only that one;
    an exception in the place of one that does not compile.

    Annotations are not evaluated, as by default since Python 3.14: an answer may repeat the request's signature with
    `List[int]`, and leave out the import."""
    nodes, _ = parsed(source)
    if nodes is None:
        try:
            nodes = parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return [error]
    futures = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    codes = []
    for node in nodes:
        try:
            codes.append(compiled(ast.Module([*futures, node], []), __future__.annotations.compiler_flag))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            codes.append(error)
    return codes


def compiled_whole(source):
    """The code object of a source, in a list."""
    return [compiled(source)]


def compiled(source, flags=0):
    return compile(source, "<answer>", "exec", flags, dont_inherit=True)


# ---------------------------------------------------------------------------------------------------------------------
# where code stands in a text

class Effort:
    """How many more characters may be read and parsed again, so that every text takes linear time."""

    def __init__(self, text):
        self.left = 4 * len(text) + 100_000

    def spend(self, num_chars):
        """Take so many; False if there were none left before."""
        self.left -= num_chars
        return self.left + num_chars > 0


def pieces(text, effort=None, num_quotes=0):
    """The pieces of code in a text, in order. A text that is Python is one piece (but for bare words)."""
    whole = whole_source(text)
    if whole is not None:
        return split(whole, parsed(whole)[0], False, PLAIN)
    reader = Reader(text, effort or Effort(text), num_quotes)
    while reader.index < len(reader.lines):
        reader.read_on()
    reader.end_run()
    return reader.pieces


class Reader:
    """Reads the lines of a text from the first to the last and collects its pieces.

    Each step of `read_on` reads some lines, or the beginning of a line: then what is left stands in its place."""

    def __init__(self, text, effort, num_quotes):
        self.lines, self.index = text.split("\n"), 0
        self.effort, self.num_quotes = effort, num_quotes
        self.fence_lines = [index for index, line in enumerate(self.lines) if FENCE_RUN.search(line)]
        self.is_marked = False                                      # does a line before have the marker?
        self.fence = None                                           # the ``` of the fence around the line, if any
        self.run = []                                               # neighbouring statements: [(source, nodes), …]
        self.pieces = []

    def read_on(self):
        line = self.lines[self.index]
        indent = indent_of(line)
        is_comment = line.startswith("#", indent)
        marker = MARKER.match(line)
        if marker and not (is_comment and (self.fence or indent)):
            self.read_marker(marker)
        elif is_comment:
            if not self.fence:                                      # a heading
                self.end_run()
            self.index += 1
        elif not line.strip():
            self.index += 1
        elif FENCE_LINE.match(line):
            self.end_run()
            self.read_fence()
        elif QUOTED.match(line) and self.num_quotes < MAX_QUOTES:
            self.end_run()
            self.read_quotation()
        elif tags := OPENING_TAGS.match(line):
            self.end_run()
            self.leave(line[tags.end():])
        elif not self.read_statement():
            self.end_run()
            self.read_prose()

    def leave(self, rest):
        """Of the current line a rest is left to read, or nothing."""
        line = self.lines[self.index]
        self.lines[self.index] = line[:indent_of(line)] + rest.lstrip()
        self.index += not rest.strip()

    def here(self):
        """Where a piece that begins here stands."""
        return FENCED if self.fence else PLAIN

    def end_run(self):
        """Neighbouring statements are a piece."""
        if self.run:
            source = "\n".join(source for source, _ in self.run)
            nodes = [node for _, statement_nodes in self.run for node in statement_nodes]
            self.pieces.append(Piece(self.is_marked, self.here(), source, nodes, False))
            self.run = []

    def read_marker(self, marker):
        self.end_run()
        index, is_first = self.index, not self.is_marked
        self.is_marked = True
        self.leave(self.lines[index][marker.end():])
        rest = "\n".join(self.lines[index:]) if is_first else ""
        if is_first and self.effort.spend(len(rest)):
            whole = whole_source(rest)
            if whole is not None:
                self.pieces += split(whole, parsed(whole)[0], True, self.here())
                self.index = len(self.lines)

    def read_fence(self):
        """A line that begins with a fence: it closes one, is one, or opens one whose content is Python or not."""
        fence_line = FENCE_LINE.match(self.lines[self.index])
        mark, info = fence_line[1], fence_line[2].strip()
        if self.fence and not info and mark.startswith(self.fence):
            self.fence = None
            self.index += 1
            return
        if any(run[0] == mark for run in FENCE_RUN.finditer(info)):
            self.read_backticks()
            return
        content, end = fence_content(self.lines, self.index, self.fence_lines, self.effort)
        if content is not None:
            self.pieces += split(content, parsed(content)[0], self.is_marked, FENCED)
            self.fence, self.index = None, end
            return
        self.fence = mark
        rest = without_language(info)
        is_code_begun = parsed(rest)[0] is not None or info.endswith(":")
        self.leave(rest if is_code_begun else "")

    def read_quotation(self):
        end = self.index
        while end < len(self.lines) and QUOTED.match(self.lines[end]):
            end += 1
        quoted = "\n".join(QUOTED.sub("", line, count=1) for line in self.lines[self.index:end])
        for piece in pieces(quoted, self.effort, self.num_quotes + 1):
            place = FENCED if self.fence else piece.place
            self.pieces.append(piece._replace(is_marked=self.is_marked or piece.is_marked, place=place))
        self.index = end

    def read_statement(self):
        """Read the statement that begins at the line; False where none does."""
        statement = statement_at(self.lines, self.index, self.fence, self.effort)
        if not statement:
            return False
        source, nodes, self.index, is_cut = statement
        if is_cut:
            self.end_run()
            self.pieces.append(Piece(self.is_marked, PLAIN, source, nodes, True))
        elif any(map(is_code, nodes)):
            self.run.append((source, nodes))
        else:
            self.end_run()
        return True

    def read_prose(self):
        line = self.lines[self.index]
        label = LABEL.match(line)
        if label and self.effort.spend(len(line)):
            self.leave(line[label.end():])
            return
        if self.fence:
            end = next((run for run in FENCE_RUN.finditer(line) if run[0].startswith(self.fence)), None)
            if end is None:
                self.index += 1
                return
            self.fence = None
            self.lines[self.index] = line[end.end():]
        self.read_backticks()

    def read_backticks(self):
        """Read the code between backticks in the line."""
        codes, rest = codes_in_line(self.lines[self.index])
        for place, code in codes:
            self.pieces += inline_piece(code, self.is_marked, place)
        self.lines[self.index] = rest
        self.index += not rest


def whole_source(text):
    """The text as Python, without blanks before its first line and without columns before all lines; None if it is
    not Python."""
    if is_prose(text.partition("\n")[0]):
        return None
    indent = indent_of(text)
    shifted = dedented(text.split("\n"), indent)
    # One blank before the first line is what stood behind the marker: the other lines have none because of it.
    candidates = [text.lstrip(" "), shifted] if indent == 1 else [shifted, text.lstrip(" ")]
    for candidate in dict.fromkeys(candidates):
        if parsed(candidate)[0] is not None:
            return candidate
    return None


def fence_content(lines, index, fence_lines, effort):
    """(The text in the fence that line `index` opens, index after it) where it is Python; else (None, None).

    A line of the code (a docstring) may look like the end of the fence: the next ones are tried, too."""
    opening = FENCE_LINE.match(lines[index])
    mark, info = opening[1], opening[2].strip()
    after = bisect.bisect_right(fence_lines, index)
    closings, loose = [], []                                        # [(line, column where the content ends in it), …]
    for end in fence_lines[after:after + NUM_CLOSINGS]:
        line = lines[end].strip()
        run = FENCE_RUN.search(lines[end])
        if line.startswith(mark) and not line.strip(mark[0]):
            closings.append((end, 0))
        elif run and run[0].startswith(mark):
            loose.append((end, run.start()))
    for end, column in [*closings, *loose, (len(lines), 0)]:
        if not effort.spend((end - index) * LINE_EFFORT):
            break
        content = lines[index + 1:end]
        if column:
            content.append(lines[end][:column])
        for source in with_first_line(content, info):
            if effort.spend(len(source)) and parsed(source)[0] is not None:
                if column:
                    lines[end] = lines[end][column + len(mark):]
                    return source, end
                return source, end + 1
    return None, None


def with_first_line(content, info):
    """The texts that a fence may hold: its lines, and before them the code on the fence's own line, if any."""
    first = next((line for line in content if line.strip()), "")
    source = dedented(content, indent_of(first))
    sources = [source]
    if info and not LANGUAGE.fullmatch(info):
        sources = [f"{without_language(info)}\n{source}", f"{without_language(info)}\n" + "\n".join(content), source]
    return sources


def without_language(info):
    """What stands on the line of a fence after the name of the language."""
    word, *rest = info.strip().split(None, 1) or [""]
    if rest and (is_prose(info) or rest[0].startswith("@")):
        return rest[0]
    return "" if LANGUAGE.fullmatch(info.strip()) else info.strip()


def codes_in_line(line):
    """([(where it stands, code between backticks), …], what is left to read: a fence that opens in the line, or what
    follows a backtick that the line does not close)."""
    codes, opening = [], None
    for ticks in TICKS.finditer(line):
        if opening is None:
            opening = ticks
        elif opening[0] == ticks[0]:
            code = line[opening.end():ticks.start()]
            codes.append((FENCED, without_language(code)) if len(ticks[0]) > 2 else (INLINE, code.strip()))
            opening = None
    if opening is None:
        return codes, ""
    is_fence = len(opening[0]) > 2
    return codes, line[opening.start() if is_fence else opening.end():].rstrip()


def inline_piece(code, is_marked, place):
    """Pieces of the code between backticks in a line: one, or none where it is no code."""
    nodes, _ = parsed(code)
    return split(code, nodes, is_marked, place) if nodes else []


# ---------------------------------------------------------------------------------------------------------------------
# what is code

def is_prose(line):
    """Does a line begin with two words that Python never has side by side? (Not needed, but much faster than to ask
    the parser.)"""
    words = TWO_WORDS.match(line)
    return bool(words) and not (keyword.iskeyword(words[1]) or words[1] in keyword.softkwlist or words[2] in OPERATORS)


def parse(source, mode="exec"):
    """The syntax tree of a source. Where garbage is collected in the middle of it and another thread parses meanwhile,
    Python 3.11 says SystemError of good code (its count of depths belongs to all threads); so it is tried again."""
    for _ in range(9):
        try:
            return ast.parse(source, "<answer>", mode)
        except SystemError:
            pass
    return ast.parse(source, "<answer>", mode)


@functools.lru_cache(512)
def parsed(source):
    """(The statements of a source as syntax trees, 0), or (None, the line of its fault) where it is not Python."""
    try:
        return parse(source).body, 0
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, getattr(error, "lineno", 0) or 0


def is_code(node):
    """Does a statement have an effect? `Explanation`, `9`, `(see below)` and `Note: this` have none: they are prose."""
    if isinstance(node, ast.AnnAssign):
        return node.value is not None
    if isinstance(node, ast.Expr):
        return any(isinstance(inner, (ast.Call, ast.NamedExpr)) for inner in ast.walk(node))
    return not isinstance(node, (ast.Return, ast.Pass, ast.Break, ast.Continue))


def split(source, nodes, is_marked, place):
    """Pieces of a source that is Python: its statements between bare words and the like."""
    runs = [[]]
    for node in nodes:
        if is_code(node):
            runs[-1].append(node)
        elif not is_docstring(node, nodes):
            runs.append([])
    if len(runs) == 1:
        return [Piece(is_marked, place, source, runs[0], False)] if runs[0] else []
    lines = source.split("\n")
    return [Piece(is_marked, place, "\n".join(lines[first_line(run[0]) - 1:run[-1].end_lineno]), run, False)
            for run in runs if run]


def is_docstring(node, nodes):
    return node is nodes[0] and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and \
        isinstance(node.value.value, str)


def first_line(node):
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def statement_at(lines, index, fence, effort):
    """(source, syntax trees, index after it, is it cut?) of the statement that begins at a line; None where none does.

    A statement ends with its last deeper line. If that is not Python, deeper prose may follow it: then it is its first
    line alone, or, outside a fence, what comes before the fault."""
    if is_prose(lines[index]):
        return None
    indent = indent_of(lines[index])
    first_end, end, column = statement_ends(lines, index, indent, effort)
    sources = [(lines[index:end] + [lines[end][:column]] if column else lines[index:end], end)]
    if first_end < end:
        sources.append((lines[index:first_end], first_end))
    for source_lines, source_end in sources:
        source = dedented(source_lines, indent)
        if not effort.spend(len(source)):
            return None
        for candidate in dict.fromkeys((source, source.translate(ODD_BLANKS))):
            nodes, fault = parsed(candidate)
            if nodes:
                if column and source_end == end:
                    lines[end] = lines[end][column:]
                return candidate, nodes, source_end, False
    nodes, fault = parsed(dedented(sources[0][0], indent))
    if not fence and fault > 1:
        source = dedented(lines[index:index + fault - 1], indent)
        nodes, _ = parsed(source)
        if nodes and effort.spend(len(source)):
            return source, nodes, index + fault - 1, True
    return None


def statement_ends(lines, index, indent, effort):
    """Where the statement that begins at a line ends: (index after its first logical line, index after its last deeper
    line or clause, 0), or with the column of the backtick or tag, in the line of this index, that ends it."""
    end, column = logical_line_end(lines, index, effort)
    first_end = end
    is_decorator = lines[index].startswith("@", indent)
    while not column:
        after = end
        while after < len(lines) and is_blank_or_comment(lines[after]) and effort.spend(LINE_EFFORT):
            after += 1
        if after == len(lines) or not effort.spend(LINE_EFFORT):
            break
        next_indent = indent_of(lines[after])
        is_deeper = next_indent > indent
        is_clause = next_indent == indent and CLAUSE.match(lines[after], indent)
        if not (is_deeper or is_clause or is_decorator and next_indent == indent):
            break
        if not is_deeper:
            is_decorator = lines[after].startswith("@", indent)
        end, column = logical_line_end(lines, after, effort)
    return first_end, end, column


def logical_line_end(lines, index, effort):
    """(Index after the last line of the brackets, strings and backslashes of a line, 0), or (index, column) of the
    first backtick or closing tag outside of strings: Python has none."""
    depth, quote = 0, None
    while index < len(lines):
        line, position, is_joined = lines[index], 0, False
        if not effort.spend(len(line) + LINE_EFFORT):
            return index + 1, 0
        while True:
            if quote:
                closing = STRING_END[quote].match(line, position)
                if not closing:
                    break
                quote, position = None, closing.end()
            lexeme = LEXEME.search(line, position)
            if not lexeme:
                break
            position, token = lexeme.end(), lexeme[0]
            if lexeme["end"]:
                return index, lexeme.start()
            if token in STRING_END:
                quote = token
            elif token in "([{":
                depth += 1
            elif token in ")]}":
                depth = max(0, depth - 1)
            is_joined = token == "\\"
        index += 1
        if not (depth or quote or is_joined):
            break
    return index, 0


def is_blank_or_comment(line):
    return line.strip()[:1] in ("", "#")


def indent_of(line):
    return len(line) - len(line.lstrip(BLANKS))


def dedented(lines, indent):
    """The lines as a text, with `indent` columns less, of blanks alone: a line of a string may have fewer."""
    return "\n".join(line[:indent].lstrip(BLANKS) + line[indent:] for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# which code counts

# The global names of a piece: of its functions, classes and lambdas; that it imports; that it binds (these, too); whose
# content it changes (TABLE[0] = 1, TABLE.update(a=1), random.seed(0)); that it passes to a call whose result it does
# not use (fill(TABLE)); that it reads; whose functions it calls itself.
Names = collections.namedtuple("Names", "defined imported bound changed passed read called")


def chosen_pieces(all_pieces, tested):
    """(The pieces that are the answer, in order; do they define a tested name and are not cut there?).
    tested: the names that the test calls use.

    Those that define a tested name decide where the answer is: after the marker or anywhere, in fences or in the open.
    Of the pieces there, definitions, imports and assignments count, and what sets up a global that these read."""
    names = [names_of(piece.nodes) for piece in all_pieces]
    whole = set().union(*(names[i].defined for i, piece in enumerate(all_pieces) if not piece.is_cut))
    candidates = [i for i, piece in enumerate(all_pieces) if not (piece.is_cut and whole & names[i].defined)]
    group, wanted = answer_group(all_pieces, names, candidates, tested)
    if not group:
        return [all_pieces[i] for i in candidates[:1]], False

    functions = {"input"}.union(*(names[i].defined for i in group))
    waiting = []
    for i in group:
        only_names = all(isinstance(node, NAMING) for node in all_pieces[i].nodes) and functions.isdisjoint(
            names[i].called)
        if names[i].defined or wanted & names[i].bound or only_names:
            waiting.append(i)

    near, far = collections.defaultdict(list), collections.defaultdict(list)    # name -> pieces that set it up
    for i in group:
        for name in names[i].bound | names[i].changed | names[i].passed - functions:
            near[name].append(i)
    for i in set(candidates) - set(group):
        for name in names[i].bound:
            far[name].append(i)
    chosen = set()
    while waiting:
        i = waiting.pop()
        if i in chosen:
            continue
        chosen.add(i)
        for name in names[i].read:
            if name in near:
                waiting += near[name]
                near[name] = []
            elif not hasattr(builtins, name):                       # an import before the marker, or outside of fences
                waiting += far.pop(name, [])
    excerpts = set()
    if defines_twice([all_pieces[i] for i in chosen]):
        bodies = longest_bodies([all_pieces[i] for i in chosen])
        excerpts = {i for i in chosen if is_excerpt(all_pieces[i], bodies)}
    in_order = [*sorted(excerpts), *sorted(chosen - excerpts)]      # so that an excerpt replaces nothing
    is_whole = any(not all_pieces[i].is_cut and wanted & names[i].bound for i in chosen)
    return [all_pieces[i] for i in in_order], is_whole and (not tested or bool(wanted & tested))


def defines_twice(some_pieces):
    """Has a name two definitions? (Without that, no piece is an excerpt: this saves the time to compare them.)"""
    names = [node.name for piece in some_pieces for node in piece.nodes if isinstance(node, DEFINITIONS)]
    return len(set(names)) < len(names)


def longest_bodies(some_pieces):
    """{name: the body of its longest definition}."""
    bodies = {}
    for piece in some_pieces:
        for node in piece.nodes:
            if isinstance(node, DEFINITIONS):
                bodies[node.name] = max(bodies.get(node.name, []), body_of(node), key=len)
    return bodies


def is_excerpt(piece, bodies):
    """Is each definition of a piece only the beginning of a longer one? `def total(values): ...` shows a signature."""
    definitions = [node for node in piece.nodes if isinstance(node, DEFINITIONS)]
    for node in definitions:
        body, whole = body_of(node), bodies[node.name]
        if len(body) == len(whole) or body != whole[:len(body)]:
            return False
    return bool(definitions)


def body_of(definition):
    """The statements in a definition as texts, but for those that only hold a place."""
    try:
        return [ast.dump(node) for node in definition.body if not is_placeholder(node)]
    except RecursionError:
        return [definition]


def is_placeholder(node):
    """Is a statement `pass`, `...`, a docstring or `raise NotImplementedError`?"""
    if isinstance(node, ast.Raise):
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return isinstance(error, ast.Name) and error.id == "NotImplementedError"
    return isinstance(node, ast.Pass) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def answer_group(all_pieces, names, candidates, tested):
    """(The numbers of the pieces among which the answer is, the names that it is about); ([], set()) where no piece
    defines anything."""
    fields = [("defined", tested), ("imported", tested), ("bound", tested), ("defined", None)]
    for field, wanted in fields:
        with_names = {i: getattr(names[i], field) for i in candidates}
        wanted = set().union(*with_names.values()) if wanted is None else wanted
        holders = [i for i in candidates if wanted & with_names[i]]
        if holders:
            marked = [i for i in holders if all_pieces[i].is_marked]
            places = [all_pieces[i].place for i in marked or holders]
            least = max(places)
            if field == "defined" and least == FENCED:
                least = [place for place in places if place != INLINE][-1]      # a later version may be in the open
            return [i for i in candidates
                    if all_pieces[i].place >= least and (all_pieces[i].is_marked or not marked)], wanted
    return [], set()


def names_of_calls(calls):
    """The names that test calls use, but for builtins."""
    names = set()
    for call in calls:
        for node in parsed(call.strip())[0] or ():
            names |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return {name for name in names if not hasattr(builtins, name)}


def names_of(nodes):
    """The Names of a piece, by its statements."""
    names = Names(*(set() for _ in Names._fields))
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            (names.read if isinstance(node.ctx, ast.Load) else names.bound).add(node.id)
            continue
        if isinstance(node, (*DEFINITIONS, ast.Lambda)):
            names.read.update(free_names(node))
            if not isinstance(node, ast.Lambda):
                names.defined.add(node.name)
            continue                                                # what is inside of it is not global
        if isinstance(node, IMPORTS):
            names.imported.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            names.defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.called.add(node.func.id)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            names.changed.update(name_of_part(node.value.func))
            names.passed.update(inner.id for inner in node.value.args if isinstance(inner, ast.Name))
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            names.changed.update(name_of_part(node))
        waiting += ast.iter_child_nodes(node)
    names.bound.update(names.defined, names.imported)
    return names


def name_of_part(node):
    """{the name} of which a[0], a.b or a.b[0].c is a part; nothing for a name alone, or for a part of something else.
    """
    is_part = False
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node, is_part = node.value, True
    return {node.id} if is_part and isinstance(node, ast.Name) else set()


def free_names(definition):
    """The names that a function or lambda reads and that are not local to it; of a class, all that it reads."""
    nodes = list(ast.walk(definition))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if isinstance(definition, ast.ClassDef):
        return names
    local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return names - local | {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
