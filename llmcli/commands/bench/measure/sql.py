"""Results written as SQL or kept in an SQLite database, which are read and never trusted.

A file of SQL is a program. It is run in a database in memory that may be given tables and rows
and nothing else: no files, no queries, no triggers.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from llmcli.errors import UsageError

TABLES = ("llama_bench", "test")  # llama-bench's, and what it was called until 2025
EXTRAS, OWNER = "llmcli_bench", "llama_bench_rowid"  # ours, and the row that one of it belongs to
HINT = "give what `-o sql` has written, or the database made from it"
_STEPS = 50_000_000  # of SQLite's machine; a row takes about a hundred
_PAGES = 1 << 16  # of 4 KiB
_ALLOWED = {
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_TRANSACTION,  # what a dump puts around it
}
# SQLite itself writes the definition of a table into its own one
_OWN = {"sqlite_master", "sqlite_schema"}


def sql_rows(text: str, name: str) -> Iterator[dict[str, Any]]:
    """Rows of the table that the statements make. Raises UsageError for any other statement."""
    with closing(_memory()) as base:
        base.set_authorizer(_authorized)
        try:
            base.executescript(text)
            if base.in_transaction:
                base.rollback()
        except (sqlite3.Error, ValueError) as error:  # a NUL is a ValueError
            raise _refused(error, name) from error
        base.set_authorizer(None)
        rows = _rows(base, name)
    return iter(rows)


def database_rows(data: bytes, name: str) -> Iterator[dict[str, Any]]:
    """Rows of the table in a database file. Raises UsageError where it is none or broken."""
    if len(data) < _size(data):  # SQLite takes what is missing for zeros
        raise UsageError(f"`{name}` is cut off: {len(data):,} of {_size(data):,} bytes", hint=HINT)
    with closing(_memory()) as base:
        try:
            base.deserialize(data)
            base.execute("PRAGMA trusted_schema = OFF")
        except sqlite3.Error as error:
            raise _refused(error, name) from error
        rows = _rows(base, name)
    return iter(rows)


def _size(data: bytes) -> int:
    """Bytes of the whole database by its header: the size of a page, and how many there are."""
    if len(data) < 100:
        return 100
    page = int.from_bytes(data[16:18], "big")  # 1 is 64 KiB
    # the count holds where the program that wrote last has kept it
    pages = int.from_bytes(data[28:32], "big") if data[24:28] == data[92:96] else 1
    return (65536 if page == 1 else page) * pages


def _memory() -> sqlite3.Connection:
    base = sqlite3.connect(":memory:", isolation_level=None)
    base.execute(f"PRAGMA max_page_count = {_PAGES}")
    base.set_progress_handler(_after(_STEPS // 10_000), 10_000)
    return base


def _after(turns: int) -> Callable[[], int]:
    """Says stop when it has been asked more than `turns` times."""
    left = iter(range(turns))

    def asked() -> int:
        return next(left, None) is None

    return asked


def _authorized(action: int, one: str | None, two: str | None, base: str | None, _: Any) -> int:
    if action == sqlite3.SQLITE_PRAGMA:
        return sqlite3.SQLITE_IGNORE  # a dump begins with one
    if action == sqlite3.SQLITE_FUNCTION:  # our rows name the one that was written before
        return sqlite3.SQLITE_OK if two == "last_insert_rowid" else sqlite3.SQLITE_DENY
    own = action in (sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_READ) and one in _OWN
    return sqlite3.SQLITE_OK if own or action in _ALLOWED else sqlite3.SQLITE_DENY


def _rows(base: sqlite3.Connection, name: str) -> list[dict[str, Any]]:
    base.row_factory = sqlite3.Row
    try:
        tables = [
            str(row["name"])
            for row in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        table = next((table for table in TABLES if table in tables), None)
        if table is None:
            raise UsageError(f"`{name}` has no table `{TABLES[0]}`", hint=HINT)
        rows = {row["rowid"]: dict(row) for row in base.execute(f"SELECT rowid, * FROM {table}")}
        if EXTRAS in tables:
            for extra in base.execute(f"SELECT * FROM {EXTRAS}"):
                rows.get(extra[OWNER], {}).update(extra)
        return list(rows.values())
    except (sqlite3.Error, IndexError) as error:
        raise _refused(error, name) from error


def _refused(error: Exception, name: str) -> UsageError:
    reason = str(error)
    if "authorized" in reason or "prohibited" in reason:
        reason = "it has more in it than CREATE TABLE and INSERT with plain values"
    return UsageError(f"`{name}` cannot be read as SQL: {reason}", hint=HINT)
