"""A donor's promises: rows that stay where they are until a consumer has them.

Pure bookkeeping over the pool's pins; time is passed in. Belongs to one thread.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xinference_xavier.errors import GrantRefusedError
from xinference_xavier.pool.pool import Pool, Row


class Promise(NamedTuple):
    grant_id: int
    consumer: str
    rows: list[Row]
    expires: float


class Grants:
    """At most `max_rows` rows are promised at a time; a promise lives `lifetime` seconds."""

    def __init__(self, pool: Pool, max_rows: int, lifetime: float) -> None:
        self._pool = pool
        self._max_rows = max_rows
        self._lifetime = lifetime
        self._promises: dict[int, Promise] = {}
        self._ids = itertools.count(1)
        self.promised_rows = 0

    def __len__(self) -> int:
        return len(self._promises)

    def grant(self, consumer: str, keys: Sequence[bytes], now: float) -> Promise:
        """Pin the leading run of `keys` that we hold; none of them is no promise (id 0).

        Raises:
            GrantRefusedError: we have promised too much already.
        """
        self.expire(now)
        room = self._max_rows - self.promised_rows
        if room <= 0:
            raise GrantRefusedError("busy")
        rows = self._pool.pin_shared(keys[:room])
        promise = Promise(next(self._ids) if rows else 0, consumer, rows, now + self._lifetime)
        if rows:
            self._promises[promise.grant_id] = promise
            self.promised_rows += len(rows)
        return promise

    def release(self, grant_id: int) -> None:
        """Does nothing for a promise that ended already."""
        promise = self._promises.pop(grant_id, None)
        if promise is not None:
            self.promised_rows -= len(promise.rows)
            self._pool.unpin(promise.rows)

    def expire(self, now: float) -> None:
        self._release_where(lambda promise: promise.expires <= now)

    def forget(self, consumer: str) -> None:
        """That replica is gone and will not fetch any more."""
        self._release_where(lambda promise: promise.consumer == consumer)

    def _release_where(self, ended: Callable[[Promise], bool]) -> None:
        for promise in [p for p in self._promises.values() if ended(p)]:
            self.release(promise.grant_id)
