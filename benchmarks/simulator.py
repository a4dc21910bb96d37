"""Replicas on paper: the real router, index, mirror and pools, with a clock of their own.

A replica computes one prompt after another, in order of arrival. When a prompt's turn comes, its
leading chunks are pinned in the local pool; those that follow are fetched from one peer, or read
from a disk, whichever has more, if that is faster than computing them, and the rest is computed.
Fetching keeps the replica as busy as computing, but not its donor. Nothing decodes.

The disk is one for all replicas, never full, and reads for one replica at a time. As in
`xinference_xavier.replica.disk`, it has what a replica used again, or gave to a peer; or all.

With an `error`, each prompt takes by up to that share longer or less than forecast. Bytes do not
move, and no thread runs.
"""

import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from benchmarks.traces import CHUNK, GROUP, Request
from xinference_xavier.mirror import Mirror
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.tracker import Member, pack
from xinference_xavier.replica.disk import REMEMBERED
from xinference_xavier.routing.choice import Choice, Chunks, Prompt
from xinference_xavier.routing.load import Rates, Report
from xinference_xavier.routing.router import Router
from xinference_xavier.tracker.index import Index

REPORTS = 2.0
"""Seconds between two reports of a replica."""
NEWS = 0.02
"""Seconds until a publication is in the mirrors."""


class Engine(NamedTuple):
    """What all simulated replicas are like."""

    prefill: float = 12_000
    """Tokens per second."""
    fetch: float = 120_000
    """Tokens per second."""
    fetch_s: float = 0.005
    """Overhead of a fetch, in seconds."""
    transit: float = 0.01
    """Seconds that a request is on its way."""
    slots: int = 4000
    """Chunks in a pool."""
    disk: float = 0.0
    """Tokens per second that a disk reads; 0 without one."""
    saves_all: bool = False

    @property
    def size(self) -> Chunks:
        return Chunks(CHUNK, CHUNK * 128 * 1024)

    @property
    def rates(self) -> Rates:
        byte_s = CHUNK / self.fetch / self.size.bytes
        return Rates(1 / self.prefill, 0.0, self.fetch_s, byte_s)

    def missing(self, request: Request, chunks: int) -> int:
        """Tokens to compute if the leading `chunks` are there: at least the last one."""
        return max(1, request.tokens - chunks * CHUNK)

    def compute_seconds(self, request: Request, chunks: int) -> float:
        """Seconds of prefill if the leading `chunks` are there."""
        return self.missing(request, chunks) / self.prefill

    def fetch_seconds(self, chunks: int) -> float:
        return self.fetch_s + chunks * CHUNK / self.fetch if chunks else 0.0

    def read_seconds(self, chunks: int) -> float:
        return chunks * CHUNK / self.disk if chunks else 0.0


ENGINE = Engine()


class Policy(Protocol):
    """How a replica is chosen."""

    def choose(self, request: str, prompt: Prompt, now: float) -> Choice: ...

    def answered(self, request: str) -> None: ...


Maker = Callable[[Router, random.Random], Policy]


class _Source(NamedTuple):
    """Leading chunks, the seconds to get them, and who has them."""

    chunks: int = 0
    seconds: float = 0.0
    peers: int = 0  # a set; empty for the disk


@dataclass(slots=True)
class _Job:
    request: str
    asked: Request
    slower: float = 1.0  # than forecast
    seconds: float = 0.0  # the replica's own forecast
    local: int = 0  # chunks
    rows: list[Row] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Replica:
    name: str
    bit: int
    pool: Pool
    waiting: deque[_Job] = field(default_factory=deque)
    running: _Job | None = None
    ends: float = 0.0  # when the running one is answered
    sequence: int = 0
    once: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # chunks used once


@dataclass
class Result:
    """Seconds to the first token of each request; tokens by where they came from, and those that
    are saved on the disk at the end; microseconds of the router by request."""

    seconds: list[float] = field(default_factory=list)
    local: int = 0
    fetched: int = 0
    read: int = 0
    saved: int = 0
    computed: int = 0
    choices_us: list[float] = field(default_factory=list)


class Simulator:
    def __init__(
        self,
        replicas: int,
        maker: Maker,
        *,
        engine: Engine = ENGINE,
        shares: bool = True,
        error: float = 0.0,
    ) -> None:
        self._source = random.Random(0)
        self._engine = engine
        self._error = error
        self._index = Index(max_keys=2 * engine.slots)
        self.mirror = Mirror("router")
        self.router = Router(self.mirror, engine.size, self._source)
        self._policy = maker(self.router, self._source)
        self._shares = shares
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._news = False
        self._left = 0
        self._saved: set[bytes] = set()  # on the disk
        self._reads_until = 0.0
        self.result = Result()
        self._replicas: dict[str, _Replica] = {}
        for number in range(replicas):
            name = f"replica {number}"
            self._index.join(Member(name, "127.0.0.1:1"), 32 + len(GROUP), 0.0)
            self._replicas[name] = _Replica(name, self.mirror.sets.bit(name), Pool(engine.slots))
        self._hear()

    def run(self, requests: Sequence[Request]) -> Result:
        self._left = len(requests)
        for replica in self._replicas.values():
            self._report(replica, first=True)
        for number, request in enumerate(requests):
            while self._events and self._events[0][0] <= request.at:
                self._next()
            self._now = request.at
            self._arrive(f"{number}", request)
        while self._left:
            self._next()
        self.result.saved = len(self._saved) * CHUNK
        return self.result

    def _at(self, moment: float, call: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._events, (moment, self._count, call, arguments))

    def _next(self) -> None:
        self._now, _, call, arguments = heappop(self._events)
        call(*arguments)

    # -- the router ---------------------------------------------------------------------------

    def _arrive(self, name: str, request: Request) -> None:
        prompt = Prompt(request.tokens, request.keys)
        began = time.perf_counter()
        choice = self._policy.choose(name, prompt, self._now)
        self.router.sent(name, choice, self._now)
        self.result.choices_us.append((time.perf_counter() - began) * 1e6)
        replica = self._replicas[choice.replica]
        slower = 1 + self._error * random.Random(name).uniform(-1, 1)
        self._at(
            self._now + self._engine.transit, self._receive, replica, _Job(name, request, slower)
        )

    def _report(self, replica: _Replica, first: bool = False) -> None:
        """The first ones are spread over the time between two."""
        seconds = sum(job.seconds for job in replica.waiting)
        count = len(replica.waiting)
        if replica.running is not None:
            seconds += replica.ends - self._now
            count += 1
        tokens = int(seconds * self._engine.prefill)
        report = Report(self._now, tokens, seconds, count, self._engine.rates)
        self.router.loads.report(replica.name, report)
        wait = self._source.uniform(0, REPORTS) if first else REPORTS
        self._at(self._now + wait, self._report, replica)

    def _hear(self) -> None:
        mirror = self.mirror
        self._news = False
        mirror.apply(self._index.changes_since(mirror.epoch, mirror.revision))

    # -- a replica ----------------------------------------------------------------------------

    def _receive(self, replica: _Replica, job: _Job) -> None:
        keys = job.asked.keys
        local = 0
        while local < len(keys) and replica.pool.lookup(keys[local]):
            local += 1
        source = self._elsewhere(replica, keys[local:])
        job.seconds = source.seconds
        job.seconds += self._engine.compute_seconds(job.asked, local + source.chunks)
        replica.waiting.append(job)
        if replica.running is None:
            self._begin(replica)

    def _elsewhere(self, replica: _Replica, keys: Sequence[bytes]) -> _Source:
        """Who has most of the leading keys, if that is faster than computing them."""
        engine = self._engine
        count, peers, others = 0, 0, ~replica.bit if self._shares else 0
        for key in keys:
            others &= self.mirror.usable_set(key)
            if not others:
                break
            count, peers = count + 1, others
        sources = [_Source(count, engine.fetch_seconds(count), peers)]
        if engine.disk:
            count = next((n for n, key in enumerate(keys) if key not in self._saved), len(keys))
            waits = max(0.0, self._reads_until - self._now)
            sources.append(_Source(count, waits + engine.read_seconds(count)))
        return max(
            (each for each in sources if each.seconds < each.chunks * CHUNK / engine.prefill),
            key=lambda each: (each.chunks, -each.seconds),
            default=_Source(),
        )

    def _begin(self, replica: _Replica) -> None:
        """Compute the next prompt but for what is here and what a peer or the disk gives."""
        job = replica.running = replica.waiting.popleft()
        keys = job.asked.keys
        job.rows = replica.pool.pin(keys)
        local = job.local = len(job.rows)
        source = self._elsewhere(replica, keys[local:])
        wanted = keys[local : local + source.chunks]
        engine = self._engine
        if source.peers:
            sent, arrived = self._fetch(replica, job, wanted, source.peers)
            self.result.fetched += arrived * CHUNK
            seconds = engine.fetch_seconds(arrived)
        else:
            sent, arrived = len(wanted), len(self._reserve(replica, job, wanted))
            self.result.read += arrived * CHUNK
            seconds = source.seconds
            self._reads_until = max(self._reads_until, self._now + seconds)
        missing = engine.missing(job.asked, local + sent)
        self.result.computed += missing
        self.result.local += job.asked.tokens - arrived * CHUNK - missing
        seconds += missing / engine.prefill
        replica.ends = self._now + job.slower * seconds
        self._at(replica.ends, self._answer, replica, job)

    def _fetch(
        self, replica: _Replica, job: _Job, keys: Sequence[bytes], peers: int
    ) -> tuple[int, int]:
        """How many leading keys a peer gave, and how many of them were not here."""
        donor = self._replicas[self._source.choice(self.mirror.sets.names(peers))]
        granted = donor.pool.pin_shared(keys)
        donor.pool.unpin(granted)
        if self._engine.disk:
            self._saved.update(row.key for row in granted)
        rows = self._reserve(replica, job, keys[: len(granted)])
        for row in rows:
            row.replicated_from = donor.name
        return len(granted), len(rows)

    def _reserve(self, replica: _Replica, job: _Job, keys: Sequence[bytes]) -> list[Row]:
        reserved = replica.pool.reserve(keys, job.asked.keys, self._is_redundant)
        for row in reserved.rows:
            replica.pool.commit(row, checksum=1, pins=1)
        job.rows += reserved.rows
        job.evicted += reserved.evicted
        return reserved.rows

    def _is_redundant(self, row: Row) -> bool:
        donor = row.replicated_from
        return donor is not None and bool(
            self.mirror.usable_set(row.key) & self._replicas[donor].bit
        )

    def _answer(self, replica: _Replica, job: _Job) -> None:
        self._reserve(replica, job, job.asked.keys)
        replica.pool.unpin(job.rows)
        replica.pool.touch(reversed(job.asked.keys))
        if self._engine.disk:
            self._save(replica, job.asked.keys)
        added = pack(row.key for row in job.rows[job.local :])
        replica.sequence += 1
        self._index.publish(replica.name, replica.sequence, added, pack(job.evicted))
        if not self._news:
            self._news = True
            self._at(self._now + NEWS, self._hear)
        self.router.ended(job.request)
        self._policy.answered(job.request)
        self.result.seconds.append(self._now - job.asked.at)
        self._left -= 1
        replica.running = None
        if replica.waiting:
            self._begin(replica)

    def _save(self, replica: _Replica, used: Sequence[bytes]) -> None:
        for key in used:
            if self._engine.saves_all or key in replica.once:
                self._saved.add(key)
            replica.once[key] = None
        while len(replica.once) > REMEMBERED * self._engine.slots:
            replica.once.popitem(last=False)
