"""Sends the requests of each model to its replicas; they wait while all are at their limit.

A request is one `Route` from its arrival to the end of its answer. Whatever cannot be decided here
is left to the caller, who has a way of its own.

Threading: one event loop.
"""

import asyncio
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from enum import Enum, auto
from typing import Any, NoReturn

from cachetools import LRUCache

from xinference_xavier.index import Index
from xinference_xavier.limits import LIMIT
from xinference_xavier.peers import Peers
from xinference_xavier.protocol.load import (
    Load,
    Observation,
    ReplicaLoad,
    RequestReport,
    Serving,
    check_observation,
    reported_id,
)
from xinference_xavier.protocol.tracker import unpack, without_rank
from xinference_xavier.routing.forecast import Chunks
from xinference_xavier.routing.known_replica import LEASE, Rates, Replica, Report, Step
from xinference_xavier.routing.route import Choice, Queue, Route, State
from xinference_xavier.routing.router import Router
from xinference_xavier.routing.texts import Text, Texts
from xinference_xavier.stats.schema import KnownLoad, RoutingStats

PATIENCE = 30.0
"""Seconds that a request waits for a replica that accepts it."""
CLOSED = 30.0
"""Seconds in which a replica gets nothing after it was lost to a request. Its engine may report for
a while after the process is gone that requests go through."""
NOT_YET = 1.0
"""The same for one that does not serve, because it may have just started."""
MAX_NAMED = 200_000
"""Pieces of text of the requests that replicas may still report."""
_NAMED = 20  # pieces that a request without text counts for
NO_TEXT = Text(0, ())
AT_LIMIT = "Rate limit reached: all replicas are at their request limit; try again later"
"""Begins like a refusal of xinference's own, because its handlers know one by that."""


class QueueFullError(Exception):
    """All replicas are at their limit, and too many requests wait, or this one for too long."""

    def __init__(self, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(AT_LIMIT)


class Failure(Enum):
    """What is wrong with a request's replica."""

    LOST = auto()
    FULL = auto()
    NOT_SERVING = auto()  # it reports, but xinference does not admit it: not yet, or no longer


def _group(incarnation: str, replica: str) -> str:
    """What the ranks of a data-parallel replica have in common: process and request limit."""
    whole = without_rank(replica)
    return incarnation if whole == replica else whole


class ModelRouter:
    def __init__(self, source: random.Random | None = None) -> None:
        self.counts = RoutingStats()
        self.index = Index(Peers(""))
        self.index.members.set_compared(True)  # as replicas are that fetch
        self.version = 0
        """The version of the loads that were observed last."""
        self._clock = asyncio.get_running_loop().time
        self._source = source or random.Random()
        self._serving: Serving | None = None
        self._router: Router
        self._texts: Texts
        self._queue = Queue(PATIENCE)
        self._closed = False
        self._began = math.inf  # when it heard of its tracker
        # Requests by the ids that replicas know, also those that have ended: they may be reported.
        self._named: LRUCache[str, Route] = LRUCache(
            MAX_NAMED, lambda route: _NAMED + len(route.text.hashes)
        )
        self._sessions: LRUCache[str, str] = LRUCache(LIMIT)  # incarnations

    # -- what the tracker says ---------------------------------------------------------------

    def observe(self, observation: Observation) -> Iterator[None]:
        """Take in an observation, in short pieces. Raises ValueError for a malformed one."""
        good = check_observation(observation)
        if good.update is not None:
            yield from self.index.apply_in_pieces(good.update)
        now = self._clock()
        if not self.version:
            self._began = now
        if self._serving is None and good.loads:
            self._begin(good.loads[0].load.serving)
        if self._serving is not None:
            known = {each.incarnation for each in good.loads}
            gone = self._router.replicas.keys() - known if good.complete else good.gone
            for incarnation in [*gone]:
                self._lose(incarnation)
            for each in good.loads:
                self._report(each, now)
            for request in good.requests:
                self._learn(request, now)
        self.version = good.version
        self.admit()

    def _begin(self, serving: Serving) -> None:
        self._serving = serving
        size = Chunks(serving.chunk_tokens, serving.chunk_bytes)
        self._router = Router(self.index, size, self._source)
        self._texts = Texts(serving.chunk_tokens)
        self._queue.bound = serving.queue

    def _report(self, told: ReplicaLoad, now: float) -> None:
        incarnation, serving = told.incarnation, told.load.serving
        report = self._report_of(told.load, now - told.age)
        replica = self._router.replicas.get(incarnation)
        if replica is None:
            group = _group(incarnation, told.replica)
            replica = Replica(incarnation, told.replica, group, report, serving.mark_key)
        replica.draining = told.draining
        replica.limit = math.inf if serving.request_limit is None else serving.request_limit
        self._router.report(replica, report)

    def _report_of(self, load: Load, made: float) -> Report:
        sent = {self._named[name] for name in load.known if name in self._named}
        running = {route for route in sent if route.state is not State.ENDED}
        return Report(
            made,
            load.prefill_tokens,
            load.prefill_s,
            load.requests - len(sent - running),
            load.decoding,
            running,
            None if load.rates is None else Rates(*load.rates),
            None if load.step is None else Step(*load.step),
            _or_endless(load.serving.slots),
            _or_endless(load.free_tokens),
            _or_endless(load.kv_tokens),
            load.serving.role,
            load.retention_s,
            load.near,
        )

    def _learn(self, told: RequestReport, now: float) -> None:
        route = self._named.get(told.request)
        if route is None:
            return
        if told.answer is not None:
            self._router.answers.learn(route.session, route.limit, told.answer)
            return
        keys = unpack(told.keys)
        self._texts.learn(route.text, told.tokens, keys)
        self._router.scheduled(route, keys, now)

    def _lose(self, incarnation: str) -> None:
        replica = self._router.replicas.get(incarnation)
        for route in self._router.lose(incarnation):
            if route.lost is not None and not route.lost.done():
                route.lost.set_result(None)
        names = {each.uid for each in self._router.replicas.values()}
        if replica is not None and replica.uid not in names:
            self.counts.replicas.pop(replica.uid, None)

    # -- requests ------------------------------------------------------------------------------

    @property
    def routing(self) -> str:
        """The mode set by the operator or at launch; empty while neither is known."""
        launched = "" if self._serving is None else self._serving.routing
        return self.index.members.settings.routing or launched

    def open(
        self, text: Text = NO_TEXT, session: str = "", *, limit: int = 0, whole: bool = True
    ) -> Route | None:
        """A request has arrived. None where requests are not routed: routing is off, or no replica
        is known. Unless it is `whole`, another replica may prefill it.

        Whoever opens a route ends it: see `end`.
        """
        if self.routing == "off" or not self._accepts():
            self.counts.unrouted += 1
            return None
        route = Route(text, session, limit, whole, self._clock())
        self._router.routes.add(route)
        return route

    async def place(self, route: Route) -> bool:
        """Send the request to the best replica, as soon as one accepts it. False if it goes
        round-robin, because no replica works any more. Raises QueueFullError."""
        if self._queue.first is None and self._send(route):
            return True
        if not self._queue.join(route):
            self.refuse(route)
        try:
            route.admitted = asyncio.get_running_loop().create_future()
            self.admit()  # it may have come back as the first, or a replica works again
            async with asyncio.timeout(self._queue.patience - (self._clock() - route.arrived)):
                return await route.admitted
        except TimeoutError:
            self.refuse(route)
        finally:
            self._queue.leave(route)

    def _accepts(self) -> bool:
        """True if there is a replica that reports and works, even if it is at its limit."""
        if self._closed or self._serving is None:
            return False
        return self._router.works(self._clock())

    def close(self) -> None:
        """Another router takes its place. Requests are no longer routed here, those that wait
        included; those that run stay until they end."""
        self._closed = True
        self.admit()

    @property
    def has_requests(self) -> bool:
        return self._serving is not None and bool(self._router.routes)

    def follow(self, latest: "ModelRouter") -> None:
        """The router of the latest tracker knows what has become of our replicas, once all of them
        have had time to join there."""
        if self._clock() > latest._began + LEASE:
            known = () if latest._serving is None else latest._router.replicas
            for incarnation in self._router.replicas.keys() - known:
                self._lose(incarnation)

    async def move(self, route: Route, failure: Failure) -> bool:
        """The replica failed the request. True if the request was sent to another, as may happen
        once for a replica that is lost, and only before any of the answer has arrived. One that its
        replica did not take keeps its place in the queue. Raises QueueFullError."""
        now, replica = self._clock(), route.choice.forecast.replica
        self._router.leave(route)
        if failure is Failure.FULL:
            self._router.fill(replica.group)
        else:
            lost = failure is Failure.LOST
            self._router.close(replica.group, now + (CLOSED if lost else NOT_YET))
        if route.state is not State.WAITING:
            return False
        if failure is Failure.LOST:
            if route.moved:
                return False
            route.moved, route.arrived = True, now
        if now > route.arrived + self._queue.patience or not self._accepts():
            return False
        self.counts.moved += 1
        return await self.place(route)

    def named(self, route: Route, name: str) -> None:
        """The replica knows the request as `name`."""
        self._named[reported_id(name)] = route

    def answered(self, route: Route, streamed: bool) -> None:
        """The first of the answer has arrived, or all of it."""
        self._router.answered(route, self._clock())
        if streamed:
            choice = route.choice
            waited = route.answered - route.sent
            self.counts.answered(choice.reason, choice.terms.first_token, waited)

    def completed(self, route: Route) -> None:
        """The last of a streamed answer has arrived. One without any item has no time."""
        if route.state is not State.ANSWERED:
            return
        self.counts.decodes.observe(route.choice.terms.decode, self._clock() - route.answered)

    def prefilled(self, route: Route, failed: bool) -> None:
        """The prefill elsewhere has ended."""
        self.counts.failed_prefills += failed
        self._router.prefilled(route)

    def end(self, route: Route) -> None:
        """The request has been answered, has failed, or its client has gone. It leaves nothing."""
        for ends in route.at_end:
            ends()
        route.at_end.clear()
        self._router.end(route)
        self.admit()

    # -- choosing and waiting ------------------------------------------------------------------

    def _send(self, route: Route) -> bool:
        """Send the request to the best replica; False if none accepts a request now."""
        now = self._clock()
        whole = route.whole or route.elsewhere is not None
        choice = self._choose(route, now, whole)
        if choice is None:
            return False
        self._router.send(route, choice, now)
        route.lost = asyncio.get_running_loop().create_future()
        self.counts.sent(choice.reason, route.replica)
        if route.session:
            self._sessions[route.session] = choice.replica
        return True

    def _choose(self, route: Route, now: float, whole: bool) -> Choice | None:
        prompt = self._texts.prompt(route.text)
        if self.routing != "auto":
            prompt = prompt._replace(keys=())
        answer = self._router.answers.expected(route.session, route.limit)
        last = self._sessions.get(route.session, "")
        return self._router.choose(prompt._replace(answer=answer), now, preferred=last, whole=whole)

    def admit(self) -> None:
        """Send waiting requests as long as replicas accept them. If none works any more, they go
        round-robin."""
        works = self._queue.first is None or self._accepts()
        while (route := self._queue.first) is not None:
            try:
                if works and not self._send(route):
                    return
            except Exception as error:  # only of this request, not of the one that has ended
                self._queue.leave(route)
                _settle(route, error)
                continue
            waited = self._queue.admit(self._clock())
            if works:
                self.counts.waited += 1
                self.counts.waited_s += waited
            _settle(route, works)

    def refuse(self, route: Route) -> NoReturn:
        """No replica accepts the request. Raises QueueFullError."""
        self.counts.refused += 1
        route.retry_after = self._queue.retry_after(self._clock())
        raise QueueFullError(route.retry_after)

    # -- reports -------------------------------------------------------------------------------

    def loads(self) -> dict[str, KnownLoad]:
        """What the replicas have to do whose load is known now, by xinference's name."""
        return {} if self._serving is None else self._router.known(self._clock())

    def report(self) -> dict[str, Any]:
        """What `RoutingStats` is read from; JSON-able."""
        waiting, loads = len(self._queue), self.loads()
        return asdict(replace(self.counts, mode=self.routing, waiting=waiting, loads=loads))


def _or_endless(count: int | None) -> float:
    return math.inf if count is None else count


def _settle(route: Route, result: bool | Exception) -> None:
    """The request waits no longer, if anybody still waits for it."""
    if route.admitted is None or route.admitted.done():
        return
    if isinstance(result, Exception):
        route.admitted.set_exception(result)
    else:
        route.admitted.set_result(result)
