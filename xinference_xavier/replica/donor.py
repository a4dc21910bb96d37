"""The donor's part in a fetch, up to its transfer process: grants, which keep rows in place until a
consumer has them.

Threading: the replica's background loop, so that an answer does not wait for the engine. `Grants`
is pure bookkeeping over the pool's pins, with the time passed in.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xinference_xavier.errors import GrantRefusedError, LinkError
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.transfer import Grant, GrantRequest, check_request
from xinference_xavier.replica.transfer_process import TransferProcess


class Donor:
    """Grants rows of `pool`, at most half of it at a time, each grant for `lifetime` seconds."""

    def __init__(self, pool: Pool, process: TransferProcess, lifetime: float) -> None:
        self._pool = pool
        self._process = process
        self.grants = Grants(pool, max(1, pool.slots // 2), lifetime)
        self.refused = 0

    def grant(self, request: GrantRequest, *, namespace: str | None, sequence: int) -> Grant:
        """Promise the leading run of the chunks that we hold.

        `namespace` is the one in which we share now, None for none; `sequence` that of our last
        publication.

        Raises:
            GrantRefusedError: not ours to give, or not now.
            LinkError: the request is malformed, or of another version.
        """
        try:
            request = check_request(request)
            return self._grant(request, namespace, sequence)
        except (GrantRefusedError, LinkError):
            self.refused += 1
            raise

    def _grant(self, request: GrantRequest, namespace: str | None, sequence: int) -> Grant:
        if namespace is None:
            raise GrantRefusedError("sharing is off")
        if request.namespace != namespace:
            raise GrantRefusedError("other namespace")
        promise = self.grants.grant(request.consumer, request.keys, time.monotonic())
        slots = [row.slot for row in promise.rows]
        try:
            ticket = self._process.sign(request.consumer, slots, promise.expires)
        except GrantRefusedError:
            self.grants.release(promise.grant_id)
            raise
        endpoint = self._process.endpoint
        assert endpoint is not None, "it signs only while it is there"
        held = len(promise.rows)
        more = held < len(request.keys) and self._pool.lookup(request.keys[held]) is not None
        return Grant(
            promise.grant_id,
            tuple(row.checksum for row in promise.rows if row.checksum is not None),
            ticket,
            endpoint.address,
            endpoint.host,
            more,
            sequence,
        )


class GrantRecord(NamedTuple):
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
        self._promises: dict[int, GrantRecord] = {}
        self._ids = itertools.count(1)
        self.promised_rows = 0

    def __len__(self) -> int:
        return len(self._promises)

    def grant(self, consumer: str, keys: Sequence[bytes], now: float) -> GrantRecord:
        """Pin the leading run of `keys` that we hold; none of them is no promise (id 0).

        Raises:
            GrantRefusedError: we have promised too much already.
        """
        self.expire(now)
        room = self._max_rows - self.promised_rows
        if room <= 0:
            raise GrantRefusedError("busy")
        rows = self._pool.pin_shared(keys[:room])
        promise = GrantRecord(next(self._ids) if rows else 0, consumer, rows, now + self._lifetime)
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

    def _release_where(self, ended: Callable[[GrantRecord], bool]) -> None:
        for promise in [p for p in self._promises.values() if ended(p)]:
            self.release(promise.grant_id)
