"""The text of an answer -> its code. Standard library alone."""
import collections
import functools
import re
import symtable
import textwrap

IMPORT = r"(?:import|from)[ \t]+\w"
DEFINITION = r"(?:async[ \t]+def|def|class)[ \t]+\w|@\w"
NAMING = re.compile(rf"""[ \t]*(?:{IMPORT}|"{{3}}|'{{3}}|[A-Za-z_(*][^=#`\n]*(?<![<>!=])=(?!=))""")
CODE = re.compile(rf"{NAMING.pattern}|[ \t]*(?:{DEFINITION}|try:|[A-Za-z_][\w.]*\(|\[.*[ \t]for[ \t]|"
                  r"(?:assert|async|del|for|global|if|match|pass|raise|while|with)\b)")
BEGINNING = re.compile(rf"(?i:[ \t]*+py[\w.]*+[ \t]++)?+(?=[ \t]*(?:{IMPORT}|{DEFINITION}|\w+ = ))")  # a language, code
USE = re.compile(r"assert\b|[A-Za-z_][\w.]*\(")
DECORATED = re.compile(rf"[ \t]*(?:{DEFINITION})")
CLAUSE = re.compile(r"[ \t]*(?:else|elif|except|finally)\b")
NOT_IN_BRACKETS = re.compile(rf"[ \t]*(?:{IMPORT}|{DEFINITION}|\w+ = |```|~~~)")          # as deep as the statement
MARKER = re.compile(r"[^\w\n]*I[ _]WANT[ _]TO[ _]ANSWER\b[ \t]*[:*_.]*", re.IGNORECASE)
TICKS = re.compile(r"`+|~{3,}")
TAGS = re.compile(r"^[ \t]*(?:<(?:pre|code)\b[^<>\n]*>){1,2}|(?:</(?:pre|code|s)>|<\|\w+\|>|\[/INST\]){1,4}[ \t]*$",
                  re.MULTILINE)
WORDS = re.compile(r"^(?!(?:assert|async|case|class|def|del|elif|else|except|finally|for|from|global|if|import|match|"
                   r"pass|raise|return|try|while|with)\b)[A-Za-z][\w ,:-]*$", re.MULTILINE)     # no effect
LEXEME = re.compile(r"""\"{3}|'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|#.*|`|\\(?:.|$)|[()\[\]{}]""")
Source = collections.namedtuple("Source", "marked sort statements names is_cut")
STRING_END = {quote: re.compile(rf"(?:\\.|(?!{quote}).)*+{quote}") for quote in ('"""', "'''")}
CUT_LENGTH = 10_000             # a longer statement is not cut before its fault
GROUP = 50                      # statements that are parsed together where not all of a text's do
COMPILED_LENGTH = 6000          # longer ones are only parsed: compile() takes quadratic time for many equal functions


def extract_code(answer):
    """The code of an answer, as a list of sources that are executed one after the other in one namespace.

    A text that is Python is the code. Else what looks like statements and parses is, in sources with no prose between:
    those after the first marker if they define something, those in fences before others, and of these all that define,
    import or assign; if none does, the first one, or the text as it is. docs/scorer.md has the rules."""
    text = textwrap.dedent(answer.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")).strip("\n")
    if definitions(text)[0] is not None and not WORDS.search(text):
        return [text]
    text = text.translate({0xFEFF: None, 0x200B: None, 0xA0: " "})
    sources, run, place = [], [], (False, 0)
    for marked, sort, statement in [*statements(text), (False, 0, None)]:
        if statement is None:
            sources += [Source(*place, *source) for source in parsed(run, place[1])] if run else []
            run = []
        elif run or not USE.match(statement):                           # a use before all definitions is an example
            run.append(statement)
            place = marked, sort
    whole = {name for source in sources if not source.is_cut for name in source.names}
    sources = [source for source in sources if not (source.is_cut and whole & source.names.keys())]
    marked = [source for source in sources if source.marked]
    group = marked if any(source.names for source in marked) else sources
    sort = max((source.sort for source in group if source.names), default=0)
    own = {"input"}.union(name for source in group for name, kind in source.names.items() if kind == "function")
    chosen = [source for source in group
              if source.sort >= sort and (source.names or only_names(source.statements, own))]
    return ["\n".join(source.statements) for source in chosen or sources[:1]] or [text]


def statements(text):
    """What looks like statements in a text, by its lines: yield (follows a marker?, sort, statement) in order, with
    statement None for prose; sort is 2 in a fence, 0 in single backticks, else 1. A line is read at most thrice."""
    lines = text.split("\n")
    last = {quote: text.count("\n", 0, text.rfind(quote)) if quote in text else -1 for quote in STRING_END}
    marked, fenced, begins, fence_sort, index = False, False, True, 2, 0
    while index < len(lines):
        line = lines[index]
        indent = line[:len(line) - len(line.lstrip())]
        is_comment = line.startswith("#", len(indent))
        if (marker := MARKER.match(line)) and not (is_comment and (fenced or indent)):
            yield marked, 0, None
            marked = begins = True
            line = indent + line[marker.end():].lstrip()
        if not line.strip() or is_comment and not marker:
            index += 1
            continue
        if line.startswith("<", len(indent)):
            line = indent + TAGS.sub("", line)
        if begins:
            fence_sort, begins = 1 if BEGINNING.match(line) else 2, False
        sort = fence_sort if fenced else 1
        is_code = CODE.match(line)
        for tick in () if is_code else TICKS.finditer(line):
            if code := BEGINNING.match(line, tick.end()):
                yield marked, 0, None
                fenced, is_code, sort = fenced or len(tick[0]) > 2, True, fence_sort if len(tick[0]) > 2 else 0
                line = indent + line[code.end():].lstrip()
                break
        if not is_code:
            yield marked, 0, None
            fenced = is_fenced_after(line, fenced)
            index += 1
            continue
        lines[index] = line
        end, column = statement_end(lines, index, len(indent), last)
        statement = lines[index:end] + ([lines[end][:column]] if column else [])
        fences = (i for i in range(1, len(statement)) if statement[i].lstrip().startswith(("```", "~~~")))
        shorter = 1 if line.lstrip().startswith(("'''", '"""')) else next(fences, None)
        if shorter and definitions(dedented(statement, len(indent)))[0] is None:        # quotes that are no string's
            statement, end, column = statement[:shorter], index + shorter, 0
        yield marked, sort, dedented(statement, len(indent))
        if column:
            yield marked, 0, None
            fenced = is_fenced_after(lines[end][column:], fenced)
        index = end + bool(column)


def dedented(lines, indent):
    """The lines as a text, with `indent` columns less, of blanks alone: a string may have less of them."""
    return "\n".join(line[:indent].lstrip() + line[indent:] for line in lines)


def is_fenced_after(prose, fenced):
    """Is what follows a line of prose in a fence? A word after ``` opens another one."""
    fences = [tick for tick in TICKS.finditer(prose) if len(tick[0]) > 2]
    return fenced if len(fences) % 2 == 0 else not fenced or bool(prose[fences[-1].end():].strip())


def statement_end(lines, first, indent, last):
    """Where the statement that begins at line `first` ends: (end, 0), or (line, column of the backtick that ends it).
    last: {triple quote: the last line that has one}."""
    depth, quote, is_joined, index = 0, None, False, first
    may_be_head = not NAMING.match(lines[first])                       # imports and assignments have no deeper lines
    while True:
        line, position = lines[index], 0
        if not (depth or quote or is_joined):
            is_decorator = line.startswith("@", indent)
        is_joined = False
        while True:
            if quote:
                if not (closing := STRING_END[quote].match(line, position)):
                    break
                quote, position = None, closing.end()
            if not (lexeme := LEXEME.search(line, position)):
                break
            position, token = lexeme.end(), lexeme[0]
            if token == "`":
                return index, lexeme.start()
            if token in last:
                quote = token if index < last[token] or token in line[position:] else None
            depth = max(0, depth + (token in "([{") - (token in ")]}"))
            is_joined = token == "\\"
        index += 1
        if index == len(lines):
            return index, 0
        after = index
        if not (depth or is_joined or quote):
            while after < len(lines) and (not lines[after].strip() or lines[after].lstrip()[0] == "#"):
                after += 1
            if after == len(lines):
                return index, 0
        its_indent = len(lines[after]) - len(lines[after].lstrip())
        if depth or is_joined or quote:
            if not quote and its_indent <= indent and NOT_IN_BRACKETS.match(lines[index]):
                return index, 0
        elif not (its_indent > indent and may_be_head or is_decorator and DECORATED.match(lines[after]) or
                  its_indent == indent and CLAUSE.match(lines[after])):
            return index, 0
        index = after


def parsed(run, sort):
    """A run of statements as sources, [([statement, …], names that it defines, is it cut?), …]: one if all of them
    parse, else one for each GROUP that does, else the neighbours that do. An unfenced statement is cut before its
    fault: indented prose may follow it."""
    names, fault = definitions("\n".join(run))
    if names is not None:
        return [(run, names, False)]
    if len(run) > GROUP:
        return [source for i in range(0, len(run), GROUP) for source in parsed(run[i:i + GROUP], sort)]
    if len(run) > 1:
        sources, follows = [], False
        for found in (parsed([statement], sort) for statement in run):
            joins = bool(found) and not found[0][2]
            if follows and joins:
                sources[-1] = sources[-1][0] + found[0][0], {**sources[-1][1], **found[0][1]}, False
            else:
                sources += found
            follows = joins
        return sources
    statement = TAGS.sub("", run[0])
    if statement != run[0]:
        return parsed([statement], sort)
    if sort == 2 or fault <= 1 or len(statement) > CUT_LENGTH:
        return []
    statement = "\n".join(statement.split("\n")[:fault - 1])
    names, _ = definitions(statement)
    return [] if names is None else [([statement], names, True)]


@functools.lru_cache(2)                                              # a text is often one run of statements
def definitions(source):
    """({name: "function" or "class"} for all that a source defines, lambdas too, 0), or (None, line of its fault) where
    it is not Python."""
    try:
        table = symtable.symtable(source, "<answer>", "exec")
        if len(source) <= COMPILED_LENGTH:
            compiled(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, getattr(error, "lineno", 0) or 0
    return {child.get_name(): child.get_type() for child in table.get_children()
            if child.get_name() not in ("listcomp", "setcomp", "dictcomp", "genexpr")}, 0


def only_names(run, own):
    """Does it only import and assign, with no call of the functions `own`?"""
    return all(map(NAMING.match, run)) and own.isdisjoint(re.findall(r"\b(\w+)\(", "\n".join(run)))


def compiled(source):
    return compile(source, "<answer>", "exec", dont_inherit=True)
