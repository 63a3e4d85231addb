"""Runs an agent's SQL on a database, and normalises rows. sql.py sends the text of this file to the scorer's confined
child program."""
import itertools
import sqlite3

PRAGMAS = "query_only = 1", "trusted_schema = 0", "hard_heap_limit = 67108864", "temp_store = 2"
LIMITS = {"LENGTH": 100_000, "SQL_LENGTH": 10_000, "COLUMN": 100, "EXPR_DEPTH": 100, "COMPOUND_SELECT": 50,
          "VDBE_OP": 20_000, "ATTACHED": 0, "LIKE_PATTERN_LENGTH": 1000}
ALLOWED = sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE
FORBIDDEN = "load_extension", "fts3_tokenizer", "random", "randomblob"
MAX_ROWS = 1000
MAX_ORDERS = 120                # orders of columns with the same cells that are tried: all orders of five columns
MAX_CHARS = 200_000


def insert(connection, tables):
    """Fill tables, {name: rows}."""
    for name, rows in tables.items():
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', rows)


def authorize(action, table, name, *_):
    if action in ALLOWED and name not in FORBIDDEN:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def open_database(schema, tables, more_pragmas=()):
    """A filled sqlite database in memory, with limits, that only allows SELECT."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(schema)
    insert(connection, tables)
    for pragma in (*PRAGMAS, *more_pragmas):
        connection.execute(f"PRAGMA {pragma}")
    for name, limit in LIMITS.items():
        connection.setlimit(getattr(sqlite3, f"SQLITE_LIMIT_{name}"), limit)
    connection.set_authorizer(authorize)
    return connection


def select(connection, statement):
    """(names of the columns, rows) of one SELECT. Raises ValueError or sqlite3.Error if it has none."""
    steps = iter(range(300))                                        # of 10,000 instructions each
    connection.set_progress_handler(lambda: next(steps, None) is None, 10_000)
    cursor = connection.execute(statement)
    if cursor.description is None:
        raise ValueError("no SELECT")
    rows, size = [], 0
    for row in cursor:
        rows.append(row)
        for cell in row:
            size += len(cell) if isinstance(cell, (str, bytes)) else 8
        if len(rows) > MAX_ROWS or size > MAX_CHARS:
            raise ValueError(f"more than {MAX_ROWS:,} rows or {MAX_CHARS:,} characters")
    return [column[0] for column in cursor.description], rows


def exact(cell):
    """A cell with whole numbers as int, so that they are compared exactly, and tiny numbers as 0, because rounding may
    leave one of SUM(a) - SUM(b)."""
    if not isinstance(cell, float):
        return cell
    if abs(cell) < 5e-10:
        return 0
    return int(cell) if cell.is_integer() and abs(cell) < 2 ** 53 else cell


def rounded(cell):
    """A cell in a form that hides rounding for almost all numbers: to sort by, not to compare."""
    cell = exact(cell)
    if not isinstance(cell, float):
        return cell
    if 10 ** 9 <= abs(cell) < 2 ** 53:                              # where 9 digits are coarser than whole numbers
        return round(cell)
    return exact(float(f"{round(cell, 9):.9g}"))


def order_of_row(row):
    """Sort key of a row of rounded cells. Numbers come last, so that their rounding does not decide the order of rows
    whose other cells differ."""
    others, numbers = [], []
    for cell in row:
        is_number = isinstance(cell, (int, float))
        numbers += [cell] if is_number else []
        others.append(0 if is_number else cell)
    return repr(others), numbers


def canonical(names, rows, ordered):
    """Rows in a form that is the same for equal results, but for the rounding of floats: columns, and rows unless
    `ordered`, are sorted."""
    rounded_rows = [list(map(rounded, row)) for row in rows]
    exact_rows = [list(map(exact, row)) for row in rows]
    cells = [sorted(repr(row[i]) for row in rounded_rows) for i in range(len(names))]
    numbers = sorted(range(len(names)), key=cells.__getitem__)
    alike = []
    for _, group in itertools.groupby(numbers, key=cells.__getitem__):
        alike.append(list(itertools.islice(itertools.permutations(group), MAX_ORDERS)))       # product() lists them all
    tables = []
    for orders in itertools.islice(itertools.product(*alike), MAX_ORDERS):
        columns = list(itertools.chain(*orders))
        to_sort = [[row[i] for i in columns] for row in rounded_rows]
        places = range(len(rows))
        if not ordered:
            keys = list(map(order_of_row, to_sort))
            places = sorted(places, key=keys.__getitem__)
        tables.append((repr([to_sort[place] for place in places]), columns, places))
    _, columns, places = min(tables, key=lambda table: table[0])
    return [len(names), [[exact_rows[place][i] for i in columns] for place in places]]


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
