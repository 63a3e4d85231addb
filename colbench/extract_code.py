"""Finds the code in the text of an answer. Standard library only.

A model's message is prose with pieces of code. `Reader` finds them: at each line it asks Python's own parser whether a
statement starts there; fences and tags mark where the code is. `chosen_pieces` selects the pieces with the tested
function. docs/scorer.md has the rules.
"""
import __future__

import ast
import builtins
import contextlib
import functools
import itertools
import json
import re

FENCE_LINE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")
LANGUAGE = re.compile(r"\A(?!(?:async|class|def|from|import)\b)[\w.+-]+(?:[ \t]+(?=[\w@])|$)")
TICKS = re.compile(r"`+|~{3,}")
OPENING_TAGS = re.compile(r"[ \t]*(?:<\|?[A-Za-z][^<>]*>[ \t]*)+")
CLOSING_TAG = r"</\w+>|<\|\w+\|>|\[/\w+\]"
LABEL = re.compile(r"[^`]*?(?::|\s[-–—])[\s*_]*(?=(?:async|def|class|import|from|@|<\|?)\b)")     # of code
LEXEME = re.compile(rf"""\"{{3}}|'{{3}}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|#.*|(?P<end>`|{CLOSING_TAG})|\\(?:.|$)|"""
                    r"[()\[\]{}]")
STRING_END = {quote: re.compile(rf"(?:\\.|(?!{quote}).)*+{quote}") for quote in ('"""', "'''")}
CLAUSE = re.compile(r"(?:else|elif|except|finally)\b")

OPENED_THOUGHTS = re.compile(r"\A\s*(?:<think(?:ing)?>.*?</think(?:ing)?>|\[THINK\].*?\[/THINK\])", re.DOTALL)
END_OF_THOUGHTS = re.compile(r"</think(?:ing)?>|\[/THINK\]")
QUOTES = "'", '"', "`"
STRING = re.compile(r"""(?P<quotes>"{3}|'{3})(?P<content>.*?)(?:(?P=quotes)|\Z)|"(?:\\.|[^"\\])*+(?:"|\\?\Z)""",
                    re.DOTALL)
INLINE, PLAIN, FENCED = 0, 1, 2      # where a piece stands: between backticks in a line, in the open, in a fence
NO_PYTHON = SyntaxError, ValueError, RecursionError, MemoryError
DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
IMPORTS = ast.Import, ast.ImportFrom


def pieces_of(answer, tested):
    """The Pieces of code in an answer that are executed; tested: the names that the test calls use."""
    text = answer.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n").strip("\n")     # no mark of order
    pieces = {}                                                     # {reading: its Pieces}
    for reading in readings(text):
        if reading not in pieces:
            pieces[reading], is_whole = chosen_pieces(Reader(reading).read(), tested)
            if is_whole:
                return pieces[reading]
    return next(iter(pieces.values()))


def readings(text):
    """The text without thoughts, and other ways to read it, which are tried if it defines no tested name."""
    text = OPENED_THOUGHTS.sub("", text, count=1)
    yield without_thoughts(text)
    yield text
    yield "\n\n".join(strings_of(text))
    yield text.replace("\\n", "\n")
    yield text.replace("\u00a0", " ").replace("\u200b", "")


def without_thoughts(text):
    """The text after the last end of thoughts; their start may be in the prompt. Marks inside a statement, a comment or
    quotation marks do not count."""
    ends = list(END_OF_THOUGHTS.finditer(text))
    if not ends:
        return text
    numbers = itertools.count()
    reader = Reader(END_OF_THOUGHTS.sub(lambda _: f"</{next(numbers)}>", text))     # the Reader knows them by number
    reader.read()
    code = "\n".join(reader.sources)
    for number, end in reversed(list(enumerate(ends))):
        is_quoted = text[end.start() - 1:end.start()] in QUOTES and text[end.end():end.end() + 1] in QUOTES
        if f"</{number}>" not in code and not is_quoted:
            return text[end.end():]
    return text


def strings_of(text):
    """The strings in a text, of JSON or between three quotes, any of which may be code."""
    strings = []
    for match in STRING.finditer(text):
        with contextlib.suppress(ValueError):
            strings.append(match["content"] if match["quotes"] else json.loads(match[0], strict=False))
    return strings


class Statement:
    """A statement, compiled alone, so that its faults do not affect others; or a whole program.

    module: its syntax tree, with the imports from __future__ before it
    code: its code object, or the exception that compiling it raises"""

    def __init__(self, module):
        self.module = module
        try:
            self.code = compile(self.module, "<answer>", "exec", dont_inherit=True)
        except NO_PYTHON as error:
            self.code = error

    def execute(self, namespace):
        """Execute it. If a name is missing and it has annotations, execute it again without evaluating these: an answer
        may repeat the request's signature with `List[int]`, and leave out the import."""
        if isinstance(self.code, Exception):
            raise self.code
        try:
            exec(self.code, namespace)
        except NameError:
            nodes = ast.walk(self.module)
            if not any(getattr(node, "annotation", None) or getattr(node, "returns", None) for node in nodes):
                raise
            flag = __future__.annotations.compiler_flag
            exec(compile(self.module, "<answer>", "exec", flag, dont_inherit=True), namespace)


def statements_of(nodes):
    """The Statements of syntax trees."""
    futures = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    return [Statement(ast.Module([*futures, node], [])) for node in nodes]


def imports_in(nodes):
    """[(name, module, attribute or None), …] of all imports in statements, except those in functions and classes. The
    name "*" stands for every name of the module."""
    bound, waiting = [], list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = alias.name if alias.asname else alias.name.split(".")[0]
                bound.append((alias.asname or module, module, None))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            bound += [(alias.asname or alias.name, node.module, alias.name) for alias in node.names]
        elif not isinstance(node, DEFINITIONS):
            waiting += ast.iter_child_nodes(node)
    return bound


# ---------------------------------------------------------------------------------------------------------------------
# where code stands in a text

class Piece:
    """Neighbouring statements: their source, their syntax trees, their place, and whether they are cut at a fault. Its
    global names:

    defined: functions, classes and lambdas
    imported: imports
    bound: all, including these."""

    def __init__(self, source, nodes, place, is_cut=False):
        self.source, self.nodes, self.place, self.is_cut = source, nodes, place, is_cut
        self.defined, self.imported, self.bound = set(), set(), set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if isinstance(node, DEFINITIONS):
                self.defined.add(node.name)
                continue                                            # the names inside are not global
            if isinstance(node, IMPORTS):
                self.imported.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.bound.add(node.id)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                self.defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
            waiting += ast.iter_child_nodes(node)
        self.bound |= self.defined | self.imported


class Reader:
    """Reads the lines of a text from the first to the last and collects its pieces.

    Each step of `read_on` reads some lines, or the beginning of a line, and then leaves the rest in its place."""

    def __init__(self, text):
        # A single blank before the first line is the one after the answer's marker; the other lines have none.
        self.lines = (text[1:] if indent_of(text) == 1 else text).split("\n")
        self.index = 0
        self.fence = None                                           # the ``` of the fence around the line, if any
        self.tick_index = None                                      # the line of the last backtick in prose
        self.run = []                                               # neighbouring statements: [(source, nodes), …]
        self.pieces = []
        self.sources = []                                           # of all statements, and lines of comments

    def read(self):
        """The Pieces of the text, in order."""
        while self.index < len(self.lines):
            self.read_on(self.lines[self.index])
        self.end_run()
        return self.pieces

    def read_on(self, line):
        if not line.strip() or line.lstrip().startswith("#"):
            self.sources.append(line)
            self.index += 1
        elif fence_line := FENCE_LINE.match(line):
            self.end_run()
            self.read_fence(*fence_line.groups())
        elif tags := OPENING_TAGS.match(line):
            self.end_run()
            self.leave(line[tags.end():])
        elif not self.read_statement():
            self.end_run()
            self.read_prose(line)

    def leave(self, rest):
        """Keep the unread rest of the current line, if any."""
        line = self.lines[self.index]
        self.lines[self.index] = line[:indent_of(line)] + rest.lstrip()
        self.index += not rest.strip()

    def end_run(self):
        """Neighbouring statements are a piece."""
        if self.run:
            source = "\n".join(source for source, _ in self.run)
            nodes = [node for _, statement_nodes in self.run for node in statement_nodes]
            self.pieces.append(Piece(source, nodes, FENCED if self.fence else PLAIN))
            self.run = []

    def read_fence(self, mark, info):
        info = info.strip()
        closes_fence = self.fence and not info and mark.startswith(self.fence)
        self.fence = None if closes_fence else mark
        self.leave(LANGUAGE.sub("", info, count=1))

    def read_prose(self, line):
        """Continue after a label, or after the next backticks or fence; else in the next line."""
        label = LABEL.match(line)
        ticks = (ticks for ticks in TICKS.finditer(line) if not self.fence or ticks[0].startswith(self.fence))
        if label:
            self.leave(line[label.end():])
        elif mark := next(ticks, None):
            opens_fence = len(mark[0]) > 2 and not self.fence
            self.leave(line[mark.start() if opens_fence else mark.end():])
            self.fence, self.tick_index = None, self.index
        else:
            self.index += 1

    def read_statement(self):
        """Read the statement that begins at the line, or return False if none does.

        A statement ends with its last deeper line. If that is not Python, the deeper lines may be prose: then the
        statement is its first line alone, or, outside a fence, the lines before the fault."""
        ends = list(self.statement_ends())
        _, fault = parsed(self.source(*ends[0]))
        if not self.fence and fault > 1:
            ends.append((self.index + fault - 1, 0))
        for end, column in dict.fromkeys(ends):
            source = self.source(end, column)
            nodes, _ = parsed(source)
            if nodes:
                self.add(source, nodes, (end, column), is_cut=(end, column) not in ends[:2])
                return True
        return False

    def source(self, end, column):
        """The text from the current line to a column of the line `end`, dedented."""
        lines = self.lines[self.index:end]
        if column:
            lines.append(self.lines[end][:column])
        return dedented(lines)

    def add(self, source, nodes, end, is_cut):
        """Add a statement that ends at (index, column), and continue there."""
        index, column = end
        self.sources.append(source)
        is_inline = column and not self.fence and self.tick_index == self.index == index
        has_effect = any(map(is_code, nodes))
        if has_effect and not (is_cut or is_inline):
            self.run.append((source, nodes))
        else:
            self.end_run()
        if has_effect and (is_cut or is_inline):
            self.pieces.append(Piece(source, nodes, INLINE if is_inline else PLAIN, is_cut))
        if column:
            self.lines[index] = self.lines[index][column:]
        self.index = index

    def statement_ends(self):
        """Possible ends of the statement at the current line, as (index of a line, column of the end in it): its last
        deeper line or clause, a backtick or tag, and its first logical line."""
        lines, index = self.lines, self.index
        indent = indent_of(lines[index])
        is_decorator = lines[index].startswith("@", indent)
        end, column = first_end = self.logical_line_end(index)
        while not column:
            after = end
            while after < len(lines) and lines[after].strip()[:1] in ("", "#"):     # blank, or a comment
                after += 1
            if after == len(lines):
                break
            next_indent = indent_of(lines[after])
            is_clause = next_indent == indent and (is_decorator or CLAUSE.match(lines[after], indent))
            if not (next_indent > indent or is_clause):
                break
            if next_indent == indent:
                is_decorator = lines[after].startswith("@", indent)
            end, column = self.logical_line_end(after)
        return (end, column), first_end

    def logical_line_end(self, index):
        """(Index after the logical line that begins at `index`, 0), or (index, column) of the first backtick or closing
        tag outside of strings: Python has none."""
        depth, quote, is_joined = 0, None, True
        while index < len(self.lines) and (depth or quote or is_joined):
            line, position, is_joined = self.lines[index], 0, False
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
        return index, 0


def parse(source, mode="exec"):
    """The syntax tree of a source. If garbage is collected meanwhile and another thread parses, Python 3.11 raises
    SystemError on good code (all threads share its count of depths), so it is tried again."""
    for _ in range(9):
        with contextlib.suppress(SystemError):
            return ast.parse(source, "<answer>", mode)
    return ast.parse(source, "<answer>", mode)


@functools.lru_cache(512)
def parsed(source):
    """(The statements of a source as syntax trees, 0), or (None, the line of its fault) if it is not Python."""
    try:
        return parse(source).body, 0
    except NO_PYTHON as error:
        return None, getattr(error, "lineno", 0) or 0


def is_code(node):
    """Whether a statement has an effect. `Explanation`, `9`, `(see below)` and `Note: this` have none: they are prose.
    """
    if isinstance(node, ast.AnnAssign):
        return node.value is not None
    if isinstance(node, ast.Expr):
        return any(isinstance(inner, (ast.Call, ast.NamedExpr)) for inner in ast.walk(node))
    return not isinstance(node, (ast.Return, ast.Pass, ast.Break, ast.Continue))


def indent_of(line):
    return len(line) - len(line.lstrip(" \t"))


def dedented(lines):
    """The lines as a text, without the first line's indent. Lines with a smaller indent (of a string) lose all theirs.
    """
    indent = indent_of(lines[0]) if lines else 0
    return "\n".join(line[:indent].lstrip(" \t") + line[indent:] for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# which code counts

def chosen_pieces(pieces, tested):
    """(The pieces that are the answer, in order; whether they define a tested name and are not cut there).

    Pieces that define a tested name decide the place of the answer: in fences, in the open, or between backticks. All
    pieces in this place count, and imports everywhere."""
    whole = set().union(*(piece.defined for piece in pieces if not piece.is_cut))
    pieces = [piece for piece in pieces if not (piece.is_cut and whole & piece.defined)]
    least, wanted = answer_place(pieces, tested)
    if not wanted:
        return pieces[:1], False

    chosen = [piece for piece in pieces if piece.place >= least or piece.imported]
    known = set().union(*(piece.bound for piece in chosen))
    # helper functions outside the fence
    chosen = [piece for piece in pieces if piece in chosen or piece.place > INLINE and piece.bound - known]
    chosen = without_excerpts(chosen)
    is_whole = any(not piece.is_cut and wanted & piece.bound for piece in chosen)
    return chosen, is_whole and (not tested or bool(wanted & tested))


def without_excerpts(pieces):
    """The pieces without those that only repeat a part of an earlier definition, or show signatures: they would replace
    the definitions that they explain."""
    nodes = [node for piece in pieces for node in piece.nodes]
    whole = {node.name for node in nodes if isinstance(node, DEFINITIONS) and not is_signature(node)}
    text, rest = "\n", []
    for piece in pieces:
        is_shown_again = piece.defined and f"\n{piece.source}\n" in text
        if not is_shown_again and not all(is_signature(node) and node.name in whole for node in piece.nodes):
            rest.append(piece)
        text += f"{piece.source}\n"
    return rest


def is_signature(node):
    """Whether it is a function without a body, such as `def total(values): ...`, or with `...` for a part of it."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    for statement in node.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_text and statement.value.value is ...:
            return True
        is_refusal = isinstance(statement, ast.Raise) and "NotImplementedError" in ast.dump(statement)
        if not (is_text or is_refusal or isinstance(statement, ast.Pass)):
            return False
    return True


def answer_place(pieces, tested):
    """(The least place of the answer's pieces, the names that decide it), or (INLINE, set()) without definitions."""
    definitions = set().union(*(piece.defined for piece in pieces))
    for field, wanted in (("defined", tested), ("imported", tested), ("bound", tested), ("defined", definitions)):
        places = [piece.place for piece in pieces if wanted & getattr(piece, field)]
        if places:
            least = max(places)
            if field == "defined" and least == FENCED:              # a later version may be in the open
                least = [place for place in places if place != INLINE][-1]
            return least, wanted
    return INLINE, set()


def names_of_calls(calls):
    """The names that test calls use, except builtins."""
    names = set()
    for call in calls:
        for node in parsed(call.strip())[0] or ():
            names |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return {name for name in names if not hasattr(builtins, name)}
