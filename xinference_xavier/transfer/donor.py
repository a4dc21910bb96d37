"""The donor's part in a fetch, before its transfer process takes over.

Threading: belongs to the replica's background loop, so that how long an answer takes does not
depend on what the engine computes.
"""

import time

from xinference_xavier.errors import GrantRefusedError, LinkError
from xinference_xavier.pool.pool import Pool
from xinference_xavier.transfer.grants import Grants
from xinference_xavier.transfer.messages import Contact, Grant, GrantRequest, check_request
from xinference_xavier.transfer.process import TransferProcess


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
            check_request(request)
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
        contact = self._process.contact or Contact("", None)
        held = len(promise.rows)
        more = held < len(request.keys) and self._pool.lookup(request.keys[held]) is not None
        return Grant(
            promise.grant_id,
            tuple(row.checksum for row in promise.rows if row.checksum is not None),
            ticket,
            contact.address,
            contact.host,
            more,
            sequence,
        )
