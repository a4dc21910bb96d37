"""The router: what it knows of the replicas, which requests are where, and where the next one goes.

A request goes where it costs least: what it takes to its last token, and what it costs the others
(see `forecast`). A replica's work for a prompt delays those that come behind: by
`share / (1 - share)` of it, if requests arrive at random and the replica works this share of the
time. If there is a queue, the work delays each prompt that arrives before the queue is empty. So
work weighs more than the prompt's own waiting (`work_weight`). Without that, prompts leave the
replica that holds their prefix for a short wait elsewhere, copies fill the pools, and under load
all wait longer. This work is at the replicas' mean rates: weighed with what a replica seems to be
faster, prompts would queue at it for what is mostly an error of measurement.

A prompt of which no replica holds much may begin a session, whose next rounds follow it. The
backlog of the moment is too short a view then: such prompts go where the least work went lately.

The router expects the chunks of the prompts that it sent (`Expected`), because the index learns of
a chunk only when it has been computed. A replica that loads in place what a neighbour holds is as
good as one that holds it itself: a common prefix draws nobody to one of a host's replicas. And the
router knows for how long vLLM's own prefix cache keeps chunks: on many cards that is larger than
the pool, of which alone the index knows.

If a replica is lost before the first byte of an answer, the request goes to another one, but only
once, as a request that brings its replica down must not bring down all.

Pure: no I/O; times are passed in, in monotonic seconds, and chance comes from `source`. Belongs to
one thread, which is also the one that writes the index.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from operator import or_
from statistics import fmean

from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.routing.expected import Expected
from xinference_xavier.routing.forecast import (
    Chunks,
    Forecast,
    Forecaster,
    Prompt,
    Typical,
    leading,
    offloaded,
)
from xinference_xavier.routing.known_replica import (
    NO_STEP,
    UNKNOWN,
    Place,
    Rates,
    Replica,
    Report,
    Step,
)
from xinference_xavier.routing.lengths import Answers
from xinference_xavier.routing.route import Choice, Route, State
from xinference_xavier.stats.schema import KnownLoad

TIE = 0.01
"""Costs are equal that differ by less than this share of the time to the first token, or by
`_TIE_S`."""
_TIE_S = 0.001  # seconds
MOST_BUSY = 0.95  # beyond it the estimate says little
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


def work_weight(busy: float, waiting: float) -> float:
    """How much work weighs, where replicas are `busy` for this share of the time. Twice what theory
    says of one prompt: its next round follows it to where it was sent. At least the number of
    prompts `waiting` at a replica: about as many arrive before its queue is empty."""
    return max(2.0 / (1.0 - min(busy, MOST_BUSY)), waiting)


class Router:
    """Chooses replicas, and knows which request is where."""

    def __init__(self, index: Index[Peers], size: Chunks, source: random.Random) -> None:
        self.replicas: dict[str, Replica] = {}
        """The replicas that report, by incarnation."""
        self.routes = set[Route]()
        """The requests that have not ended."""
        self.answers = Answers()
        self._index = index
        self._size = size
        self._source = source
        self._expected = Expected()
        self._cached = Expected(MAX_CACHED)
        self._version = -1
        self._busy = 0.0  # share of the time in which a replica works
        self._prompt_s = 0.0  # mean time for which a prompt keeps a replica busy

    # -- replicas ------------------------------------------------------------------------------

    def report(self, replica: Replica, report: Report) -> None:
        """Take in the latest report of a replica, which may be a new one. A late report is
        ignored."""
        self.replicas.setdefault(replica.name, replica)
        if report.made >= replica.report.made:
            replica.take(report, self._typical().rates)

    def lose(self, name: str) -> list[Route]:
        """The replica has failed or left: it gets nothing until it reports again. Returns the
        requests that it was to answer, in the order in which they were sent."""
        if (replica := self.replicas.pop(name, None)) is None:
            return []
        self._expected.clear()  # another replica may get its bit
        self._cached.clear()
        lost = []
        for place in sorted(replica.places, key=lambda place: place.at):
            if place is place.route.prefill:
                self.prefilled(place.route)
                continue
            self.leave(place.route)
            lost.append(place.route)
        return lost

    def close(self, group: str, until: float) -> None:
        """The replica gets nothing, whatever it reports: it failed a request."""
        for rank in self._ranks(group):
            rank.closed_until = until

    def fill(self, group: str) -> None:
        """The replica accepts nothing now: it has requests that it has not reported yet."""
        requests = self._requests()[group]
        for rank in self._ranks(group):
            rank.limit = requests

    def _ranks(self, group: str) -> list[Replica]:
        return [each for each in self.replicas.values() if each.group == group]

    def _requests(self) -> Counter[str]:
        """Waiting and running requests, by group."""
        ours, others = Counter[str](), Counter[str]()
        for each in self.replicas.values():
            ours[each.group] += len(each.places)
            others[each.group] += each.requests - len(each.places)
        return ours + +others

    def works(self, now: float) -> bool:
        """True if any replica reports, and is neither closed nor draining."""
        return any(each.works(now) for each in self.replicas.values())

    def known(self, now: float) -> dict[str, KnownLoad]:
        """The loads of the replicas that report, by xinference's name."""
        requests = self._requests()
        return {
            each.uid: each.known_load(now, requests[each.group] < each.limit)
            for each in self.replicas.values()
            if each.reports(now)
        }

    def _typical(self) -> Typical:
        rates = [each.rates for each in self.replicas.values() if each.rates]
        steps = [each.step for each in self.replicas.values() if each.step]
        return Typical(
            Rates(*map(fmean, zip(*rates, strict=True))) if rates else UNKNOWN,
            Step(*map(fmean, zip(*steps, strict=True))) if steps else NO_STEP,
        )

    # -- the choice ----------------------------------------------------------------------------

    def choose(
        self, prompt: Prompt, now: float, *, preferred: str = "", whole: bool = False
    ) -> Choice | None:
        """The replica to send a request to; None if none accepts one now. A `whole` request is
        prefilled where it is answered.

        A prefill replica is chosen only if no other one accepts a request. Among equals,
        `preferred` is chosen, else one with the fewest requests, at random.
        """
        forecaster = self._forecaster(prompt, now)
        found = self.forecasts(forecaster)
        if not whole:
            found = offloaded(found, forecaster)
        found = [each for each in found if each.replica.report.role != "prefill"] or found
        if not found:
            return None
        held = max(each.run for each in found) * self._size.tokens
        is_new = not preferred and held < _NEW * prompt.tokens
        waiting = self._waiting(found, now)
        weight = work_weight(self._busy, waiting)
        spread = max(_SPREAD, _SPREAD_BY_WAITING * waiting) if is_new else 0.0
        costs = [
            (each.cost(weight) + spread * self._lately(each.replica, now), each) for each in found
        ]
        least, best = min(costs, key=lambda cost: cost[0])
        most = least + max(TIE * best.terms.first_token, _TIE_S)
        equals = [each for cost, each in costs if cost <= most]
        chosen = next((each for each in equals if each.replica.name == preferred), None)
        if chosen is None:
            fewest = min(each.replica.requests for each in equals)
            chosen = self._source.choice(
                [each for each in equals if each.replica.requests == fewest]
            )
        longest = max(forecaster.fetchable, *(each.run for each in found))
        return Choice(prompt, chosen, _reason(chosen, longest))

    def forecasts(self, forecaster: Forecaster) -> list[Forecast]:
        """The request at each replica that accepts it now."""
        self._renumber()
        now, keys = forecaster.now, forecaster.prompt.keys
        self._expected.expire(now)
        self._cached.expire(now)
        requests = self._requests()
        found = [
            each
            for each in self.replicas.values()
            if each.works(now) and requests[each.group] < each.limit
        ]
        among = sum(each.bit for each in found)
        expected, cached = self._expected.sets, self._cached.sets
        full_set, within_reach = self._index.full_set, self._within_reach()
        held = (
            within_reach(full_set(key) | expected.get(key, 0)) | cached.get(key, 0) for key in keys
        )
        runs = leading(held, among)
        cached_runs = leading((cached.get(key, 0) for key in keys), among)
        return [forecaster.at(each, runs[each.bit], cached_runs[each.bit]) for each in found]

    def _within_reach(self) -> Callable[[int], int]:
        """Turns a set of replicas that hold a chunk into that of those that need not fetch it."""
        bits = {each.name: each.bit for each in self.replicas.values()}
        near = [
            (each.bit, sum(bits.get(name, 0) for name in each.report.near))
            for each in self.replicas.values()
            if each.report.near
        ]

        @cache
        def within_reach(holders: int) -> int:
            return reduce(or_, (bit for bit, lenders in near if lenders & holders), holders)

        return within_reach

    def _forecaster(self, prompt: Prompt, now: float) -> Forecaster:
        fetchable, _ = self._index.usable_run(prompt.keys, -1)
        return Forecaster(prompt, fetchable, self._size, self._typical(), now)

    def _waiting(self, found: Iterable[Forecast], now: float) -> float:
        """The number of prompts that a replica has still to compute, on average, where queues
        stand; otherwise 0, since one long prompt looks like many."""
        if self._busy < MOST_BUSY or not self._prompt_s:
            return 0.0
        return fmean(each.replica.backlog(now) for each in found) / self._prompt_s

    def _lately(self, replica: Replica, now: float) -> float:
        """The seconds of work that were sent to it lately."""
        return replica.work * math.exp((replica.work_at - now) / _LATELY)

    # -- requests ------------------------------------------------------------------------------

    def send(self, route: Route, choice: Choice, now: float) -> None:
        """The request goes to the chosen replica, which will soon hold all of its chunks."""
        assert route.state is State.WAITING, "it is at a replica"
        found, prompt, prefill = choice.forecast, choice.prompt, choice.prefill
        self._learn(found, now)
        route.go(choice, now)
        seconds, worker = found.terms.fetch + found.terms.compute, found.replica
        if prefill is not None:
            seconds, worker = 0.0, prefill.replica  # it keeps that one busy instead
            route.prefill = Place(route, worker, now, prefill.seconds, prompt.tokens)
            worker.add(route.prefill)
        route.place = Place(route, found.replica, now, seconds, found.tokens, prompt.answer)
        found.replica.add(route.place)
        worker.work, worker.work_at = self._lately(worker, now) + found.work, now
        self._expect(found.replica, prompt.keys[found.run :], found.terms.first_token, now)

    def _learn(self, found: Forecast, now: float) -> None:
        works = fmean(each.backlog(now) > 0.0 for each in self.replicas.values() if each.works(now))
        self._busy += _LATEST * (works - self._busy)
        self._prompt_s += (_LATEST if self._prompt_s else 1.0) * (found.work - self._prompt_s)

    def answered(self, route: Route, now: float) -> None:
        """A byte of the answer has arrived."""
        route.state, route.answered = State.ANSWERED, now
        if route.place is not None:
            route.place.computed = True

    def prefilled(self, route: Route) -> None:
        """A prefill replica has computed the request, or has given up."""
        if route.prefill is not None:
            route.prefill.replica.remove(route.prefill)
            route.prefill = None

    def leave(self, route: Route) -> None:
        """The request is no longer at its replica. It waits for another one unless it is being
        answered."""
        if route.place is not None:
            route.place.replica.remove(route.place)
            route.place = None
        if route.state is State.SENT:
            route.state = State.WAITING

    def end(self, route: Route) -> None:
        """The request has been answered, has failed, or its client has gone."""
        self.prefilled(route)
        self.leave(route)
        route.state = State.ENDED
        self.routes.discard(route)

    def scheduled(self, route: Route, keys: Sequence[bytes], now: float) -> None:
        """A replica computes the request, and these are its keys."""
        self._renumber()
        if route.place is not None:
            replica = route.place.replica
            self._expect(replica, keys, replica.backlog(now), now)
            if retention := replica.report.retention_s:
                self._cached.add(replica.bit, keys, now + retention)

    def _expect(self, replica: Replica, keys: Sequence[bytes], seconds: float, now: float) -> None:
        self._expected.add(replica.bit, keys, now + seconds + GRACE)

    def _renumber(self) -> None:
        """Follow the index's numbers. A replica that is not in the index gets one behind them."""
        peers = self._index.members
        if peers.version == self._version:
            return
        self._version = peers.version
        free, moved = 1 << peers.size, False
        for replica in self.replicas.values():
            before, replica.bit = replica.bit, peers.set_of((replica.name,))
            if not replica.bit:
                replica.bit, free = free, free << 1
            moved |= before not in (0, replica.bit)
        if moved:
            self._expected.clear()
            self._cached.clear()


def _reason(found: Forecast, longest: int) -> str:
    if found.prefill is not None:
        return "prefill"
    if not longest:
        return "backlog"
    if found.terms.fetch:
        return "fetch"
    return "local" if found.run == longest else "compute"
