"""The named prefixes of one model, by tenant and name, in memory and in a file.

A change is in the file before anybody sees it. Lifetimes are not in the file: a new tracker begins
each of them anew, so that no prefix expires while its model is not running.

Threading: the tracker's event loop; a thread of its own reads and writes the file.
"""

import asyncio
import difflib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from xinference_xavier.errors import (
    NamesError,
    PrefixNotFoundError,
    PrefixRefusedError,
    shown,
)
from xinference_xavier.protocol.prefixes import MAX_PREFIXES, NewPrefix, Terms
from xinference_xavier.runtime.aio import DaemonThreads, finishing
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.tracker.former_names import take_over
from xinference_xavier.tracker.names_file import NamesFile, Prefix

logger = logging.getLogger(__name__)

MAX_TEXTS = 64 << 20
"""Bytes of a model's texts. They are in memory, and more tokens than replicas have room for."""
_NEAR, _NEAR_AMONG, _NEAR_LENGTH = 3, 200, 40
"""Similar names that are listed; of so many, and only up to so many characters. Comparing takes
time that grows with the square of their length."""
_ENDED = "the tracker has ended"
_FORMER, _FOLDER = "prefixes.db", "names"
_ByName = Mapping[tuple[str, str], Prefix]
_T = TypeVar("_T")


class Names:
    """`home` is our folder beside the supervisor. `clock` returns monotonic seconds."""

    def __init__(
        self, home: Path, model_uid: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._home = home
        self._model_uid = model_uid
        self._clock = clock
        self._file = NamesFile(home / _FOLDER, model_uid)
        self._thread = DaemonThreads(1, "xavier-names")
        self._closed = False
        self._failure = "the tracker has just started; ask again"
        self._log = RateLimitedLog(logger)
        self._changing = asyncio.Lock()
        self._prefixes: _ByName = {}

    @property
    def readable(self) -> bool:
        return not self._failure

    async def tend(self) -> None:
        """Call it every second: reads the file at first, and removes what has expired. Never
        raises: what fails is logged, and tried again."""
        try:
            if not self.readable:
                await self._load()
            await self._remove_expired()
        except Exception as error:  # whatever it is, the model is served
            self._log.warn("file", "named prefixes: model=%s error=%r", self._model_uid, error)

    async def _load(self) -> None:
        def read() -> list[Prefix]:
            take_over(self._home / _FORMER, self._home / _FOLDER)
            return self._file.open()

        try:
            found = await self._in_thread(read)
        except Exception as error:
            self._failure = str(error)
            raise
        now = self._clock()
        self._prefixes = {(each.tenant, each.name): replace(each, used=now) for each in found}
        self._failure = ""

    async def _remove_expired(self) -> None:
        async with self._changing:
            alive = self._alive()
            if len(alive) < len(self._prefixes):
                await self._write({(each.tenant, each.name): each for each in alive})

    def close(self) -> None:
        """Let another tracker have the file, once what is being written is there."""
        self._closed = True
        self._failure = _ENDED
        self._thread.submit(self._file.close)
        self._thread.shutdown()

    # -- what there is -------------------------------------------------------------------------

    def all(self) -> list[Prefix]:
        """All that have not expired. Raises NamesError."""
        self._check_readable()
        return self._alive()

    def find(self, tenant: str, name: str) -> Prefix:
        """A tenant's prefix of this name. Raises NamesError; PrefixNotFoundError, which lists
        similar names."""
        self._check_readable()
        prefix = self._prefixes.get((tenant, name))
        if prefix is not None and prefix.expires > self._clock():
            return prefix
        near: list[str] = []
        if len(name) <= _NEAR_LENGTH:
            names = (each for owner, each in self._prefixes if owner == tenant and each != name)
            short = islice((each for each in names if len(each) <= _NEAR_LENGTH), _NEAR_AMONG)
            near = difflib.get_close_matches(name, short, n=_NEAR, cutoff=0.5)
        hint = f"; did you mean {', '.join(map(shown, near))}?" if near else ""
        raise PrefixNotFoundError(
            f"model {self._model_uid!r} has no prefix named {shown(name)}{hint}"
        )

    def use(self, tenant: str, name: str) -> Prefix:
        """Like `find`, for a request: its lifetime begins anew."""
        prefix = self.find(tenant, name)
        prefix.used = self._clock()
        return prefix

    def _alive(self) -> list[Prefix]:
        now = self._clock()
        return [each for each in self._prefixes.values() if each.expires > now]

    def _check_readable(self) -> None:
        if self._failure:
            raise NamesError(f"the names of prefixes cannot be read: {self._failure}")

    # -- changes: each raises NamesError if it cannot be written ----------------------------------

    async def add(self, new: NewPrefix) -> Prefix:
        """Add a prefix, in place of one of the same name. Raises PrefixRefusedError beyond a
        limit."""
        return await finishing(self._add(new))

    async def _add(self, new: NewPrefix) -> Prefix:
        async with self._changing:
            self._check_readable()
            others = {**self._prefixes}
            others.pop((new.tenant, new.name), None)
            if len(others) >= MAX_PREFIXES:
                raise PrefixRefusedError(
                    f"model {self._model_uid!r} has {MAX_PREFIXES} named prefixes; remove some "
                    "first"
                )
            texts = sum(len(each.content) for each in others.values())
            if texts + len(new.content) > MAX_TEXTS:
                raise PrefixRefusedError(
                    f"{new.name!r} has {len(new.content)} bytes, and the other texts of model "
                    f"{self._model_uid!r} {texts}; together at most {MAX_TEXTS} are kept: remove "
                    "some first"
                )
            id_, now = secrets.token_hex(8), self._clock()
            prefix = Prefix(id_, new.tenant, new.name, new.terms, time.time(), new.content, now)
            await self._write({**others, (new.tenant, new.name): prefix})
            return prefix

    async def change(self, tenant: str, name: str, terms: Terms) -> Prefix:
        """Change the terms of a prefix. Raises PrefixNotFoundError."""
        return await finishing(self._change(tenant, name, terms))

    async def _change(self, tenant: str, name: str, terms: Terms) -> Prefix:
        async with self._changing:
            changed = replace(self.find(tenant, name), terms=terms, used=self._clock())
            await self._write({**self._prefixes, (tenant, name): changed})
            return changed

    async def remove(self, tenant: str, name: str) -> None:
        """Forget a prefix. Raises PrefixNotFoundError."""
        await finishing(self._remove(tenant, name))

    async def _remove(self, tenant: str, name: str) -> None:
        async with self._changing:
            self.find(tenant, name)
            others = {**self._prefixes}
            del others[tenant, name]
            await self._write(others)

    async def _write(self, prefixes: _ByName) -> None:
        try:
            await self._in_thread(lambda: self._file.write(prefixes.values()))
        except OSError as error:
            raise NamesError(f"the names of prefixes cannot be changed: {error}") from error
        self._prefixes = prefixes

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        if self._closed:
            raise NamesError(_ENDED)  # nothing would answer
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
