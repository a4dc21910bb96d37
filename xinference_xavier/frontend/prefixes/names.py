"""All named prefixes, by model, tenant and name. Their texts are only in the store."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from typing import Any

from xinference_xavier.errors import PrefixNotFoundError, shown
from xinference_xavier.frontend.prefixes.prefix import NewPrefix, Prefix, Terms, new_id
from xinference_xavier.frontend.prefixes.store import Store
from xinference_xavier.protocol.prefixes import MAX_PREFIXES

_NEAR = 3
_USED_APART = 10.0
"""Seconds between two notes of when a prefix was used. A restart may forget so many."""


class TooManyError(ValueError):
    """One more prefix would exceed the limit of a model."""


class Names:
    """Belongs to one event loop. `clock` returns wall-clock seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._by_model: dict[str, dict[tuple[str, str], Prefix]] = {}
        self._noted: dict[str, float] = {}  # when the store was told of the last use, by id

    async def load(self) -> None:
        for prefix in await self._store.open():
            self._remember(prefix)

    async def close(self) -> None:
        await self._store.close()

    def _remember(self, prefix: Prefix) -> None:
        of_model = self._by_model.setdefault(prefix.model_uid, {})
        of_model[prefix.tenant, prefix.name] = prefix
        self._noted[prefix.id] = prefix.used

    def models(self) -> list[str]:
        """That have prefixes."""
        return [*self._by_model]

    def of(self, model_uid: str) -> list[Prefix]:
        return [*self._by_model.get(model_uid, {}).values()]

    def find(self, model_uid: str, tenant: str, name: str) -> Prefix:
        """Raises PrefixNotFoundError, which lists similar names of the tenant."""
        of_model = self._by_model.get(model_uid, {})
        prefix = of_model.get((tenant, name))
        if prefix is not None and prefix.expires > self._clock():
            return prefix
        names = [each.name for each in of_model.values() if each.tenant == tenant]
        near = difflib.get_close_matches(name, names, n=_NEAR, cutoff=0.5)
        hint = f"; did you mean {', '.join(map(shown, near))}?" if near else ""
        raise PrefixNotFoundError(f"model {model_uid!r} has no prefix named {shown(name)}{hint}")

    async def add(self, model_uid: str, new: NewPrefix) -> Prefix:
        """Takes the place of one of the same name. Raises TooManyError."""
        of_model = self._by_model.get(model_uid, {})
        if len(of_model) >= MAX_PREFIXES and (new.tenant, new.name) not in of_model:
            raise TooManyError(
                f"model {model_uid!r} has {MAX_PREFIXES} named prefixes; remove some first"
            )
        now = self._clock()
        prefix = Prefix(new_id(), model_uid, new.tenant, new.name, new.terms, now, now)
        await self._store.add(prefix, new.content)
        self._remember(prefix)
        return prefix

    async def change(self, prefix: Prefix, terms: Terms) -> None:
        prefix.terms, prefix.used = terms, self._clock()
        await self._store.update([prefix])

    async def use(self, prefix: Prefix) -> Mapping[str, Any]:
        """Its content, for a request. Raises PrefixNotFoundError if it has just been removed."""
        prefix.used = self._clock()
        if prefix.used >= self._noted.get(prefix.id, 0.0) + _USED_APART:
            self._noted[prefix.id] = prefix.used
            await self._store.update([prefix])
        return await self.content(prefix)

    async def content(self, prefix: Prefix) -> Mapping[str, Any]:
        content = await self._store.content(prefix.id)
        if content is None:
            raise PrefixNotFoundError(f"prefix {shown(prefix.name)} has been removed")
        return content

    async def remove(self, prefix: Prefix) -> None:
        await self._remove([prefix])

    async def expire(self, model_uid: str) -> bool:
        """Remove those that nobody has used in time; whether there are others."""
        now = self._clock()
        expired = [each for each in self.of(model_uid) if each.expires <= now]
        if expired:
            await self._remove(expired)
        return model_uid in self._by_model

    async def _remove(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            of_model = self._by_model.get(prefix.model_uid, {})
            if of_model.get((prefix.tenant, prefix.name)) is prefix:
                del of_model[prefix.tenant, prefix.name]
            if not of_model:
                self._by_model.pop(prefix.model_uid, None)
            self._noted.pop(prefix.id, None)
        await self._store.remove([prefix.id for prefix in prefixes])
