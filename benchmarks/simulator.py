"""Replicas on paper, and between them the real router, index and pools, with a clock of
their own.

A replica is a `ReplicaModel`. It loads from one peer, or from a disk, whichever has more of the
leading chunks that it lacks. That does not delay the donor. The disk is one for all replicas, never
full, and reads for one replica at a time. As in `xinference_xavier.replica.disk`, it has what a
replica used again, or gave to a peer; or all.

With an `error`, each prefill takes by up to that share longer or less than forecast. No thread
runs.
"""

import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple, Protocol

from benchmarks.replica_model import (
    ENGINE,
    Elsewhere,
    Engine,
    Event,
    Gauges,
    Job,
    ReplicaModel,
    Source,
    State,
    Taken,
    Token,
    Tokens,
)
from benchmarks.traces import Request
from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.pool.pool import Row
from xinference_xavier.protocol.tracker import Member, pack_short
from xinference_xavier.replica.disk import REMEMBERED
from xinference_xavier.routing.forecast import Chunks, Prompt
from xinference_xavier.routing.known_replica import Rates, Replica, Report, Step
from xinference_xavier.routing.route import Route
from xinference_xavier.routing.router import Router
from xinference_xavier.routing.texts import Text
from xinference_xavier.tracker.journal import Journal

REPORTS = 2.0
"""Seconds between two reports of a replica."""
SCRAPES = 0.05
"""Seconds between two looks at an engine's metrics."""
NEWS = 0.02
"""Seconds until a publication is in the router's index."""


class Cluster(NamedTuple):
    """What a policy can know of the replicas."""

    names: Sequence[str]
    engine: Engine
    holdings: Index[Peers]
    scrape: Callable[[str], Gauges]
    """What the metrics of a replica said lately."""


class Policy(Protocol):
    """How a replica is chosen. Each method is told the time."""

    def choose(self, request: str, prompt: Prompt, now: float) -> str:
        """The replica that the request is sent to."""

    def answered(self, request: str, now: float) -> None:
        """The first token has come."""

    def ended(self, request: str, answer: int, now: float) -> None:
        """The last token has come."""

    def report(self, replica: str, state: State, now: float) -> None:
        """A replica tells its state."""


Maker = Callable[[Cluster, random.Random], Policy]


class EarliestFinish:
    """Ours. Nothing else here knows the router's interface."""

    def __init__(self, cluster: Cluster, source: random.Random) -> None:
        engine = cluster.engine
        size = Chunks(engine.chunk, engine.chunk_bytes)
        self._router = Router(cluster.holdings, size, source)
        byte_s = 1 / engine.fetch / engine.token_bytes
        self._rates = Rates(1 / engine.prefill, 0.0, engine.fetch_s, byte_s)
        self._step = Step(engine.base_s, engine.slope_s)
        self._routes: dict[str, Route] = {}

    def choose(self, request: str, prompt: Prompt, now: float) -> str:
        prompt = prompt._replace(answer=self._router.answers.expected("", 0))
        choice = self._router.choose(prompt, now)
        if choice is None:
            raise RuntimeError("no replica accepts a request")
        route = self._routes[request] = Route(Text(0, ()), "", 0, True, now)
        self._router.routes.add(route)
        self._router.send(route, choice, now)
        return choice.replica

    def answered(self, request: str, now: float) -> None:
        self._router.answered(self._routes[request], now)

    def ended(self, request: str, answer: int, now: float) -> None:
        self._router.end(self._routes.pop(request))
        self._router.answers.learn("", 0, answer)

    def report(self, replica: str, state: State, now: float) -> None:
        report = Report(
            now,
            state.prefill_tokens,
            state.prefill_s,
            state.waiting + state.running,
            state.decoding,
            {self._routes[name] for name in state.known if name in self._routes},
            self._rates,
            self._step,
            state.engine.requests,
            state.free_tokens,
            state.engine.kv_tokens,
        )
        known = self._router.replicas.get(replica)
        self._router.report(known or Replica(replica, replica, replica, report), report)


class Result(NamedTuple):
    """Seconds to the first and to the last token of each request, and the answers' tokens, in order
    of arrival; how many requests each replica got; the prompts' tokens by where they came from, and
    those that are saved on the disk at the end; microseconds of the policy by request."""

    first: list[float]
    last: list[float]
    answers: list[int]
    sent: Counter[str]
    tokens: Tokens
    saved: int
    choices_us: list[float]


class _Peers(Elsewhere):
    """The other replicas, and the disk if there is one."""

    def __init__(
        self, engine: Engine, index: Index[Peers], shares: bool, source: random.Random
    ) -> None:
        self.replicas: dict[str, ReplicaModel] = {}
        self.saved: set[bytes] = set()  # on the disk
        self._engine, self._index, self._shares, self._source = engine, index, shares, source
        self._bits: dict[str, int] = {}
        self._reads_until = 0.0
        self._once: dict[str, OrderedDict[bytes, None]] = {}  # chunks that a replica used once

    def add(self, name: str) -> None:
        self._bits[name] = self._index.members[name].bit
        self._once[name] = OrderedDict()
        self.replicas[name] = ReplicaModel(name, self._engine, self)

    def find(self, name: str, keys: Sequence[bytes], now: float) -> Source:
        engine = self._engine
        count, peers, others = 0, 0, ~self._bits[name] if self._shares else 0
        for key in keys:
            others &= self._index.full_set(key)
            if not others:
                break
            count, peers = count + 1, others
        sources = [Source(count, engine.fetch_seconds(count), peers)]
        if engine.disk:
            count = next((n for n, key in enumerate(keys) if key not in self.saved), len(keys))
            waits = max(0.0, self._reads_until - now)
            sources.append(Source(count, waits + engine.read_seconds(count)))
        return max(
            (
                each
                for each in sources
                if each.seconds < each.chunks * engine.chunk / engine.prefill
            ),
            key=lambda each: (each.chunks, -each.seconds),
            default=Source(),
        )

    def take(self, name: str, keys: Sequence[bytes], source: Source, now: float) -> Taken:
        if not source.peers:
            self._reads_until = max(self._reads_until, now + source.seconds)
            return Taken(len(keys))
        donor = self.replicas[self._source.choice(self._index.members.names(source.peers))]
        granted = donor.pool.pin_shared(keys)
        donor.pool.unpin(granted)
        if self._engine.disk:
            self.saved.update(row.key for row in granted)
        return Taken(len(granted), donor.name)

    def is_redundant(self, row: Row) -> bool:
        donor = row.replicated_from
        return donor is not None and bool(self._index.full_set(row.key) & self._bits[donor])

    def used(self, name: str, keys: Sequence[bytes]) -> None:
        if not self._engine.disk:
            return
        once = self._once[name]
        for key in keys:
            if self._engine.saves_all or key in once:
                self.saved.add(key)
            once[key] = None
        while len(once) > REMEMBERED * self._engine.slots:
            once.popitem(last=False)


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
        self._journal = Journal()
        self._index = Index(Peers(""))
        self._peers = _Peers(engine, self._index, shares, random.Random(0))
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._news = False
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._choices_us: list[float] = []
        names = [f"replica {number}" for number in range(replicas)]
        for name in names:
            self._journal.join(Member(name, "127.0.0.1:1"), 0.0)
        self._hear()
        for name in names:
            self._peers.add(name)
        self._replicas = self._peers.replicas
        self._wakes = dict.fromkeys(names, inf)  # when each is looked at next
        self._sequences = Counter[str]()
        self._scraped: dict[str, tuple[float, Gauges]] = {}
        self._policy = maker(Cluster(names, engine, self._index, self._scrape), random.Random(0))
        self._sent = Counter(dict.fromkeys(names, 0))

    def run(self, requests: Sequence[Request]) -> Result:
        for replica in self._replicas.values():
            self._report(replica, first=True)
        for number, request in enumerate(requests):
            while self._events and self._events[0][0] <= request.at:
                self._next()
            self._now = request.at
            self._arrive(f"{number}", request)
        while len(self._last) < len(requests):
            self._next()
        names = [f"{number}" for number in range(len(requests))]
        return Result(
            [self._first[name] for name in names],
            [self._last[name] for name in names],
            [request.answer for request in requests],
            self._sent,
            Tokens.sum(replica.tokens for replica in self._replicas.values()),
            len(self._peers.saved) * self._engine.chunk,
            self._choices_us,
        )

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
        replica = self._policy.choose(name, prompt, self._now)
        self._choices_us.append((time.perf_counter() - began) * 1e6)
        self._sent[replica] += 1
        slower = 1 + self._error * random.Random(name).uniform(-1, 1)
        job = Job(name, request, slower)
        self._at(self._now + self._engine.transit, self._receive, self._replicas[replica], job)

    def _report(self, replica: ReplicaModel, first: bool = False) -> None:
        """The first ones are spread over the time between two."""
        self._advance(replica)
        self._policy.report(replica.name, replica.report(self._now), self._now)
        wait = self._source.uniform(0, REPORTS) if first else REPORTS
        self._at(self._now + wait, self._report, replica)

    def _scrape(self, name: str) -> Gauges:
        at, gauges = self._scraped.get(name, (-inf, Gauges(0, 0, 0.0)))
        if self._now - at >= SCRAPES:
            gauges = self._replicas[name].gauges
            self._scraped[name] = self._now, gauges
        return gauges

    def _hear(self) -> None:
        index = self._index
        self._news = False
        index.apply(self._journal.changes_since(index.epoch, index.revision))

    # -- the replicas -------------------------------------------------------------------------

    def _receive(self, replica: ReplicaModel, job: Job) -> None:
        self._advance(replica)
        replica.receive(job, self._now)
        self._wake(replica)

    def _woken(self, replica: ReplicaModel, moment: float) -> None:
        if moment == self._wakes[replica.name]:
            self._wakes[replica.name] = inf
            self._advance(replica)

    def _wake(self, replica: ReplicaModel) -> None:
        """When its next event comes, unless it is woken before."""
        if (at := replica.next_at()) < self._wakes[replica.name]:
            self._wakes[replica.name] = at
            self._at(at, self._woken, replica, at)

    def _advance(self, replica: ReplicaModel) -> None:
        for event in replica.advance(self._now):
            if event.token is Token.FIRST:
                self._answered(replica, event)
            else:
                self._ended(event)
        self._wake(replica)

    def _answered(self, replica: ReplicaModel, event: Event) -> None:
        job = event.job
        self._sequences[replica.name] += 1
        added = pack_short(row.key for row in job.rows[job.local :])
        sequence = self._sequences[replica.name]
        self._journal.publish(replica.name, sequence, added, pack_short(job.evicted))
        if not self._news:
            self._news = True
            self._at(self._now + NEWS, self._hear)
        self._policy.answered(job.name, self._now)
        self._first[job.name] = event.at - job.asked.at

    def _ended(self, event: Event) -> None:
        job = event.job
        self._policy.ended(job.name, job.asked.answer, self._now)
        self._last[job.name] = event.at - job.asked.at
