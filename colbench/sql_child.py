"""SQL of an agent on a database. sql.py sends the text of this file to the scorer's confined child program, which runs
it; sql.py itself uses what it says of rows."""
import itertools
import sqlite3

PRAGMAS = "query_only = 1", "trusted_schema = 0", "hard_heap_limit = 67108864", "temp_store = 2"
LIMITS = {"LENGTH": 100_000, "SQL_LENGTH": 10_000, "COLUMN": 100, "EXPR_DEPTH": 100, "COMPOUND_SELECT": 50,
          "VDBE_OP": 20_000, "ATTACHED": 0, "LIKE_PATTERN_LENGTH": 1000}
ALLOWED = sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE
FORBIDDEN = "load_extension", "fts3_tokenizer", "random", "randomblob"
MAX_ROWS = 1000
MAX_ORDERS = 120                # of columns that hold the same cells: all, where there are five of them
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
    """A filled sqlite database in memory that lets SELECT through and nothing else, with limits on its size."""
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
    """(names of the columns, rows) of one SELECT; ValueError or sqlite3.Error that says why there are none."""
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


def plain_number(cell):
    """A cell in a form that is equal for equal numbers: whole numbers as int, fractions to 9 digits
    and 9 decimals, so that what rounding leaves of SUM(a) - SUM(b) is 0."""
    if not isinstance(cell, float):
        return cell
    if 10 ** 9 <= abs(cell) < 2 ** 53:                              # where 9 digits are coarser than whole numbers
        return round(cell)
    cell = float(f"{round(cell, 9):.9g}")
    return int(cell) if cell.is_integer() and abs(cell) < 2 ** 53 else cell


def canonical(names, rows, ordered):
    """Rows in a form that is equal for equal results: columns and (unless `ordered`) rows in an order of their own."""
    rows = [list(map(plain_number, row)) for row in rows]
    cells = [sorted(repr(row[i]) for row in rows) for i in range(len(names))]
    numbers = sorted(range(len(names)), key=cells.__getitem__)
    alike = []
    for _, group in itertools.groupby(numbers, key=cells.__getitem__):
        alike.append(list(itertools.islice(itertools.permutations(group), MAX_ORDERS)))       # product() lists them all
    tables = []
    for orders in itertools.islice(itertools.product(*alike), MAX_ORDERS):
        columns = list(itertools.chain(*orders))
        table = [[row[i] for i in columns] for row in rows]
        tables.append(table if ordered else sorted(table, key=repr))
    return [len(names), min(tables, key=repr)]


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
