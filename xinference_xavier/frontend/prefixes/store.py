"""The names that survive a restart, in an SQLite file of xinference's data folder.

Threading: one thread of its own writes and reads; calls return when it is done.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from xinference_xavier.frontend.prefixes.prefix import Prefix, Terms

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the schema; it is the file's `user_version`."""
_SCHEMA = """
CREATE TABLE prefixes (
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


class Store:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, "xavier-prefixes")
        self._connection: sqlite3.Connection

    async def open(self) -> list[Prefix]:
        """All prefixes. Raises SchemaError, OSError, sqlite3.Error."""
        try:
            return await self._run(self._open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    def _open(self) -> list[Prefix]:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(
            self._file, isolation_level=None, check_same_thread=False
        )
        self._file.chmod(0o600)  # it has people's texts
        self._connection.execute("PRAGMA journal_mode = WAL")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise SchemaError(
                f"{self._file} has schema {version}, this version of xinference-xavier knows "
                f"{VERSION}; install the newer version again, or move the file away"
            )
        if version == 0:
            self._connection.execute(_SCHEMA)
            self._connection.execute(f"PRAGMA user_version = {VERSION}")
        # Earlier versions wrote down what requests asked to keep, under names that begin so.
        self._connection.execute("DELETE FROM prefixes WHERE name < ?", ("\1",))
        rows = self._connection.execute(
            "SELECT id, model_uid, tenant, name, ttl, copies, retention, created, used"
            " FROM prefixes ORDER BY created"
        )
        return [_prefix(*row) for row in rows]

    async def close(self) -> None:
        await self._run(lambda: self._connection.close())
        self._thread.shutdown()

    async def add(self, prefix: Prefix, content: Mapping[str, Any]) -> None:
        """Replaces one of the same name."""
        ttl, copies, retention = prefix.terms
        row = (
            *(prefix.id, prefix.model_uid, prefix.tenant, prefix.name),
            *(ttl, str(copies), retention, prefix.created, prefix.used, json.dumps(content)),
        )
        await self._run(
            lambda: self._connection.execute(
                "INSERT OR REPLACE INTO prefixes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row
            )
        )

    async def update(self, prefixes: Iterable[Prefix]) -> None:
        """Their terms, and when they were used."""
        rows = [
            (each.terms.ttl, str(each.terms.copies), each.terms.retention, each.used, each.id)
            for each in prefixes
        ]
        await self._run(lambda: self._update(rows))

    def _update(self, rows: list[tuple[Any, ...]]) -> None:
        with self._connection:
            self._connection.execute("BEGIN")
            self._connection.executemany(
                "UPDATE prefixes SET ttl = ?, copies = ?, retention = ?, used = ? WHERE id = ?",
                rows,
            )

    async def remove(self, ids: Iterable[str]) -> None:
        rows = [(each,) for each in ids]
        await self._run(lambda: self._remove(rows))

    def _remove(self, rows: list[tuple[str]]) -> None:
        with self._connection:
            self._connection.execute("BEGIN")
            self._connection.executemany("DELETE FROM prefixes WHERE id = ?", rows)

    async def content(self, prefix: str) -> Mapping[str, Any] | None:
        """None if it has been removed."""

        def read() -> Mapping[str, Any] | None:
            row = self._connection.execute(
                "SELECT content FROM prefixes WHERE id = ?", (prefix,)
            ).fetchone()
            return None if row is None else json.loads(row[0])

        return await self._run(read)

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _prefix(
    id_: str, model_uid: str, tenant: str, name: str, ttl: float, copies: str, retention: Any,
    created: float, used: float,
) -> Prefix:  # fmt: skip
    terms = Terms(ttl, "all" if copies == "all" else 1, retention)
    return Prefix(id_, model_uid, tenant, name, terms, created, used)
