"""The names that survive a restart, in an SQLite file of xinference's data folder.

Several processes may have the file open: one API process takes the place of another, and two
clusters of one user share a data folder. So what is there, and what has expired, is decided in the
file, in one statement each.

Texts that are deleted are overwritten, and the log that had them is emptied.

Threading: one thread writes, another one reads, and calls return when it is done. So a request that
reads never waits for a lock or for a disk that is full.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from xinference_xavier.frontend.prefixes.prefix import Prefix, Terms
from xinference_xavier.protocol.prefixes import MAX_PREFIXES
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the schema; it is the file's `user_version`."""
MAX_TEXT = 9 << 20
"""Bytes of one prefix's text, as JSON."""
MAX_FILE = 4 << 30
"""Bytes of all texts."""
_PATIENCE = 5.0
"""Seconds for another process to finish what it writes."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS prefixes (
    id TEXT PRIMARY KEY,
    model_uid TEXT NOT NULL,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    ttl REAL NOT NULL,
    copies TEXT NOT NULL,
    retention TEXT NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    content TEXT NOT NULL,
    UNIQUE (model_uid, tenant, name)
) STRICT
"""
_T = TypeVar("_T")


class SchemaError(Exception):
    """The file belongs to a later version."""


class TooManyError(ValueError):
    """One more prefix would exceed the limit of a model, or one is too long."""


class Store:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._reading = ThreadPoolExecutor(1, "xavier-prefixes")
        self._writing = ThreadPoolExecutor(1, "xavier-prefixes-writer")
        # Until the file is open, there is an empty one in memory.
        self._reader = self._writer = self._connect(":memory:")
        self._seen = -1  # the version of the data that was read last
        self._has_deleted = True  # also what an earlier process left in the log
        self._log = RateLimitedLog(logger)

    async def open(self) -> list[Prefix]:
        """All prefixes. Raises SchemaError, OSError, sqlite3.Error; then it can be called again."""
        await self._write(self._open)
        return await self._read(self._open_reader)

    def _connect(self, file: str | Path) -> sqlite3.Connection:
        return sqlite3.connect(
            file, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
        )

    def _open(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._writer.close()
        self._writer = connection = self._connect(self._file)
        self._file.chmod(0o600)  # it has people's texts
        _use_log(connection)
        connection.execute("PRAGMA secure_delete = ON")
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {MAX_FILE // page}")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise SchemaError(
                    f"{self._file} has schema {version}, this version of xinference-xavier knows "
                    f"{VERSION}; install the newer version again, or move the file away"
                )
            connection.execute(_SCHEMA)
            connection.execute(f"PRAGMA user_version = {VERSION}")
            # Earlier versions wrote down what requests asked to keep, under names that begin so.
            connection.execute("DELETE FROM prefixes WHERE name < ?", ("\1",))
        self._empty_log()

    def _open_reader(self) -> list[Prefix]:
        self._reader.close()
        self._reader = self._connect(self._file)
        return self._read_all()

    async def close(self) -> None:
        await self._read(lambda: self._reader.close())
        await self._write(lambda: self._writer.close())
        self._reading.shutdown()
        self._writing.shutdown()

    # -- reading -------------------------------------------------------------------------------

    async def changes(self) -> list[Prefix] | None:
        """All prefixes, if any process has changed any since the last reading."""
        return await self._read(self._read_changes)

    def _read_changes(self) -> list[Prefix] | None:
        return None if self._version() == self._seen else self._read_all()

    def _read_all(self) -> list[Prefix]:
        self._seen = self._version()  # what changes from here on is read again
        rows = self._reader.execute(
            "SELECT id, model_uid, tenant, name, ttl, copies, retention, created, used"
            " FROM prefixes ORDER BY created"
        )
        return [_prefix(*row) for row in rows]

    def _version(self) -> int:
        (version,) = self._reader.execute("PRAGMA data_version").fetchone()
        return int(version)

    async def content(self, prefix: str) -> Mapping[str, Any] | None:
        """None if it has been removed."""

        def read() -> Mapping[str, Any] | None:
            row = self._reader.execute(
                "SELECT content FROM prefixes WHERE id = ?", (prefix,)
            ).fetchone()
            return None if row is None else json.loads(row[0])

        return await self._read(read)

    # -- writing -------------------------------------------------------------------------------

    async def add(self, prefix: Prefix, content: Mapping[str, Any]) -> None:
        """Replaces one of the same name. Raises TooManyError."""
        await self._write(lambda: self._add(prefix, content))

    def _add(self, prefix: Prefix, content: Mapping[str, Any]) -> None:
        text = json.dumps(content)
        if len(text) > MAX_TEXT:
            raise TooManyError(
                f"{prefix.name!r} has {len(text)} bytes, more than {MAX_TEXT}; shorten it"
            )
        of_model, name = (prefix.model_uid,), (prefix.tenant, prefix.name)
        ttl, copies, retention = prefix.terms
        with self._writer as connection:
            connection.execute("BEGIN IMMEDIATE")
            removed = connection.execute(
                "DELETE FROM prefixes WHERE model_uid = ? AND tenant = ? AND name = ?",
                (*of_model, *name),
            )
            (count,) = connection.execute(
                "SELECT count(*) FROM prefixes WHERE model_uid = ?", of_model
            ).fetchone()
            if count >= MAX_PREFIXES:
                raise TooManyError(
                    f"model {prefix.model_uid!r} has {MAX_PREFIXES} named prefixes; remove some "
                    "first"
                )
            connection.execute(
                "INSERT INTO prefixes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(prefix.id, *of_model, *name, ttl, str(copies), retention),
                    *(prefix.created, prefix.used, text),
                ),
            )
        if removed.rowcount:
            self._has_deleted = True
            self._empty_log()

    async def change(self, prefix: str, terms: Terms, used: float) -> None:
        ttl, copies, retention = terms
        row = (ttl, str(copies), retention, used, prefix)
        await self._write(
            lambda: self._writer.execute(
                "UPDATE prefixes SET ttl = ?, copies = ?, retention = ?, used = max(used, ?)"
                " WHERE id = ?",
                row,
            )
        )

    async def note_uses(self, used: Mapping[str, float]) -> None:
        """When prefixes were used last, by id. Other processes may have used them later."""
        rows = [(at, prefix) for prefix, at in used.items()]
        await self._write(
            lambda: self._many("UPDATE prefixes SET used = max(used, ?) WHERE id = ?", rows)
        )

    async def remove(self, ids: Iterable[str]) -> None:
        rows = [(each,) for each in ids]
        await self._write(lambda: self._delete("DELETE FROM prefixes WHERE id = ?", rows))

    async def remove_unused(self, ids: Iterable[str], now: float) -> None:
        """Those of them that have expired, also by what other processes have noted."""
        rows = [(each, now) for each in ids]
        await self._write(
            lambda: self._delete("DELETE FROM prefixes WHERE id = ? AND used + ttl <= ?", rows)
        )

    def _delete(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        if rows:
            self._many(statement, rows)
            self._has_deleted = True
        self._empty_log()

    def _many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        with self._writer as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(statement, rows)

    def _empty_log(self) -> None:
        """If texts were deleted that it may still have. Another process may need it just now; then
        the next call does it."""
        if not self._has_deleted:
            return
        try:
            busy, *_ = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._has_deleted = bool(busy)
        except sqlite3.Error as error:  # what was asked for is done
            self._log.warn("log", "deleted texts stay in the log for now: error=%r", error)

    async def _read(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._reading, work)

    async def _write(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._writing, work)


def _use_log(connection: sqlite3.Connection) -> None:
    """SQLite does not wait for another process that changes the mode at the same time."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _prefix(
    id_: str, model_uid: str, tenant: str, name: str, ttl: float, copies: str, retention: Any,
    created: float, used: float,
) -> Prefix:  # fmt: skip
    terms = Terms(ttl, "all" if copies == "all" else 1, retention)
    return Prefix(id_, model_uid, tenant, name, terms, created, used)
