"""A replica on paper: an engine that computes prompts and answers in common steps.

The model is a fluid one. Its clock counts the engine's steps, in fractions. A step gives each
request that decodes one token and takes `base_s + slope_s * requests + context_s * tokens of their
context`. If a prompt is computed meanwhile, each step also computes an equal part of it, of at most
`batch_tokens` tokens, and takes as much longer as these take alone. Without requests that decode, a
prompt takes just that. A request counts with half of its answer in the context, so that all rates
are constant between two events: the next event is computed, not stepped to.

A request waits until those before it have been admitted and computed, there is a slot among
`requests`, and the KV cache has room for its whole answer and for that part of its prompt that no
running request has. Nothing is preempted. Then its leading chunks are pinned in the local pool;
those that follow are loaded from whoever has them (`Elsewhere`) if that is faster than computing
them, and the rest is computed. While it loads, other answers go on at full speed. The last step of
a prompt gives the answer's first token. Bytes do not move.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from benchmarks.traces import CHUNK, Request
from xinference_xavier.pool.pool import Pool, Row


class Engine(NamedTuple):
    """What all simulated replicas are like."""

    prefill: float = 12_000
    """Tokens per second, if nothing decodes."""
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
    base_s: float = 0.007
    """Seconds of a step."""
    slope_s: float = 0.0001
    """Seconds that a step takes longer for each request that decodes."""
    context_s: float = 0.0
    """Seconds that a step takes longer for each token of their context."""
    batch_tokens: int = 2048
    """Most tokens of a prompt in a step."""
    requests: int = 256
    """Most requests that run at once."""
    kv_tokens: int = 400_000
    """Tokens in the KV cache."""
    chunk: int = CHUNK
    """Tokens."""
    token_bytes: int = 128 * 1024

    @property
    def chunk_bytes(self) -> int:
        return self.chunk * self.token_bytes

    def missing(self, request: Request, chunks: int) -> int:
        """Tokens to compute if the leading `chunks` are there: at least the last one."""
        return max(1, request.tokens - chunks * self.chunk)

    def compute_seconds(self, request: Request, chunks: int) -> float:
        """Seconds of prefill if the leading `chunks` are there."""
        return self.missing(request, chunks) / self.prefill

    def fetch_seconds(self, chunks: int) -> float:
        return self.fetch_s + chunks * self.chunk / self.fetch if chunks else 0.0

    def read_seconds(self, chunks: int) -> float:
        return chunks * self.chunk / self.disk if chunks else 0.0


ENGINE = Engine()


class Source(NamedTuple):
    """Leading chunks, the seconds to get them, and who has them."""

    chunks: int = 0
    seconds: float = 0.0
    peers: int = 0
    """A set; empty for the disk."""


class Taken(NamedTuple):
    """How many of the leading chunks a source gave, and the peer that did."""

    chunks: int = 0
    donor: str = ""


class Elsewhere:
    """What a replica can load: nothing, if it is alone."""

    def find(self, name: str, keys: Sequence[bytes], now: float) -> Source:
        """The source that gives `name` most of the leading keys faster than it computes them."""
        return Source()

    def take(self, name: str, keys: Sequence[bytes], source: Source, now: float) -> Taken:
        """Load `keys` from `source`."""
        return Taken()

    def is_redundant(self, row: Row) -> bool:
        """True if a pool should evict this row first."""
        return False

    def used(self, name: str, keys: Sequence[bytes]) -> None:
        """The replica has used these chunks for a prompt."""


@dataclass(eq=False, slots=True)
class Job:
    """A request at a replica. Its prefill takes `slower` times as long as forecast."""

    name: str
    asked: Request
    slower: float = 1.0
    seconds: float = 0.0
    """The replica's own forecast for loading and computing."""
    local: int = 0
    """Chunks."""
    rows: list[Row] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)


class Token(Enum):
    FIRST = auto()
    LAST = auto()


class Event(NamedTuple):
    """A replica has generated the first or the last token of an answer."""

    at: float
    token: Token
    job: Job


class State(NamedTuple):
    """What a replica reports."""

    prefill_tokens: int
    """Still to compute, of requests that wait or run."""
    prefill_s: float
    """The same in seconds, loads included, if nothing decodes."""
    waiting: int
    """Requests that are not admitted yet."""
    running: int
    decoding: int
    """Running requests whose prompts have been computed."""
    known: frozenset[str]
    """The names of all of them."""
    free_tokens: int
    """Tokens for which the KV cache has room."""
    engine: Engine
    """Its rates, the line of its steps, and its slots."""


class Gauges(NamedTuple):
    """What any router can read from an engine's metrics."""

    waiting: int
    running: int
    used: float
    """The share of the KV cache."""


@dataclass(slots=True)
class Tokens:
    """Tokens of prompts by where they came from."""

    local: int = 0
    fetched: int = 0
    read: int = 0
    computed: int = 0

    @classmethod
    def sum(cls, parts: Iterable["Tokens"]) -> "Tokens":
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))


@dataclass(slots=True)
class _Prefill:
    job: Job
    loaded_at: float
    """Infinite once it is loaded."""
    seconds: float
    """Time to compute it if nothing decodes."""
    steps: int
    ends: float = inf
    """The step at which it is computed."""


class ReplicaModel:
    """One replica. The caller passes the time in, and it never goes back."""

    def __init__(
        self, name: str, engine: Engine = ENGINE, elsewhere: Elsewhere | None = None
    ) -> None:
        self.name = name
        self.pool = Pool(engine.slots)
        self.tokens = Tokens()
        self._engine = engine
        self._elsewhere = elsewhere or Elsewhere()
        self._now = 0.0
        self._steps = 0.0
        self._waiting: deque[Job] = deque()
        self._prefill: _Prefill | None = None
        self._decoding: list[tuple[float, int, Job]] = []  # a heap, by the step of the last token
        self._context = 0.0
        self._users = Counter[bytes]()  # running requests with this chunk in the KV cache
        self._tails = 0  # tokens of running requests that belong to no chunk
        self._count = 0

    # -- the interface ------------------------------------------------------------------------

    def receive(self, job: Job, now: float) -> None:
        """Call `advance` before, and again at `next_at`."""
        self._pass(now)
        keys = job.asked.keys
        local = 0
        while local < len(keys) and self.pool.lookup(keys[local]):
            local += 1
        source = self._elsewhere.find(self.name, keys[local:], now)
        job.seconds = source.seconds
        job.seconds += self._engine.compute_seconds(job.asked, local + source.chunks)
        self._waiting.append(job)
        self._admit()

    def next_at(self) -> float:
        """When something ends, unless another request comes; infinite if idle."""
        loaded = self._prefill.loaded_at if self._prefill else inf
        return min(loaded, self._at_step(self._next_step()))

    def advance(self, now: float) -> list[Event]:
        """The events up to `now`, in order."""
        events: list[Event] = []
        while (at := self.next_at()) <= now:
            if self._prefill and self._prefill.loaded_at == at:
                self._pass(at)
                self._loaded(self._prefill)
            else:
                self._now, self._steps = at, self._next_step()
                events += self._ended()
        self._pass(now)
        return events

    def report(self, now: float) -> State:
        """Call `advance` before."""
        self._pass(now)
        seconds = sum(job.seconds for job in self._waiting)
        names = [job.name for job in self._waiting]
        names += (job.name for _, _, job in self._decoding)
        if (prefill := self._prefill) is not None:
            names.append(prefill.job.name)
            if prefill.ends == inf:
                seconds += prefill.loaded_at - now + prefill.seconds
            else:
                seconds += (prefill.ends - self._steps) / prefill.steps * prefill.seconds
        return State(
            prefill_tokens=int(seconds * self._engine.prefill),
            prefill_s=seconds,
            waiting=len(self._waiting),
            running=self._running,
            decoding=len(self._decoding),
            known=frozenset(names),
            free_tokens=self._engine.kv_tokens - self._used,
            engine=self._engine,
        )

    @property
    def gauges(self) -> Gauges:
        return Gauges(len(self._waiting), self._running, self._used / self._engine.kv_tokens)

    # -- the clock ----------------------------------------------------------------------------

    @property
    def _step_s(self) -> float:
        """Seconds of a step; 0 if there are none."""
        engine, count = self._engine, len(self._decoding)
        seconds = 0.0
        if count:
            seconds = engine.base_s + engine.slope_s * count + engine.context_s * self._context
        if self._prefill and self._prefill.ends < inf:
            seconds += self._prefill.seconds / self._prefill.steps
        return seconds

    def _next_step(self) -> float:
        """At which a prompt or an answer ends."""
        prefill = self._prefill.ends if self._prefill else inf
        return min(prefill, self._decoding[0][0]) if self._decoding else prefill

    def _at_step(self, step: float) -> float:
        return self._now + (step - self._steps) * self._step_s if step < inf else inf

    def _pass(self, now: float) -> None:
        if step_s := self._step_s:
            self._steps += (now - self._now) / step_s
        self._now = now

    # -- a request's life ---------------------------------------------------------------------

    @property
    def _running(self) -> int:
        return len(self._decoding) + (self._prefill is not None)

    @property
    def _used(self) -> int:
        """Tokens in the KV cache."""
        return len(self._users) * self._engine.chunk + self._tails

    def _tail(self, request: Request) -> int:
        return request.tokens - len(request.keys) * self._engine.chunk + request.answer

    def _admit(self) -> None:
        """Begin the prefill of the next request if there is room for it."""
        if self._prefill or not self._waiting:
            return
        engine, asked = self._engine, self._waiting[0].asked
        new = sum(key not in self._users for key in asked.keys)
        needed = new * engine.chunk + self._tail(asked)
        is_full = len(self._decoding) >= engine.requests or (self._used + needed > engine.kv_tokens)
        if self._decoding and is_full:
            return
        self._users.update(asked.keys)
        self._tails += self._tail(asked)
        self._begin(self._waiting.popleft())

    def _begin(self, job: Job) -> None:
        """Load what is elsewhere; the rest is computed after that."""
        engine, keys = self._engine, job.asked.keys
        job.rows = self.pool.pin(keys)
        local = job.local = len(job.rows)
        source = self._elsewhere.find(self.name, keys[local:], self._now)
        wanted = keys[local : local + source.chunks]
        taken, arrived, seconds = Taken(), 0, 0.0
        if wanted:
            taken = self._elsewhere.take(self.name, wanted, source, self._now)
            rows = self._reserve(job, wanted[: taken.chunks])
            arrived = len(rows)
            for row in rows:
                row.replicated_from = taken.donor or None
            seconds = engine.fetch_seconds(arrived) if source.peers else source.seconds
        missing = engine.missing(job.asked, local + taken.chunks)
        self.tokens.fetched += arrived * engine.chunk if source.peers else 0
        self.tokens.read += 0 if source.peers else arrived * engine.chunk
        self.tokens.computed += missing
        self.tokens.local += job.asked.tokens - arrived * engine.chunk - missing
        prefill = self._prefill = _Prefill(
            job,
            loaded_at=self._now + job.slower * seconds,
            seconds=job.slower * missing / engine.prefill,
            steps=ceil(missing / engine.batch_tokens),
        )
        if not seconds:
            self._loaded(prefill)

    def _loaded(self, prefill: _Prefill) -> None:
        prefill.loaded_at, prefill.ends = inf, self._steps + prefill.steps

    def _ended(self) -> list[Event]:
        """What ends at this step."""
        if self._prefill and self._prefill.ends == self._steps:
            job, self._prefill = self._prefill.job, None
            events = [self._computed(job)]
            if job.asked.answer > 1:
                self._count += 1
                self._context += job.asked.tokens + job.asked.answer / 2
                ends = self._steps + job.asked.answer - 1
                heappush(self._decoding, (ends, self._count, job))
            else:
                events.append(self._answered(job))
        else:
            _, _, job = heappop(self._decoding)
            self._context -= job.asked.tokens + job.asked.answer / 2
            events = [self._answered(job)]
        self._admit()
        return events

    def _computed(self, job: Job) -> Event:
        """The whole prompt is stored."""
        self._reserve(job, job.asked.keys)
        self.pool.unpin(job.rows)
        self.pool.touch(reversed(job.asked.keys))
        self._elsewhere.used(self.name, job.asked.keys)
        return Event(self._now, Token.FIRST, job)

    def _answered(self, job: Job) -> Event:
        self._users.subtract(job.asked.keys)
        for key in job.asked.keys:
            if not self._users[key]:
                del self._users[key]
        self._tails -= self._tail(job.asked)
        return Event(self._now, Token.LAST, job)

    def _reserve(self, job: Job, keys: Sequence[bytes]) -> list[Row]:
        reserved = self.pool.reserve(keys, job.asked.keys, self._elsewhere.is_redundant)
        for row in reserved.rows:
            self.pool.commit(row, checksum=1, pins=1)
        job.rows += reserved.rows
        job.evicted += reserved.evicted
        return reserved.rows
