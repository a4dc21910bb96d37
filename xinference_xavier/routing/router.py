"""The router: what is known of the replicas, and what it has itself sent there.

Pure: no I/O; times are passed in, in monotonic seconds, and chance comes from `source`. Belongs to
one thread, which is also the one that writes `holdings`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from xinference_xavier.routing.choice import (
    Choice,
    Chunks,
    Forecast,
    Holdings,
    Prompt,
    choose,
    forecast,
    held_runs,
)
from xinference_xavier.routing.expected import GRACE, Expected
from xinference_xavier.routing.in_flight import InFlight
from xinference_xavier.routing.load import Loads, Report


class Router:
    """`lease` is the time in seconds after which a replica without a report gets nothing."""

    def __init__(
        self, holdings: Holdings, size: Chunks, source: random.Random, *, lease: float = 10.0
    ) -> None:
        self.loads = Loads(holdings, lease=lease)
        self.in_flight = InFlight()
        self._holdings = holdings
        self._size = size
        self._source = source
        self._expected = Expected()

    def report(self, replica: str, report: Report, *, limit: float = math.inf) -> None:
        self.loads.report(replica, report, limit=limit)

    def choose(self, prompt: Prompt, now: float, *, preferred: str = "") -> Choice | None:
        """The replica to send a request to; None if none accepts one now."""
        return choose(self.loads, self.forecast(prompt, now), self._source, preferred)

    def forecast(self, prompt: Prompt, now: float) -> Forecast:
        self._renumber()
        self._expected.expire(now)
        count = len(self.loads.names)
        runs, fetchable = held_runs(self._holdings, self._expected.sets, prompt.keys, count)
        return forecast(self.loads, prompt, runs, fetchable, self._size, now)

    def sent(self, request: str, choice: Choice, now: float) -> None:
        """The request goes to the chosen replica, which will soon hold all of its chunks."""
        prompt, terms = choice.forecast.prompt, choice.terms
        self.in_flight.sent(request, choice.replica)
        self.loads.sent(choice.replica, request, terms.fetch + terms.compute, prompt.tokens, now)
        missing = prompt.keys[int(choice.forecast.runs[choice.number]) :]
        self._expect(choice.number, missing, sum(terms), now)

    def scheduled(self, request: str, keys: Sequence[bytes], now: float) -> None:
        """A replica computes the request, and these are its keys."""
        self._renumber()
        number = self.loads.number(self.in_flight.at(request))
        if number is not None:
            self._expect(number, keys, float(self.loads.backlog(now)[number]), now)

    def _renumber(self) -> None:
        if self.loads.renumber():
            self._expected.clear()

    def _expect(self, number: int, keys: Sequence[bytes], seconds: float, now: float) -> None:
        if seconds < math.inf:
            self._expected.add(1 << number, keys, now + seconds + GRACE)

    def answered(self, request: str) -> None:
        """A byte of the answer has arrived."""
        self.loads.computed(self.in_flight.at(request), request)
        self.in_flight.answered(request)

    def ended(self, request: str) -> None:
        """The request has been answered, has failed, or its client has gone."""
        self.loads.ended(self.in_flight.ended(request), request)

    def failed(self, request: str) -> bool:
        """Its replica is of no use to it, so it is sent elsewhere if that is possible: see
        `InFlight.failed`."""
        self.loads.ended(self.in_flight.at(request), request)
        return self.in_flight.failed(request)

    def lost(self, replica: str) -> list[str]:
        """The replica has failed or hangs: it gets nothing until it reports again. Returns the
        requests that can go elsewhere."""
        self.loads.forget(replica)
        self._expected.clear()
        return self.in_flight.lost(replica)
