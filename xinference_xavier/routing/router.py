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
from xinference_xavier.routing.roles import with_prefill_replicas


class Router:
    """`lease` is the time in seconds after which a replica without a report gets nothing. For
    `threshold` see `with_prefill_replicas`."""

    def __init__(
        self,
        holdings: Holdings,
        size: Chunks,
        source: random.Random,
        *,
        lease: float = 10.0,
        threshold: int | None = None,
    ) -> None:
        self.loads = Loads(holdings, lease=lease)
        self.in_flight = InFlight()
        self._holdings = holdings
        self._size = size
        self._source = source
        self._expected = Expected()
        self._threshold = threshold
        self._prefills: dict[str, str] = {}  # the replicas that prefill, by request

    def report(self, replica: str, report: Report, *, limit: float = math.inf) -> None:
        self.loads.report(replica, report, limit=limit)

    def choose(
        self, prompt: Prompt, now: float, *, preferred: str = "", whole: bool = False
    ) -> Choice | None:
        """The replica to send a request to; None if none accepts one now. A `whole` request is
        prefilled where it is answered."""
        found = self.forecast(prompt, now)
        if not whole:
            found = with_prefill_replicas(self.loads, found, self._size, self._threshold)
        return choose(self.loads, found, self._source, preferred)

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
        seconds = terms.fetch + terms.compute
        if (prefill := choice.prefill) is not None:
            seconds = 0.0  # it keeps the prefill replica busy instead
            self._prefills[request] = prefill.replica
            self.loads.sent(prefill.replica, request, prefill.seconds, prompt.tokens, now)
        self.loads.sent(choice.replica, request, seconds, prompt.tokens, now)
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

    def prefilled(self, request: str) -> None:
        """A prefill replica has computed the request, or has given up."""
        if replica := self._prefills.pop(request, ""):
            self.loads.ended(replica, request)

    def ended(self, request: str) -> None:
        """The request has been answered, has failed, or its client has gone."""
        self.prefilled(request)
        self.loads.ended(self.in_flight.ended(request), request)

    def failed(self, request: str) -> bool:
        """Its replica is of no use to it, so it is sent elsewhere if that is possible: see
        `InFlight.failed`."""
        self.prefilled(request)
        self.loads.ended(self.in_flight.at(request), request)
        return self.in_flight.failed(request)

    def lost(self, replica: str) -> list[str]:
        """The replica has failed or hangs: it gets nothing until it reports again. Returns the
        requests that can go elsewhere."""
        self.loads.forget(replica)
        self._expected.clear()
        return self.in_flight.lost(replica)
