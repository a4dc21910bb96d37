"""All named prefixes, by model, tenant and name, as they are in the file. Their texts are only
there.

Other processes may change the file: call `refresh` before what must be up to date. When prefixes
were used is noted in memory and written by `tend`, so that no request waits for the disk.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from xinference_xavier.errors import PrefixNotFoundError, shown
from xinference_xavier.frontend.prefixes.prefix import NewPrefix, Prefix, Terms, new_id
from xinference_xavier.frontend.prefixes.store import Store
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

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
        self.failures = 0
        """Of the file, where no client was told: what failed is tried again."""
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
        """That have prefixes."""
        return [*self._by_model]

    def of(self, model_uid: str) -> list[Prefix]:
        now = self._clock()
        return [each for each in self._by_model.get(model_uid, {}).values() if each.expires > now]

    def current(self, prefix: Prefix) -> Prefix | None:
        """The same with its terms now; None if it is no longer there."""
        known = self._by_id.get(prefix.id)
        return known if known is not None and known.expires > self._clock() else None

    def find(self, model_uid: str, tenant: str, name: str) -> Prefix:
        """Raises PrefixNotFoundError, which lists similar names of the tenant."""
        of_model = self._by_model.get(model_uid, {})
        prefix = of_model.get((tenant, name))
        if prefix is not None and prefix.expires > self._clock():
            return prefix
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
        """Its content, for a request. Raises PrefixNotFoundError if it has just been removed."""
        known = self._by_id.get(prefix.id, prefix)
        known.used = self._used[prefix.id] = self._clock()
        return await self.content(prefix)

    # -- changes -------------------------------------------------------------------------------

    async def add(self, model_uid: str, new: NewPrefix) -> Prefix:
        """Takes the place of one of the same name. Raises TooManyError."""
        now = self._clock()
        prefix = Prefix(new_id(), model_uid, new.tenant, new.name, new.terms, now, now)
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
        self.failures += 1
        self._log.warn(what, "the names' file cannot be %s: error=%r", what, error)
