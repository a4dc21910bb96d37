"""The router: what is known of the replicas, and what it has itself sent there.

It also expects the chunks of the prompts that it sent (`Expected`), because the index learns of a
chunk only when it has been computed. And it knows for how long vLLM's own prefix cache keeps them:
on many cards that is larger than the pool, of which alone the index knows.

It remembers which request is at which replica: if the replica is lost before the first byte of an
answer, the request goes to another one, but only once, as a request that brings its replica down
must not bring down all. And requests wait while every replica is at its limit (`Queue`); they leave
in order of arrival, or when they have waited too long or their client has gone.

Pure: no I/O; times are passed in, in monotonic seconds, and chance comes from `source`. Belongs to
one thread, which is also the one that writes `holdings`.
"""

import math
import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter

import numpy as np

from xinference_xavier.routing.choice import (
    MOST_BUSY,
    Choice,
    Chunks,
    Forecast,
    Holdings,
    Prompt,
    choose,
    forecast,
    held_runs,
    with_prefill_replicas,
    work_weight,
)
from xinference_xavier.routing.load import Floats, Loads

GRACE = 2.0
"""Seconds in which a chunk that has been computed reaches the index."""
_LATEST = 0.02  # weight of the latest choice in what is learned from all
_LATELY = 10.0
"""Seconds after which work counts for 1 / e of what it counted when it was sent."""
_SPREAD = 0.4
"""How much the work of the last seconds counts for a new prompt. More spreads sessions better and
what takes longer than forecast worse."""
_SPREAD_BY_WAITING = 0.1
"""The same for each prompt that waits at a replica, if that is more."""
_NEW = 0.3
"""The share of a new prompt's tokens that a replica may hold."""


MAX_CACHED = 200_000
"""Chunks remembered of vLLM's own prefix caches, each as often as a prompt had it."""


class Expected:
    """Chunks that replicas hold until some time. At most `bound` are remembered, each as often as
    it was added; those that end first are forgotten first."""

    def __init__(self, bound: float = math.inf) -> None:
        self.sets: dict[bytes, int] = {}
        """Replicas as bits, by key, as in the index."""
        self._until: dict[tuple[bytes, int], float] = {}
        self._ends: list[tuple[float, int, Sequence[bytes]]] = []  # a heap
        self._bound = bound
        self._size = 0  # of all keys in the heap

    def add(self, bit: int, keys: Sequence[bytes], until: float) -> None:
        """Expect `keys` at the replica with this bit up to `until`."""
        for key in keys:
            self.sets[key] = self.sets.get(key, 0) | bit
            self._until[key, bit] = max(until, self._until.get((key, bit), until))
        if keys:
            heappush(self._ends, (until, bit, keys))
            self._size += len(keys)
        while self._size > self._bound:
            self.expire(self._ends[0][0])

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, bit, keys = heappop(self._ends)
            self._size -= len(keys)
            self._remove(bit, (key for key in keys if self._until.get((key, bit), now) <= now))

    def _remove(self, bit: int, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._until.pop((key, bit), None) is None:
                continue
            self.sets[key] &= ~bit
            if not self.sets[key]:
                del self.sets[key]

    def clear(self) -> None:
        self.sets.clear()
        self._until.clear()
        self._ends.clear()
        self._size = 0


_MEASURED = 20  # admissions that the estimate is made from


class Queue:
    """At most `bound` requests wait, each for at most `patience` seconds."""

    def __init__(self, bound: int, patience: float) -> None:
        self.bound = bound
        self.patience = patience
        self._arrived: OrderedDict[str, float] = OrderedDict()
        self._admitted: deque[float] = deque(maxlen=_MEASURED)

    def __len__(self) -> int:
        return len(self._arrived)

    def join(self, request: str, arrived: float) -> bool:
        """False if the queue is full: the request is refused. One that comes back gets its place
        before those that arrived later, which do not keep it out."""
        latest = next(reversed(self._arrived.values()), -math.inf)
        if arrived >= latest and len(self._arrived) >= self.bound:
            return False
        self._arrived[request] = arrived
        if arrived < latest:
            self._arrived = OrderedDict(sorted(self._arrived.items(), key=itemgetter(1)))
        return True

    def leave(self, request: str) -> None:
        """It has waited for too long, or its client has gone. Does nothing for one that does not
        wait."""
        self._arrived.pop(request, None)

    @property
    def first(self) -> str:
        """The request that is admitted next; empty if none waits."""
        return next(iter(self._arrived), "")

    def admit(self, now: float) -> float:
        """A replica takes the first request, which leaves the queue. Returns for how many seconds
        it waited. Raises KeyError if none waits."""
        _, arrived = self._arrived.popitem(last=False)
        self._admitted.append(now)
        return max(0.0, now - arrived)

    def retry_after(self, now: float) -> int:
        """Seconds after which a refused client may find a place: as long as those that wait now
        will take at the pace of the latest admissions. At least one, at most the patience."""
        longest = max(1, math.ceil(self.patience))
        if len(self._admitted) < 2:
            return longest
        pace = (now - self._admitted[0]) / len(self._admitted)
        return min(longest, max(1, math.ceil(pace * max(1, len(self._arrived)))))


@dataclass(slots=True)
class _Request:
    replica: str = ""  # empty until it goes to another one
    answered: bool = False
    moved: bool = False


class Router:
    """Chooses replicas, and knows which request is where. See `with_prefill_replicas` for
    `threshold`."""

    def __init__(
        self,
        holdings: Holdings,
        size: Chunks,
        source: random.Random,
        *,
        threshold: int | None = None,
    ) -> None:
        self.loads = Loads(holdings)
        self._holdings = holdings
        self._size = size
        self._source = source
        self._expected = Expected()
        self._cached = Expected(MAX_CACHED)
        self._threshold = threshold
        self._busy = 0.5  # share of the time in which a replica works
        self._prompt_s = 0.0  # mean time for which a prompt keeps a replica busy
        self._work = np.zeros(0)  # seconds of work that were sent lately, by number
        self._work_at = 0.0
        self._requests: dict[str, _Request] = {}  # under way
        self._prefills: dict[str, str] = {}  # the replicas that prefill, by request

    def choose(
        self, prompt: Prompt, now: float, *, preferred: str = "", whole: bool = False
    ) -> Choice | None:
        """The replica to send a request to; None if none accepts one now. A `whole` request is
        prefilled where it is answered."""
        found = self.forecast(prompt, now)
        if not whole:
            found = with_prefill_replicas(self.loads, found, self._size, self._threshold)
        held = int(found.runs.max(initial=0)) * self._size.tokens
        is_new = not preferred and held < _NEW * prompt.tokens
        waiting = self._waiting(found)
        spread = max(_SPREAD, _SPREAD_BY_WAITING * waiting)
        return choose(
            self.loads,
            found,
            self._source,
            preferred,
            weight=work_weight(self._busy, waiting),
            penalty=spread * self._lately(now) if is_new else 0.0,
        )

    def _waiting(self, found: Forecast) -> float:
        """The number of prompts that a replica has still to compute, on average, where queues
        stand; otherwise 0, since one long prompt looks like many."""
        backlog = found.backlog[np.isfinite(found.backlog)]
        if self._busy < MOST_BUSY or not backlog.size or not self._prompt_s:
            return 0.0
        return float(backlog.mean()) / self._prompt_s

    def _lately(self, now: float) -> Floats:
        """The seconds of work that were sent to each replica lately."""
        count = len(self.loads.names)
        faded = self._work * math.exp((self._work_at - now) / _LATELY)
        self._work = np.pad(faded, (0, count - len(faded)))
        self._work_at = now
        return self._work

    def forecast(self, prompt: Prompt, now: float) -> Forecast:
        self._renumber()
        self._expected.expire(now)
        self._cached.expire(now)
        count = len(self.loads.names)
        runs, fetchable = held_runs(self._holdings, self._soon, prompt.keys, count)
        return forecast(self.loads, prompt, runs, fetchable, self._size, now)

    def _soon(self, key: bytes) -> int:
        """The replicas that hold the chunk although the index may not know, as bits."""
        return self._expected.sets.get(key, 0) | self._cached.sets.get(key, 0)

    def sent(self, request: str, choice: Choice, now: float) -> None:
        """The request goes to the chosen replica, which will soon hold all of its chunks."""
        prompt, terms = choice.forecast.prompt, choice.terms
        backlog = choice.forecast.backlog
        works = float((backlog[np.isfinite(backlog)] > 0.0).mean())
        self._busy += _LATEST * (works - self._busy)
        known = self._requests.setdefault(request, _Request())
        assert not known.replica, "it is at a replica"
        known.replica = choice.replica
        work = float(choice.forecast.work[choice.number])
        self._prompt_s += (_LATEST if self._prompt_s else 1.0) * (work - self._prompt_s)
        seconds, worker = terms.fetch + terms.compute, choice.replica
        if (prefill := choice.prefill) is not None:
            seconds, worker = 0.0, prefill.replica  # it keeps that one busy instead
            self._prefills[request] = prefill.replica
            self.loads.sent(prefill.replica, request, prefill.seconds, prompt.tokens, now)
        self.loads.sent(choice.replica, request, seconds, prompt.tokens, now)
        if (number := self.loads.number(worker)) is not None:
            self._lately(now)[number] += work
        missing = prompt.keys[int(choice.forecast.runs[choice.number]) :]
        self._expect(choice.number, missing, sum(terms), now)

    def scheduled(self, request: str, keys: Sequence[bytes], now: float) -> None:
        """A replica computes the request, and these are its keys."""
        self._renumber()
        replica = self._at(request)
        number = self.loads.number(replica)
        if number is not None:
            self._expect(number, keys, float(self.loads.backlog(now)[number]), now)
            if retention := self.loads.retention(replica):
                self._cached.add(1 << number, keys, now + retention)

    def _renumber(self) -> None:
        if self.loads.renumber():
            self._expected.clear()
            self._cached.clear()
            self._work = np.zeros(0)

    def _expect(self, number: int, keys: Sequence[bytes], seconds: float, now: float) -> None:
        if seconds < math.inf:
            self._expected.add(1 << number, keys, now + seconds + GRACE)

    def _at(self, request: str) -> str:
        """The replica that the request is at; empty if at none, or if it has ended."""
        known = self._requests.get(request)
        return known.replica if known else ""

    def answered(self, request: str) -> None:
        """A byte of the answer has arrived."""
        if (known := self._requests.get(request)) is not None:
            known.answered = True
            self.loads.computed(known.replica, request)

    def prefilled(self, request: str) -> None:
        """A prefill replica has computed the request, or has given up."""
        if replica := self._prefills.pop(request, ""):
            self.loads.ended(replica, request)

    def ended(self, request: str) -> None:
        """The request has been answered, has failed, or its client has gone."""
        self.prefilled(request)
        self.loads.ended(self._at(request), request)
        self._requests.pop(request, None)

    def failed(self, request: str, *, begun: bool = True) -> bool:
        """The request's replica failed it. True if it can go elsewhere; if not, it has ended. A
        replica that has not `begun` to serve did not get the request, which may still move once."""
        self.loads.ended(self._at(request), request)
        movable = self._leave(request, begun)
        if not movable:
            self.prefilled(request)
        return movable

    def _leave(self, request: str, begun: bool) -> bool:
        known = self._requests.get(request)
        if known is None or known.answered or (known.moved and begun):
            self._requests.pop(request, None)
            return False
        known.replica, known.moved = "", known.moved or begun
        return True

    def lost(self, replica: str) -> list[str]:
        """The replica has failed or hangs: it gets nothing until it reports again. Returns the
        requests that can go elsewhere, in the order in which they were sent; its others have
        ended."""
        self.loads.forget(replica)
        self._expected.clear()
        there = [request for request, known in self._requests.items() if known.replica == replica]
        return [request for request in there if self._leave(request, begun=True)]
