"""A fetch: the transaction that brings rows of a donor's pool into ours, or leaves no trace.

    reserve rows → grant by the donor's engine → pull by our transfer process, which verifies each
    row's checksum → commit the run that is whole from its start; roll back the rest.

The scheduler thread makes a `Fetch` with the rows it reserved and reads its `state`; everything
else happens on the replica's background loop. When `state` is no longer PENDING, the committed rows
are READY and pinned once, for the requests that wait for them. A fetch ends by its deadline, even
if its rows may still be written: these are in quarantine until the transfer process is done with
them.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import xoscar

from xinference_xavier.errors import REFUSALS, GrantRefusedError, XavierError
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.transfer import (
    PROTOCOL_VERSION,
    Grant,
    GrantRequest,
    PullOrder,
    PullResult,
    check_grant,
)
from xinference_xavier.replica.tracing import FetchSpan
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.runtime.rollback import Rollback
from xinference_xavier.stats.schema import COMMITTED, ROLLED_BACK, FetchStats

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT = 2.0
_REPORT_TIME = 0.1  # before the deadline, so that what arrived until then can still count


class FetchState(Enum):
    PENDING = auto()
    COMMITTED = auto()
    ROLLED_BACK = auto()


class Fetch:
    """One transaction, as its requests see it. `deadline` is `time.monotonic()` seconds;
    `trace_headers` are those of the request that began it, if it is traced."""

    def __init__(
        self,
        donor: str,
        rows: list[Row],
        deadline: float,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        self.donor = donor
        self.rows = rows
        self.deadline = deadline
        self.began = time.monotonic()
        self.span = FetchSpan(trace_headers)
        self.transport = ""  # none was chosen yet
        self.committed: list[Row] = []  # pinned once
        self.reason: str | None = None
        self.seconds = 0.0  # that it took, once it has ended
        self.state = FetchState.PENDING
        self.ended = threading.Event()  # set when it is no longer PENDING


@dataclass
class FetchCounts:
    started: int = 0
    committed: int = 0
    rolled_back: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    unreleased_grants: int = 0
    in_flight: Counter[str] = field(default_factory=Counter)  # rows, by donor
    received: Counter[str] = field(default_factory=Counter)  # rows, by donor that is a member
    by_transport: dict[str, FetchStats] = field(default_factory=dict)


class Fetcher:
    """Runs fetches; one per replica, on its background loop."""

    def __init__(
        self,
        *,
        incarnation: str,
        pool: Pool,
        row_bytes: int,
        process: TransferProcess,
        namespace: Callable[[], str],
        address_of: Callable[[str], str | None],
        record_stale: Callable[[bytes, str, int], None],
        arrived: Callable[[list[Row]], None],
        rolled_back: Callable[[Fetch, str], None],
    ) -> None:
        """`record_stale(key, donor, sequence)`: the donor turned out not to hold a key.
        `arrived(rows)`: rows were committed and may be offered to others.
        `rolled_back(fetch, reason)`: not all of the rows became hits."""
        self._incarnation = incarnation
        self._pool = pool
        self._row_bytes = row_bytes
        self._process = process
        self._namespace = namespace
        self._address_of = address_of
        self._record_stale = record_stale
        self._arrived = arrived
        self._rolled_back = rolled_back
        self._donors: dict[str, xoscar.ActorRefType] = {}
        self._transports: dict[str, str] = {}  # of the last fetch from each
        self._tasks: set[asyncio.Task[None]] = set()
        self._conditions = RateLimitedLog(logger)
        self.counts = FetchCounts()

    def start(self, fetch: Fetch) -> None:
        self.counts.started += 1
        self.counts.in_flight[fetch.donor] += len(fetch.rows)
        fetch.span.start()
        self._spawn(self._run(fetch))

    def forget(self, incarnation: str) -> None:
        self._donors.pop(incarnation, None)
        self._transports.pop(incarnation, None)
        self.counts.received.pop(incarnation, None)

    async def _run(self, fetch: Fetch) -> None:
        reason: str | None = "stopped"  # unless we get further: cancelled, as the replica stops
        try:
            async with Rollback() as scope:
                for row in fetch.rows:  # does nothing to those that were committed by then
                    scope.undo(self._pool.abort, row)
                grant = await self._grant(fetch)
                fetch.span.note("granted", chunks=len(grant.checksums))
                if grant.grant_id:
                    scope.undo(self._release, fetch.donor, grant.grant_id)
                self._note_missing(fetch, grant)
                if not grant.grant_id:
                    raise GrantRefusedError("not held")
                reason = await self._pull(fetch, grant)
        except GrantRefusedError as error:
            # A peer's own words would make our figures as large as it likes.
            reason = error.reason if error.reason in REFUSALS else "refused"
        except TimeoutError:
            self._donors.pop(fetch.donor, None)
            reason = "timeout"
        except (XavierError, xoscar.ActorNotExist, xoscar.ServerClosed, OSError) as error:
            self._donors.pop(fetch.donor, None)
            self._conditions.warn(
                f"no {fetch.donor}", "fetch from %s failed: %r", fetch.donor, error
            )
            reason = "donor unreachable"
        except Exception:  # whatever it is, the request must be told
            self._conditions.warn(
                "error",
                "fetch from %s failed",
                fetch.donor,
                level=logging.ERROR,
                exc_info=True,
            )
            reason = "internal error"
        finally:  # after the rollback: who sees the end finds no row half done
            self._finish(fetch, reason)

    async def _grant(self, fetch: Fetch) -> Grant:
        request = GrantRequest(
            PROTOCOL_VERSION,
            self._namespace(),
            self._incarnation,
            tuple(row.key for row in fetch.rows),
        )
        donor = await self._donor(fetch)
        granted = await within(fetch.deadline - time.monotonic(), donor.grant(request))
        return check_grant(granted, len(fetch.rows))

    async def _donor(self, fetch: Fetch) -> xoscar.ActorRefType:
        donor = self._donors.get(fetch.donor)
        if donor is None:
            address = self._address_of(fetch.donor)
            if address is None:
                raise GrantRefusedError("donor gone")
            finding = xoscar.actor_ref(address, replica_uid(fetch.donor))
            donor = await within(fetch.deadline - time.monotonic(), finding)
            self._donors[fetch.donor] = donor
        return donor

    def _note_missing(self, fetch: Fetch, grant: Grant) -> None:
        held = len(grant.checksums)
        if held < len(fetch.rows) and not grant.more_is_held:
            self._record_stale(fetch.rows[held].key, fetch.donor, grant.sequence)

    async def _pull(self, fetch: Fetch, grant: Grant) -> str | None:
        """Why not all of the granted rows became hits; None if they did."""
        rows = fetch.rows[: len(grant.checksums)]
        remaining = fetch.deadline - time.monotonic()
        order = PullOrder(
            fetch.donor,
            grant.address,
            grant.host,
            grant.ticket,
            tuple(row.key for row in rows),
            grant.checksums,
            tuple(row.slot for row in rows),
            max(0.001, remaining - min(_REPORT_TIME, remaining / 10)),
        )
        fetch.transport = self._transports.get(fetch.donor, "")
        pulling = asyncio.ensure_future(self._process.pull(order))
        await asyncio.wait({pulling}, timeout=remaining)
        if not pulling.done():
            for row in fetch.rows:
                self._pool.quarantine(row)
            self._finish(fetch, "timeout")
        result: PullResult = await pulling
        if result.transport is not None:
            fetch.transport = result.transport
            if fetch.donor in self._donors:
                self._transports[fetch.donor] = result.transport
        if fetch.state is not FetchState.PENDING:
            return fetch.reason
        reason = self._commit(fetch, grant, result)
        if len(fetch.committed) == len(fetch.rows):
            self._finish(fetch, reason)  # at once: all that is left is to release the grant
        return reason

    def _commit(self, fetch: Fetch, grant: Grant, result: PullResult) -> str | None:
        whole = zip(fetch.rows[: result.verified], grant.checksums, strict=False)
        fetch.committed = [
            row for row, checksum in whole if self._pool.commit(row, checksum, pins=1)
        ]
        self.counts.rows += len(fetch.committed)
        if fetch.donor in self._donors:
            self.counts.received[fetch.donor] += len(fetch.committed)
        self._arrived(fetch.committed)
        if len(fetch.committed) < result.verified:
            return "reset"
        return result.reason

    def _finish(self, fetch: Fetch, reason: str | None) -> None:
        if fetch.state is not FetchState.PENDING:
            return
        self.counts.in_flight[fetch.donor] -= len(fetch.rows)
        if not self.counts.in_flight[fetch.donor]:
            del self.counts.in_flight[fetch.donor]
        fetch.reason = reason
        fetch.seconds = time.monotonic() - fetch.began
        self._measure(fetch)
        if reason is None:
            self.counts.committed += 1
            fetch.state = FetchState.COMMITTED
        else:
            self.counts.rolled_back[reason] += 1
            fetch.state = FetchState.ROLLED_BACK
            self._rolled_back(fetch, reason)
        fetch.ended.set()

    def _measure(self, fetch: Fetch) -> None:
        size = len(fetch.committed) * self._row_bytes
        figures = self.counts.by_transport.setdefault(fetch.transport, FetchStats())
        figures.ended(fetch.reason, fetch.seconds, size)
        fetch.span.end(
            fetch.reason,
            replica=self._incarnation,
            donor=fetch.donor,
            transport=fetch.transport,
            outcome=COMMITTED if fetch.reason is None else ROLLED_BACK,
            chunks=len(fetch.rows),
            chunks_committed=len(fetch.committed),
            bytes=size,
        )

    def _release(self, donor: str, grant_id: int) -> None:
        """Tell the donor in the background: nobody here waits for it, and grants expire anyway."""
        self._spawn(self._tell_release(donor, grant_id))

    async def _tell_release(self, donor: str, grant_id: int) -> None:
        actor = self._donors.get(donor)
        try:
            if actor is not None:
                await within(_RELEASE_TIMEOUT, actor.release(grant_id))
        except (OSError, xoscar.ServerClosed, xoscar.ActorNotExist, TimeoutError):
            self.counts.unreleased_grants += 1

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
