"""What a replica reports: its holdings and load to the tracker, events to the tracker and to the
operator's hook, and whether sharing works to the log.

Holdings go in batches of changes, or all at once: after a batch that the tracker refuses, and after
every new session, a snapshot follows. So nobody has to remember what was delivered. The load goes
with each heartbeat, and at once when it changes much while there is a router. Events go with the
next heartbeat.

Threading: the replica's background loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from xinference_xavier.errors import NotSharing
from xinference_xavier.events import (
    AuditFailed,
    Event,
    FetchRolledBack,
    ReplicasDiffer,
    TrackerLost,
    TrackerRegained,
    event_dict,
)
from xinference_xavier.pool.pool import Pool, Row, flush, shared_keys
from xinference_xavier.protocol.load import Load, RequestReport
from xinference_xavier.protocol.sketches import Difference
from xinference_xavier.protocol.tracker import (
    MAX_PACKED_BYTES,
    MAX_REPORTED,
    SHORT_KEY,
    NotMemberError,
    Outcome,
    pack_short,
)
from xinference_xavier.runtime.aio import take_all

logger = logging.getLogger(__name__)

FLUSH_DELAY = 0.002  # seconds that the first queued key waits for further ones
MAX_QUEUED = 100_000  # keys; beyond them it is cheaper to publish all holdings

Call = Callable[..., Coroutine[Any, Any, Any]]
"""Calls a method of the tracker by name, for the replica in its namespace, with a deadline."""


class Identity(NamedTuple):
    """What a replica says of itself. `replica` is the name that it keeps over its incarnations."""

    model_uid: str
    incarnation: str
    replica: str


@dataclass
class ClientCounts:
    """The sessions of a tracker client, and what failed."""

    failures: int = 0
    stats_failures: int = 0
    claim_failures: int = 0

    @property
    def failed(self) -> int:
        return self.failures + self.stats_failures + self.claim_failures


class Publisher:
    """Tells the tracker which rows of the pool peers may fetch. `last_sequence` is the number of
    the last publication; `batches` and `replacements` (snapshots) count them."""

    def __init__(self, incarnation: str, pool: Pool) -> None:
        self.last_sequence = 0
        self.batches = 0
        self.replacements = 0
        self._incarnation = incarnation
        self._pool = pool
        # Not withdrawn yet. It overflows only if the loop hangs: then our lease expires anyway.
        self._evicted: deque[bytes] = deque(maxlen=MAX_QUEUED)
        self._queue: dict[bytes, bool] = {}
        self._replace_all = False
        self._work = asyncio.Event()

    def evicted(self, keys: Sequence[bytes]) -> None:
        """The pool has evicted these chunks. Called by the scheduler thread."""
        self._evicted.extend(keys)

    def withdraw_evicted(self) -> None:
        """Queue what was evicted. What is queued as held after that has come back."""
        if evicted := take_all(self._evicted):
            self.enqueue(evicted, held=False)

    def enqueue(self, keys: Iterable[bytes], *, held: bool) -> None:
        """Queue `keys` as held from now on, or as no longer held. The latter wait for the next held
        ones or for `flush`: a publication takes processor time from the engine and the tracker."""
        if not self._replace_all:
            self._queue.update(dict.fromkeys(keys, held))
            if len(self._queue) > MAX_QUEUED:
                self._queue, self._replace_all = {}, True
        if held:
            self._work.set()

    def forget(self, which: Callable[[Row], bool]) -> int:
        """Drop these READY rows of the pool; returns how many."""
        keys = flush(self._pool, which)
        self.enqueue(keys, held=False)
        self.flush()
        return len(keys)

    def forget_foreign(self) -> None:
        """Keep only what the engine has computed: peers may have got wrong rows from others."""
        self.forget(lambda row: row.origin is not None)

    def flush(self) -> None:
        """Publish what is queued now."""
        if self._queue or self._replace_all:
            self._work.set()

    async def run(self, call: Call) -> None:
        """Publish what is queued, until the tracker no longer knows the replica."""
        while True:
            await self._work.wait()
            await asyncio.sleep(FLUSH_DELAY)
            self._work.clear()
            if self._replace_all or not await self._send_queued(call):
                await self.send_holdings(call)

    async def send_holdings(self, call: Call) -> None:
        # The holdings include everything queued so far.
        self._queue, self._replace_all = {}, False
        packed = pack_short(shared_keys(self._pool)[-(MAX_PACKED_BYTES // SHORT_KEY) :])
        outcome = await self._send(call, packed, b"", replaces=True)
        if outcome is not Outcome.APPLIED:
            raise RuntimeError(
                f"the tracker refused snapshot {self.last_sequence} of {self._incarnation!r} as "
                f"{outcome.value}; another replica must not use this incarnation"
            )
        self.replacements += 1

    async def _send_queued(self, call: Call) -> bool:
        """Publish what is queued; False if the tracker needs a snapshot."""
        queue, self._queue = self._queue, {}
        if not queue:
            return True
        added = pack_short(key for key, held in queue.items() if held)
        removed = pack_short(key for key, held in queue.items() if not held)
        outcome = await self._send(call, added, removed, replaces=False)
        self.batches += 1
        return outcome is Outcome.APPLIED

    async def _send(self, call: Call, added: bytes, removed: bytes, *, replaces: bool) -> Outcome:
        self.last_sequence += 1
        outcome: Outcome = await call("publish", self.last_sequence, added, removed, replaces)
        if outcome is Outcome.UNKNOWN:
            raise NotMemberError(f"the tracker does not know {self._incarnation!r}; join again")
        return outcome


INTERVAL = 2.0
"""Seconds between two reports of a load that changes as routers expect."""
_LOOK = 0.05
"""Seconds between two looks while there is a router."""
_MUCH = 0.25
_LITTLE = 0.05  # seconds that are never much


class LoadReporter:
    """Reports nothing until `ready` is set: the replica takes requests from then on. `load` is
    None while the engine starts. Answers wait until something else is reported."""

    def __init__(
        self,
        load: Callable[[], Load | None],
        prompts: deque[RequestReport],
        answers: deque[RequestReport],
        ready: asyncio.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._prompts = prompts
        self._answers = answers
        self._ready = ready
        self._clock = clock
        self._failed = False

    async def run(self, call: Call) -> None:
        """Report until cancelled."""
        await self._ready.wait()
        reported, at, listened = None, -INTERVAL, False
        while True:
            now = self._clock()
            if (load := self._current_load()) is not None:
                prompts = take_all(self._prompts)
                if now >= at + INTERVAL or prompts or _differs(reported, load, now - at):
                    listened = await call("report_load", load, (*prompts, *take_all(self._answers)))
                    reported, at = load, now
            await asyncio.sleep(_LOOK if listened else INTERVAL)

    def _current_load(self) -> Load | None:
        try:
            return self._load()
        except Exception:  # sharing goes on without it
            if not self._failed:
                logger.exception("load failed, so routers know nothing of this replica")
            self._failed = True
            return None


def _differs(reported: Load | None, load: Load, passed: float) -> bool:
    """True if routers would expect another load `passed` seconds after the report."""
    if reported is None or reported.rates is None or load.prefill_s is None:
        return reported is None or load._replace(step=reported.step) != reported
    expected = max(0.0, (reported.prefill_s or 0.0) - passed)
    return abs(load.prefill_s - expected) > max(_LITTLE, _MUCH * expected)


class EventReporter:
    """`pending` are the events that the tracker does not have yet."""

    def __init__(self, identity: Identity) -> None:
        self.pending: deque[dict[str, Any]] = deque(maxlen=MAX_REPORTED)
        self._replica: dict[str, Any] = {
            "model_uid": identity.model_uid,
            "incarnation": identity.incarnation,
        }
        self._tracker_lost = False

    def tracker_session(self, error: Exception | None) -> None:
        """A session with the tracker has begun, or failed with `error`. Only the first failure of
        an outage is reported."""
        was_lost, self._tracker_lost = self._tracker_lost, error is not None
        if self._tracker_lost == was_lost:
            return
        who = tuple(self._replica.values())
        if error is None:
            logger.info("tracker joined again: model=%s incarnation=%s", *who)
            self._add(TrackerRegained(**self._replica))
        else:
            logger.warning("tracker lost, retrying: model=%s incarnation=%s error=%r", *who, error)
            self._add(TrackerLost(**self._replica, reason=repr(error)))

    def rolled_back(self, donor: str, reason: str, rows: int, committed: int) -> None:
        self._add(
            FetchRolledBack(
                **self._replica, donor=donor, reason=reason, rows=rows, committed=committed
            )
        )

    def differs(self, peer: str, difference: Difference) -> None:
        logger.error(
            "peer computes different rows, not sharing with it: incarnation=%s peer=%s layer=%s "
            "difference=%.3g",
            self._replica["incarnation"],
            peer,
            *difference,
        )
        self._add(ReplicasDiffer(**self._replica, peer=peer, **_finite(difference)))

    def audit_failed(self, donor: str | None, difference: Difference) -> None:
        logger.error(
            "audit failed, rows are dropped: incarnation=%s donor=%s layer=%s difference=%.3g",
            self._replica["incarnation"],
            donor,
            *difference,
        )
        self._add(AuditFailed(**self._replica, donor=donor or "", **_finite(difference)))

    def _add(self, event: Event) -> None:
        self.pending.append(event_dict(event))


def _finite(difference: Difference) -> dict[str, Any]:
    """JSON has no infinity."""
    return {"layer": difference.layer, "amount": min(difference.amount, 1e9)}


_EXPLAINED = {
    NotSharing.NO_PREFIX_CACHING: "prefix caching is off",
    NotSharing.SWITCHED_OFF: "switched off by an operator",
    NotSharing.NOT_JOINED: "no tracker found yet",
    NotSharing.RESETTING: "the prefix cache is being reset",
    NotSharing.NO_TRANSFER_PROCESS: "the transfer process ended and is being restarted",
    NotSharing.ALONE: "the weights may have changed and have no version",
    NotSharing.CANNOT_COMPARE: "the engine cannot compute a text for comparison; see the status",
    NotSharing.NOT_COMPARED: "the engine or its peers have not computed the canary yet",
    NotSharing.NO_PEERS: "no other replica in this namespace",
}


class SharingLog:
    """Logs transitions, beginning with the first time that sharing works."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._works = False

    def update(self, reason: NotSharing | None, peers: int) -> None:
        """`reason` is why the replica does not share, None if it does, with `peers` peers."""
        if self._works == (reason is None):
            return
        self._works = reason is None
        if reason is None:
            logger.info("sharing works: incarnation=%s peers=%d", self._incarnation, peers)
        else:
            logger.warning(
                "sharing stopped, %s: incarnation=%s", _EXPLAINED[reason], self._incarnation
            )
