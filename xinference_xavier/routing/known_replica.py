"""What a router knows of a replica: its latest report, and the requests that it has there.

A report says what the replica had to do when it was made. Work takes its time: what was reported
shrinks as time passes, and what the router has sent since is added. So a burst between two reports
spreads over the replicas.

Pure: no I/O, no clock. Times are monotonic seconds of the router. Belongs to one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from xinference_xavier.stats.schema import KnownLoad

if TYPE_CHECKING:
    from xinference_xavier.routing.route import Route

LEASE = 10.0
"""Seconds after which a replica without a report gets nothing."""


class Rates(NamedTuple):
    """What a replica has measured of prompts, in seconds."""

    token_s: float
    """Seconds of a prompt's first token."""
    depth_s: float = 0.0
    """Seconds that a token takes longer for each token before it."""
    fetch_s: float = 0.0
    """Overhead of a fetch."""
    byte_s: float = 0.0
    """Seconds of a fetched byte."""


class Step(NamedTuple):
    """What a replica has measured of the steps in which it answers."""

    base_s: float
    request_s: float
    """Seconds that a step takes longer for each request in it."""

    def seconds(self, requests: float) -> float:
        return self.base_s + self.request_s * requests


UNKNOWN, NO_STEP = Rates(0.0), Step(0.0, 0.0)


class Report(NamedTuple):
    """A replica's load at the time `made`."""

    made: float
    prefill_tokens: int
    """Prompt tokens still to compute, of requests that wait or run."""
    prefill_s: float | None
    """The same by the replica's own forecast, fetches included; None if it has no rates yet."""
    requests: int
    """Waiting, running and decoding requests."""
    decoding: int = 0
    """The requests whose prompts have been computed."""
    known: Set[Route] = frozenset()
    """This router's requests that are counted here. Others have not reached the scheduler."""
    rates: Rates | None = None
    step: Step | None = None
    slots: float = math.inf
    """Requests that can run at once."""
    free_tokens: float = math.inf
    """Tokens for which there are free KV blocks."""
    kv_tokens: float = math.inf
    """Tokens for which there are KV blocks."""
    role: str = "any"
    """"any", "prefill" or "decode"."""
    retention_s: float = 0.0
    """How long the engine's own prefix cache keeps what it holds."""
    near: Sequence[str] = ()
    """The incarnations whose chunks it loads in place."""


@dataclass(eq=False, slots=True)
class Place:
    """A request at a replica, from when it is sent there until it ends or goes elsewhere."""

    route: Route
    replica: Replica
    at: float
    seconds: float
    """Time for which it keeps the replica busy before its first token."""
    tokens: int
    """Tokens for which it needs KV blocks."""
    answer: float = 0.0
    """Expected tokens of the answer."""
    computed: bool = False
    """Its first token has arrived."""


@dataclass(eq=False, slots=True)
class Replica:
    """`name` is its incarnation. The ranks of a data-parallel replica form a `group`: they are one
    process, which chooses among them and has one limit for all."""

    name: str
    uid: str
    """xinference's name for it."""
    group: str
    report: Report
    mark_key: str = ""
    """The key with which a request that is prefilled elsewhere is marked for it."""
    limit: float = math.inf
    """Requests that the group accepts."""
    draining: bool = False
    rates: Rates | None = None
    step: Step | None = None
    closed_until: float = 0.0
    bit: int = 0
    """Its bit in sets of replicas."""
    places: set[Place] = field(default_factory=set)
    answers: float = 0.0
    """Expected tokens of the answers of its places."""
    until: float = 0.0
    """When all known prefills will be done."""
    room: float = math.inf
    """Tokens for which there will be free KV blocks then."""
    work: float = 0.0
    """Seconds of work that were sent lately, as of `work_at`."""
    work_at: float = 0.0
    _others: int = 0  # requests of other routers; below 0, ours are not counted there yet

    def take(self, report: Report, typical: Rates) -> None:
        """The next report. `typical` are the rates of a replica that has none."""
        self.report = report
        self.rates, self.step = report.rates or self.rates, report.step or self.step
        self._others = report.requests - len(self.places)
        seconds = report.prefill_s
        if seconds is None:
            seconds = report.prefill_tokens * (self.rates or typical).token_s
        self.until = report.made + seconds
        self.room = report.free_tokens - report.prefill_tokens
        for place in sorted(self.places, key=lambda place: place.at):
            if not place.computed and place.route not in report.known:
                self._expect(place)

    def add(self, place: Place) -> None:
        self.places.add(place)
        self.answers += place.answer
        self._expect(place)

    def remove(self, place: Place) -> None:
        self.places.remove(place)
        self.answers = self.answers - place.answer if self.places else 0.0

    def _expect(self, place: Place) -> None:
        self.until = max(self.until, place.at) + place.seconds
        self.room -= place.tokens

    @property
    def others(self) -> int:
        """Requests of other routers."""
        return max(0, self._others)

    @property
    def requests(self) -> int:
        """Requests that wait or run there."""
        return max(0, len(self.places) + self._others)

    def backlog(self, now: float) -> float:
        """Seconds until all known prefills are done."""
        return max(0.0, self.until - now)

    def reports(self, now: float) -> bool:
        return self.report.made > now - LEASE

    def works(self, now: float) -> bool:
        """True if it reports, and is neither closed nor draining."""
        return self.reports(now) and self.closed_until <= now and not self.draining

    def known_load(self, now: float, accepts: bool) -> KnownLoad:
        return KnownLoad(self.backlog(now), self.requests, accepts, self.report.role)
