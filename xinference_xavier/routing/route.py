"""A request at the router, from its arrival to the end of its answer."""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

from xinference_xavier.protocol.load import Elsewhere, with_mark
from xinference_xavier.routing.forecast import Forecast, Prefill, Prompt, Terms
from xinference_xavier.routing.known_replica import Place
from xinference_xavier.routing.texts import Text


@dataclass(frozen=True)
class Choice:
    """A choice. `reason` says why its prefix did or did not matter: `local`, no replica
    holds more of it; `fetch`, the rest comes from a peer; `compute`, a peer holds more, but
    computing is faster; `backlog`, no replica holds any of it, or its keys are unknown; `prefill`,
    a prefill replica computes the rest of it."""

    prompt: Prompt
    forecast: Forecast
    reason: str

    @property
    def replica(self) -> str:
        return self.forecast.replica.name

    @property
    def terms(self) -> Terms:
        return self.forecast.terms

    @property
    def prefill(self) -> Prefill | None:
        """Set if a prefill replica computes the prompt."""
        return self.forecast.prefill


class State(Enum):
    WAITING = auto()
    """It is at no replica."""
    SENT = auto()
    ANSWERED = auto()
    """A byte of the answer has arrived: it cannot go elsewhere."""
    ENDED = auto()


@dataclass(eq=False)
class Route:
    """`session` and `limit`, the most tokens of the answer, are the client's; empty and 0 if it
    does not name them. A `whole` request is never divided: the replica that answers it prefills
    it, too."""

    text: Text
    session: str
    limit: int
    whole: bool
    arrived: float
    """When it arrived, which is its place in the queue."""
    state: State = State.WAITING
    place: Place | None = None
    """The place at the replica that answers."""
    prefill: Place | None = None
    """The place at the replica that computes the prompt for it."""
    choice: Choice = field(init=False)
    """The latest choice."""
    elsewhere: Elsewhere | None = None
    """The replica that prefills it, or has done so, for the one that answers."""
    prefills_at: str = ""
    """xinference's name for the replica that prefills it."""
    sent: float = 0.0
    answered: float = 0.0
    moved: bool = False
    """A replica was lost while it had the request: the next one is the last."""
    lost: asyncio.Future[None] | None = None
    """Done when the tracker has lost its replica. `ModelRouter` makes one for each replica that
    gets the request."""
    admitted: asyncio.Future[bool] | None = None
    """What it waits for in the queue."""
    retry_after: int = 0
    """Seconds after which the client may ask again, if the request was refused."""
    at_end: list[Callable[[], object]] = field(default_factory=list)
    """Calls that end what the request has begun."""

    @property
    def replica(self) -> str:
        """xinference's name for the replica that answers."""
        return self.choice.forecast.replica.uid

    def go(self, choice: Choice, now: float) -> None:
        """The request is sent to the chosen replica."""
        self.state, self.choice, self.sent = State.SENT, choice, now
        if (prefill := choice.prefill) is not None:
            self.elsewhere = Elsewhere(prefill.replica.name, prefill.queue, prefill.seconds)
            self.prefills_at = prefill.replica.uid

    def marked(self, name: str) -> str:
        """The request's `name` for the replica that answers it."""
        replica = self.choice.forecast.replica
        if self.elsewhere is None or self.elsewhere.replica == replica.name:
            return name
        return with_mark(name, self.elsewhere, replica.mark_key)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers: where the request went, and why, in seconds."""
        if self.retry_after:
            return [(b"retry-after", str(self.retry_after).encode())]
        terms = self.choice.terms._asdict().items()
        reason = "; ".join((self.choice.reason, ", ".join(f"{n}={v:.3f}" for n, v in terms)))
        return [(b"x-xavier-replica", self.replica.encode()), (b"x-xavier-route", reason.encode())]


_MEASURED = 20  # admissions that the estimate is made from


class Queue:
    """At most `bound` requests wait, each for at most `patience` seconds, in order of arrival."""

    def __init__(self, patience: float) -> None:
        self.bound = 0
        self.patience = patience
        self._routes: list[Route] = []
        self._admitted: deque[float] = deque(maxlen=_MEASURED)

    def __len__(self) -> int:
        return len(self._routes)

    @property
    def first(self) -> Route | None:
        """The one that is admitted next."""
        return self._routes[0] if self._routes else None

    def join(self, route: Route) -> bool:
        """False if the queue is full: the request is refused. One that comes back gets its place
        before those that arrived later, which do not keep it out."""
        last = not self._routes or route.arrived >= self._routes[-1].arrived
        if last and len(self._routes) >= self.bound:
            return False
        insort(self._routes, route, key=attrgetter("arrived"))
        return True

    def leave(self, route: Route) -> None:
        """Remove a request. Nothing happens if it does not wait."""
        if route in self._routes:
            self._routes.remove(route)

    def admit(self, now: float) -> float:
        """A replica takes the first request. Returns for how many seconds it waited."""
        route = self._routes.pop(0)
        self._admitted.append(now)
        return max(0.0, now - route.arrived)

    def retry_after(self, now: float) -> int:
        """Seconds after which a refused client may find a place: as long as those that wait now
        will take at the pace of the latest admissions. At least one, at most the patience."""
        longest = max(1, math.ceil(self.patience))
        if len(self._admitted) < 2:
            return longest
        pace = (now - self._admitted[0]) / len(self._admitted)
        return min(longest, max(1, math.ceil(pace * max(1, len(self._routes)))))
