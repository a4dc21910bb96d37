"""Sends the requests of each model to its replicas; they wait while all are at their limit.

A request belongs to one `Route` from its arrival to the end of its answer. Whatever cannot be
decided here is left to the caller, who has a way of its own. The model's tracker keeps its router
informed (`Routers`). No request waits for a tracker: a model's first requests are not routed.

Threading: one event loop.
"""

import asyncio
import itertools
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, auto
from typing import Any, NoReturn

from xinference_xavier.errors import NotFoundError
from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol.load import (
    Elsewhere,
    Load,
    Observation,
    Serving,
    check_observation,
    reported_id,
    with_mark,
)
from xinference_xavier.protocol.tracker import SHORT_KEY, unpack, without_rank
from xinference_xavier.routing.choice import Choice, Chunks
from xinference_xavier.routing.load import Rates, Report
from xinference_xavier.routing.router import Queue, Router
from xinference_xavier.routing.texts import Text, Texts
from xinference_xavier.runtime.aio import CANCEL_GRACE, within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.stats.schema import KnownLoad, RoutingStats

PATIENCE = 30.0
"""Seconds that a request waits for a replica that accepts it."""
CLOSED = 30.0
"""Seconds in which a replica gets nothing after it was lost to a request. Its engine may report for
a while after the process is gone that requests go through."""
NOT_YET = 1.0
"""The same for one that does not serve, because it may have just started."""
MAX_SESSIONS = 10_000
MAX_NAMES = 100_000
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


@dataclass(eq=False)
class Route:
    """Where a request goes, and why. `lost` is set when its replica is lost. A `whole` request is
    never divided: the replica that answers it prefills it, too."""

    request: str
    text: Text
    session: str
    whole: bool
    arrived: float
    """Its place in the queue."""
    choice: Choice = field(init=False)
    replica: str = field(init=False)
    """xinference's name for it."""
    elsewhere: Elsewhere | None = None
    """The replica that prefills it, for the one that answers."""
    mark_key: str = ""
    """The mark key of the replica that answers."""
    prefill_replica: str = ""
    """xinference's name for that."""
    prefill: asyncio.Future[None] | None = None
    at_end: list[Callable[[], object]] = field(default_factory=list)
    """What ends with the request."""
    retry_after: int = 0
    """Seconds after which the client may ask again, if the request was refused."""
    sent: float = 0.0
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def go(self, choice: Choice, replicas: Mapping[str, str], now: float) -> None:
        """Send the request to the choice. `replicas` are xinference's names by incarnation."""
        self.choice, self.replica = choice, replicas[choice.replica]
        if (prefill := choice.prefill) is not None:
            self.elsewhere, self.prefill_replica = Elsewhere(*prefill), replicas[prefill.replica]
        self.sent, self.lost = now, asyncio.Event()

    def marked(self, name: str) -> str:
        """The request's `name` for the replica that answers it."""
        if self.elsewhere is None or self.elsewhere.replica == self.choice.replica:
            return name
        return with_mark(name, self.elsewhere, self.mark_key)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers: where the request went, and why, in seconds."""
        if self.retry_after:
            return [(b"retry-after", str(self.retry_after).encode())]
        terms = self.choice.terms._asdict().items()
        reason = "; ".join((self.choice.reason, ", ".join(f"{n}={v:.3f}" for n, v in terms)))
        return [(b"x-xavier-replica", self.replica.encode()), (b"x-xavier-route", reason.encode())]


class _Latest(OrderedDict[str, str]):
    """The latest entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def put(self, name: str, value: str) -> None:
        self[name] = value
        self.move_to_end(name)
        if len(self) > self._most:
            self.popitem(last=False)


def _group(incarnation: str, replica: str) -> str:
    """What the ranks of a data-parallel replica have in common: process and request limit."""
    whole = without_rank(replica)
    return incarnation if whole == replica else whole


class ModelRouter:
    """`clock` returns monotonic seconds."""

    def __init__(
        self, source: random.Random | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts = RoutingStats()
        self.mirror = Mirror("")
        self.version = 0
        """The version of the loads that were observed last."""
        self._clock = clock
        self._source = source or random.Random()
        self._numbers = itertools.count()
        self._serving: Serving | None = None
        self._router: Router
        self._texts: Texts
        self._queue = Queue(0, PATIENCE)
        self._closed = False
        self._waiting: dict[str, tuple[Route, asyncio.Future[bool]]] = {}
        self._replicas: dict[str, str] = {}  # names, by incarnation
        self._mark_keys: dict[str, str] = {}  # by incarnation
        self._routes: dict[str, Route] = {}
        # Requests by the ids that replicas know, also those that have ended: they may be reported.
        self._names = _Latest(MAX_NAMES)
        self._sessions = _Latest(MAX_SESSIONS)  # incarnations

    # -- what the tracker says ---------------------------------------------------------------

    def observe(self, observation: Observation) -> Iterator[None]:
        """Take in an observation, in short pieces. Raises ValueError for a malformed one."""
        good = check_observation(observation)
        if good.update is not None:
            yield from self.mirror.apply_in_pieces(good.update)
        now = self._clock()
        known = {each.incarnation for each in good.loads}
        gone = self._replicas.keys() - known if good.complete else good.gone
        for incarnation in [*gone]:
            self._lost(incarnation)
        for incarnation, replica, age, load, draining in good.loads:
            if self._serving is None:
                self._begin(load.serving)
            self._replicas[incarnation] = replica
            self._mark_keys[incarnation] = load.serving.mark_key
            limit = load.serving.request_limit
            report = self._report(load, now - age)
            self._router.loads.report(
                incarnation,
                report,
                limit=math.inf if limit is None else limit,
                group=_group(incarnation, replica),
            )
            self._router.loads.drain(incarnation, draining)
        for prompt in good.prompts:
            request = self._names.get(prompt.request)
            if request is not None:
                keys = unpack(prompt.keys, SHORT_KEY)
                self._texts.scheduled(request, prompt.tokens, keys)
                self._router.scheduled(request, keys, now)
        self.version = good.version
        self.admit()

    def _begin(self, serving: Serving) -> None:
        self._serving = serving
        size = Chunks(serving.chunk_tokens, serving.chunk_bytes)
        self._router = Router(self.mirror, size, self._source, threshold=serving.prefill_threshold)
        self._texts = Texts(serving.chunk_tokens)
        self._queue.bound = serving.queue

    def _report(self, load: Load, made: float) -> Report:
        sent = {self._names[name] for name in load.known if name in self._names}
        running = sent & self._routes.keys()
        return Report(
            made,
            load.prefill_tokens,
            load.prefill_s,
            load.requests - len(sent - running),
            None if load.rates is None else Rates(*load.rates),
            math.inf if load.free_tokens is None else load.free_tokens,
            running,
            load.serving.role,
            load.retention_s,
        )

    def _lost(self, incarnation: str) -> None:
        self._replicas.pop(incarnation, None)
        self._mark_keys.pop(incarnation, None)
        if self._serving is None:
            return
        for request in self._router.lost(incarnation):
            self._routes[request].lost.set()

    # -- requests ------------------------------------------------------------------------------

    @property
    def routing(self) -> str:
        """The mode set by the operator or at launch; empty while neither is known."""
        launched = "" if self._serving is None else self._serving.routing
        return self.mirror.settings.routing or launched

    async def route(
        self, text: Text = NO_TEXT, session: str = "", *, whole: bool = True
    ) -> Route | None:
        """Choose a replica, if need be once one accepts the request. None where requests are not
        routed: routing is off, or no replica is known. Unless it is `whole`, another replica may
        prefill it.

        Call `end` when the request is over. Raises QueueFullError.
        """
        if self.routing == "off" or not self._accepts():
            self.counts.unrouted += 1
            return None
        route = Route(f"{next(self._numbers)}", text, session, whole, self._clock())
        try:
            placed = await self._place(route)
        except BaseException:  # the client may go at the moment at which it gets its turn
            self.end(route)
            raise
        return route if placed else None

    def _accepts(self) -> bool:
        """Whether there is a replica that reports and works, even if it is at its limit."""
        if self._closed or self._serving is None:
            return False
        return self._router.loads.works(self._clock())

    def close(self) -> None:
        """Another router takes its place. Requests are no longer routed here, those that wait
        included; those that run stay until they end."""
        self._closed = True
        self.admit()

    async def move(self, route: Route, failure: Failure = Failure.LOST) -> bool:
        """The replica failed the request. True if the request was sent to another, as may happen
        once, and only before any of the answer has arrived. One that its replica did not get keeps
        this chance and its place in the queue. Raises QueueFullError."""
        now, begun = self._clock(), failure is not Failure.NOT_SERVING
        group = _group(route.choice.replica, route.replica)
        movable = route.lost.is_set() or self._router.failed(route.request, begun=begun)
        if failure is Failure.FULL:
            self._router.loads.fill(group)
        else:
            self._router.loads.close(group, now + (CLOSED if begun else NOT_YET))
        if begun:
            route.arrived = now
        if not movable or now > route.arrived + self._queue.patience or not self._accepts():
            return False
        self.counts.moved += 1
        return await self._place(route)

    def named(self, route: Route, name: str) -> None:
        """The replica knows the request as `name`."""
        self._names.put(reported_id(name), route.request)

    def answered(self, route: Route, streamed: bool) -> None:
        """The first of the answer has arrived, or all of it."""
        self._router.answered(route.request)
        if streamed:
            choice = route.choice
            self.counts.answered(choice.reason, sum(choice.terms), self._clock() - route.sent)

    def prefilled(self, route: Route, failed: bool) -> None:
        """The prefill elsewhere has ended."""
        self.counts.failed_prefills += failed
        self._router.prefilled(route.request)

    def end(self, route: Route) -> None:
        """The request has been answered, has failed, or its client has gone."""
        for ends in route.at_end:
            ends()
        route.at_end.clear()
        self._router.ended(route.request)
        self._routes.pop(route.request, None)
        self.admit()

    # -- choosing and waiting ------------------------------------------------------------------

    async def _place(self, route: Route) -> bool:
        """False if the router is closed meanwhile. Raises QueueFullError."""
        if self._queue.first or not self._send(route):
            return await self._wait(route)
        return True

    def _send(self, route: Route) -> bool:
        """Send the request to the best replica; False if none accepts a request now."""
        now = self._clock()
        whole = route.whole or route.elsewhere is not None
        choice = self._choose(route.text, route.session, now, whole)
        if choice is None:
            return False
        route.go(choice, self._replicas, now)
        route.mark_key = self._mark_keys[choice.replica]
        self._router.sent(route.request, choice, now)
        self._texts.sent(route.request, route.text)
        self._routes[route.request] = route
        self.counts.sent(choice.reason, route.replica)
        if route.session:
            self._sessions.put(route.session, choice.replica)
        return True

    def _choose(self, text: Text, session: str, now: float, whole: bool) -> Choice | None:
        prompt = self._texts.prompt(text)
        if self.routing != "auto":
            prompt = prompt._replace(keys=())
        last = self._sessions.get(session, "")
        return self._router.choose(prompt, now, preferred=last, whole=whole)

    async def _wait(self, route: Route) -> bool:
        if not self._queue.join(route.request, route.arrived):
            self.refuse(route)
        left = self._queue.patience - (self._clock() - route.arrived)
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[route.request] = route, admitted
        if self._queue.first == route.request:  # it has come back
            self.admit()
        try:
            async with asyncio.timeout(left):
                return await admitted
        except TimeoutError:
            self.refuse(route)
        finally:
            del self._waiting[route.request]
            self._queue.leave(route.request)

    def admit(self) -> None:
        """Send waiting requests as long as replicas accept them. Where none works any more, they go
        in turn."""
        if self._queue.first and not self._accepts():
            for request, (_, admitted) in self._waiting.items():
                self._queue.leave(request)
                if not admitted.done():
                    admitted.set_result(False)
        while self._queue.first:
            route, admitted = self._waiting[self._queue.first]
            try:
                if not self._send(route):
                    return
            except Exception as error:  # only of this request, not of the one that has ended
                self._queue.leave(route.request)
                if not admitted.done():
                    admitted.set_exception(error)
                continue
            self.counts.waited += 1
            self.counts.waited_s += self._queue.admit(self._clock())
            if not admitted.done():
                admitted.set_result(True)

    def refuse(self, route: Route) -> NoReturn:
        """No replica accepts the request. Raises QueueFullError."""
        self.counts.refused += 1
        route.retry_after = self._queue.retry_after(self._clock())
        raise QueueFullError(route.retry_after)

    # -- reports -------------------------------------------------------------------------------

    def explain(self, text: Text) -> dict[str, dict[str, Any]]:
        """The forecast for a prompt, in seconds, by replica, of those that would answer a request;
        and which replica would prefill it, if that is another one."""
        if self._serving is None:
            return {}
        choice = self._choose(text, "", self._clock(), whole=False)
        return {} if choice is None else choice.explained(self._replicas)

    def loads(self) -> dict[str, KnownLoad]:
        """What the replicas have to do whose load is known now."""
        known = {} if self._serving is None else self._router.loads.known(self._clock())
        return {
            self._replicas[name]: each
            for name, each in known.items()
            if math.isfinite(each.backlog_s)
        }

    def report(self) -> dict[str, Any]:
        """What `RoutingStats` is read from; JSON-able."""
        waiting, loads = len(self._queue), self.loads()
        return asdict(replace(self.counts, mode=self.routing, waiting=waiting, loads=loads))


logger = logging.getLogger(__name__)

WATCH = 10.0
"""Seconds that an observation may wait for news."""
_DEADLINE = 5.0
_PIECE_PAUSE = 0.0005
_MIN_BACKOFF, _MAX_BACKOFF = 0.1, 2.0
_ASK_AGAIN = 2.0
"""Seconds after which a model that did not share is looked for again."""
_MAX_ABSENT = 1000

Find = Callable[[str], Awaitable[Any]]
"""Returns a reference to the tracker of a model. Raises NotFoundError for one that does not
share."""


class Routers:
    def __init__(self, find: Find) -> None:
        self._find = find
        self._log = RateLimitedLog(logger)
        self._routers: dict[str, ModelRouter] = {}
        self._looking: dict[str, asyncio.Future[None]] = {}
        self._absent: dict[str, float] = {}  # until when, by model uid

    def get(self, model_uid: str) -> ModelRouter | None:
        """None while the model is not known to share; it is looked for in the background."""
        router = self._routers.get(model_uid)
        if model_uid not in self._looking and time.monotonic() >= self._absent.get(model_uid, 0.0):
            self._looking[model_uid] = asyncio.ensure_future(self._run(model_uid))
        return router

    async def close(self) -> None:
        """End all observations, and leave the trackers time to hear of it."""
        for looking in self._looking.values():
            looking.cancel()
        await asyncio.sleep(CANCEL_GRACE)

    async def _run(self, model_uid: str) -> None:
        """Observe the model until it no longer shares."""
        try:
            await self._observe(model_uid)
        except NotFoundError:
            self._absent[model_uid] = time.monotonic() + _ASK_AGAIN
            if len(self._absent) > _MAX_ABSENT:
                del self._absent[next(iter(self._absent))]
        finally:
            del self._looking[model_uid]
            if (router := self._routers.pop(model_uid, None)) is not None:
                router.close()

    async def _observe(self, model_uid: str) -> None:
        router, backoff = ModelRouter(), _MIN_BACKOFF
        while True:
            try:
                tracker = await self._find(model_uid)
                while True:
                    if not await observe(tracker, router):
                        router.close()
                        router = ModelRouter()
                        continue
                    self._routers[model_uid] = router
                    backoff = _MIN_BACKOFF
            except NotFoundError:
                raise
            except Exception:
                router.counts.failures += 1
                router.admit()  # what is known of the replicas may have expired
                self._log.warn(model_uid, "no news for routing: model=%s", model_uid, exc_info=True)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(_MAX_BACKOFF, 2 * backoff)


async def observe(tracker: Any, router: ModelRouter) -> bool:
    """Let `router` know what is new. Waits for news. False if this is another tracker than before:
    the model may have been launched again, with other settings."""
    mirror = router.mirror
    call = tracker.observe(mirror.epoch, mirror.revision, router.version, WATCH)
    news = await within(WATCH + _DEADLINE, call)
    if news.complete and router.version:
        return False
    for _ in router.observe(news):
        await asyncio.sleep(_PIECE_PAUSE)
    return True
