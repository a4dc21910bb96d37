"""All named prefixes, by model, tenant and name, in an SQLite file of xinference's data folder.

Several processes may have the file open: one API process takes the place of another, and two
clusters of one user share a data folder. So what is there, and what has expired, is decided in the
file, in one statement each. `Names` keeps a copy without the texts: call `refresh` before what must
be up to date. When prefixes were used is noted in memory and written by `tend`, so that no request
waits for the disk. Texts that are deleted are overwritten, and the log that had them is emptied.

Threading: one thread writes, another one reads, and calls return when it is done. So a request that
reads never waits for a lock or for a disk that is full, and the end of the process for neither.
"""

import asyncio
import difflib
import json
import logging
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from xinference_xavier.errors import PrefixNotFoundError, shown
from xinference_xavier.frontend.prefix import NewPrefix, Prefix, Terms
from xinference_xavier.protocol.prefixes import MAX_PREFIXES
from xinference_xavier.runtime.aio import DaemonThreads
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the schema, stored as the file's `user_version`."""
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


class Store:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._reading = DaemonThreads(1, "xavier-prefixes")
        self._writing = DaemonThreads(1, "xavier-prefixes-writer")
        # Until the file is open, there is an empty one in memory.
        self._reader = self._writer = self._connect(":memory:")
        self._seen = -1  # the version of the data that was read last
        self._has_deleted = True  # also what an earlier process left in the log
        self._log = RateLimitedLog(logger)

    async def open(self) -> list[Prefix]:
        """All prefixes. Raises ValueError for a later schema, OSError, sqlite3.Error; then it can
        be called again."""
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
                raise ValueError(
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
        """The prefix of that name; None if it has been removed."""

        def read() -> Mapping[str, Any] | None:
            row = self._reader.execute(
                "SELECT content FROM prefixes WHERE id = ?", (prefix,)
            ).fetchone()
            return None if row is None else json.loads(row[0])

        return await self._read(read)

    # -- writing -------------------------------------------------------------------------------

    async def add(self, prefix: Prefix, content: Mapping[str, Any]) -> None:
        """Replaces one of the same name. Raises ValueError beyond a limit."""
        await self._write(lambda: self._add(prefix, content))

    def _add(self, prefix: Prefix, content: Mapping[str, Any]) -> None:
        text = json.dumps(content)
        if len(text) > MAX_TEXT:
            raise ValueError(
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
                raise ValueError(
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
        """Remove those of `ids` that have expired, also by what other processes have noted."""
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
        """Empty the file's log after texts were deleted that it may still hold. If another process
        is using the log, the next call does it."""
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


_NEAR, _NEAR_AMONG, _NEAR_LENGTH = 3, 200, 40
"""Similar names that are listed; of so many, and only up to so many characters. Comparing takes
time that grows with the square of their length."""
_USED_APART = 10.0
"""Seconds between two notes in the file of when prefixes were used. A restart may forget so
many."""
_SETTLING = 300.0
"""Seconds for which an expired prefix stays in the file: another process may have used it, or the
clock be ahead for a moment."""


class Names:
    """Belongs to one event loop. `clock` returns wall-clock seconds, `monotonic` those of a clock
    that nobody sets."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure = "the server starts; ask again"
        """Why no name is known; empty if they are."""
        self._store = store
        self._clock = clock
        self._monotonic = monotonic
        self._log = RateLimitedLog(logger)
        self._by_model: dict[str, dict[tuple[str, str], Prefix]] = {}
        self._by_id: dict[str, Prefix] = {}
        self._used: dict[str, float] = {}  # by id; not in the file yet
        self._write_due = -float("inf")
        self._expired: dict[str, float] = {}  # since when, by id

    async def load(self) -> None:
        """If the file cannot be opened, `failure` says why, and `tend` tries again."""
        try:
            self._take(await self._store.open())
            self.failure = ""
        except Exception as error:  # whatever it is, the server starts
            self.failure = f"the names of prefixes cannot be read: {error}"
            self._note("opened", error)

    async def close(self) -> None:
        self.failure = "the server ends"
        await self._write_uses()
        await self._store.close()

    async def refresh(self) -> None:
        """Take in what other processes have changed. Raises sqlite3.Error."""
        changed = await self._store.changes()
        if changed is not None:
            self._take(changed)

    def _take(self, prefixes: Iterable[Prefix]) -> None:
        self._by_id = {prefix.id: prefix for prefix in prefixes}
        self._by_model = {}
        for prefix in self._by_id.values():
            of_model = self._by_model.setdefault(prefix.model_uid, {})
            of_model[prefix.tenant, prefix.name] = prefix
        for id_, used in [*self._used.items()]:
            if id_ in self._by_id:
                self._by_id[id_].used = max(self._by_id[id_].used, used)
            else:
                del self._used[id_]

    # -- what there is -------------------------------------------------------------------------

    def models(self) -> list[str]:
        """The models that have prefixes."""
        return [*self._by_model]

    def of(self, model_uid: str) -> list[Prefix]:
        now = self._clock()
        return [each for each in self._by_model.get(model_uid, {}).values() if each.expires > now]

    def named(self, model_uid: str, tenant: str, name: str) -> Prefix | None:
        prefix = self._by_model.get(model_uid, {}).get((tenant, name))
        return prefix if prefix is not None and prefix.expires > self._clock() else None

    def find(self, model_uid: str, tenant: str, name: str) -> Prefix:
        """Raises PrefixNotFoundError, which lists similar names of the tenant."""
        if (prefix := self.named(model_uid, tenant, name)) is not None:
            return prefix
        of_model = self._by_model.get(model_uid, {})
        near: list[str] = []
        if len(name) <= _NEAR_LENGTH:
            names = (each for owner, each in of_model if owner == tenant and each != name)
            short = islice((each for each in names if len(each) <= _NEAR_LENGTH), _NEAR_AMONG)
            near = difflib.get_close_matches(name, short, n=_NEAR, cutoff=0.5)
        hint = f"; did you mean {', '.join(map(shown, near))}?" if near else ""
        raise PrefixNotFoundError(f"model {model_uid!r} has no prefix named {shown(name)}{hint}")

    async def content(self, prefix: Prefix) -> Mapping[str, Any]:
        content = await self._store.content(prefix.id)
        if content is None:
            raise PrefixNotFoundError(f"prefix {shown(prefix.name)} has been removed")
        return content

    async def use(self, prefix: Prefix) -> Mapping[str, Any]:
        """The prefix's content, for a request. Raises PrefixNotFoundError if it is gone."""
        known = self._by_id.get(prefix.id, prefix)
        known.used = self._used[prefix.id] = self._clock()
        return await self.content(prefix)

    # -- changes -------------------------------------------------------------------------------

    async def add(self, model_uid: str, new: NewPrefix) -> Prefix:
        """Takes the place of one of the same name. Raises ValueError beyond a limit."""
        now = self._clock()
        prefix = Prefix(secrets.token_hex(8), model_uid, new.tenant, new.name, new.terms, now, now)
        await self._store.add(prefix, new.content)
        await self.refresh()
        return self._by_id.get(prefix.id, prefix)

    async def change(self, prefix: Prefix, terms: Terms) -> Prefix:
        await self._store.change(prefix.id, terms, self._clock())
        await self.refresh()
        return self._by_id.get(prefix.id, prefix)

    async def remove(self, prefix: Prefix) -> None:
        await self._store.remove([prefix.id])
        await self.refresh()

    async def tend(self) -> None:
        """Call it every second: writes uses, takes in what others have changed, and removes what
        nobody has used in time. Never raises: what fails is counted, and tried again."""
        if self.failure:
            await self.load()
            return
        if self._used and self._monotonic() >= self._write_due:
            await self._write_uses()
        if await self._done("read", self.refresh()):
            await self._remove_expired()

    async def _write_uses(self) -> None:
        used = {**self._used}
        self._write_due = self._monotonic() + _USED_APART
        if used and await self._done("written", self._store.note_uses(used)):
            for id_, at in used.items():
                if self._used.get(id_) == at:
                    del self._used[id_]

    async def _remove_expired(self) -> None:
        wall, now = self._clock(), self._monotonic()
        expired = [each.id for each in self._by_id.values() if each.expires <= wall]
        self._expired = {id_: self._expired.get(id_, now) for id_ in expired}
        settled = [id_ for id_, since in self._expired.items() if now - since >= _SETTLING]
        if settled and await self._done("written", self._store.remove_unused(settled, wall)):
            await self._done("read", self.refresh())

    async def _done(self, what: str, work: Awaitable[None]) -> bool:
        try:
            await work
        except Exception as error:  # whatever it is, it is tried again
            self._note(what, error)
            return False
        return True

    def _note(self, what: str, error: Exception) -> None:
        self._log.warn(what, "the names' file cannot be %s: error=%r", what, error)
