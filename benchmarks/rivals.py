"""How others choose a replica, written from their documentation.

Each knows the index, what it has sent itself, and what its own kind reads from an engine: reports
every two seconds, or metrics. Who holds a chunk includes who will hold it soon, since a running
request was sent there. No one knows how long an answer will be.
"""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from benchmarks.replica_model import Gauges, State
from benchmarks.simulator import Cluster
from xinference_xavier.routing.forecast import Prompt


@dataclass(eq=False, slots=True)
class View:
    """What is known of a replica."""

    name: str
    bit: int
    gauges: Callable[[], Gauges]
    held: int = 0
    """Leading chunks of the prompt to be sent."""
    backlog: float = 0.0
    """Seconds of prefill still to do."""
    requests: int = 0
    """Sent there and not ended."""
    missing: int = 0
    """Tokens to compute for those without a first token, by the hits that were known when they were
    sent."""
    stored: int = 0
    """Tokens that were ever new to the replica."""
    active: Counter[bytes] = field(default_factory=Counter)
    """How many requests that have not ended have this chunk."""


class _Sent(NamedTuple):
    view: View
    prompt: Prompt
    missing: int


class _Rival(ABC):
    def __init__(self, cluster: Cluster, source: random.Random) -> None:
        self._cluster = cluster
        self._source = source
        self._now = 0.0
        self._sent: dict[str, _Sent] = {}
        self._computing: dict[str, None] = {}  # requests without a first token, in order
        peers = cluster.holdings.members
        self._views = {
            name: View(name, peers[name].bit, partial(cluster.scrape, name))
            for name in cluster.names
        }

    def choose(self, request: str, prompt: Prompt, now: float) -> str:
        self._pass(now)
        views = [*self._views.values()]
        holders = [self._cluster.holdings.full_set(key) for key in prompt.keys]
        for view in views:
            view.held = 0
            for key, held in zip(prompt.keys, holders, strict=True):
                if not held & view.bit and key not in view.active:
                    break
                view.held += 1
        costs = self.costs(views, prompt)
        least = min(costs)
        view = self._source.choice([views[n] for n, cost in enumerate(costs) if cost == least])
        missing = prompt.tokens - view.held * self._cluster.engine.chunk
        self._sent[request] = _Sent(view, prompt, missing)
        self._computing[request] = None
        view.requests += 1
        view.missing += missing
        view.stored += missing
        view.backlog += missing / self._cluster.engine.prefill
        view.active.update(prompt.keys)
        return view.name

    def answered(self, request: str, now: float) -> None:
        sent = self._sent[request]
        sent.view.missing -= sent.missing
        del self._computing[request]

    def ended(self, request: str, answer: int, now: float) -> None:
        view, prompt, _ = self._sent.pop(request)
        view.requests -= 1
        view.active.subtract(prompt.keys)
        for key in prompt.keys:
            if not view.active[key]:
                del view.active[key]

    def report(self, replica: str, state: State, now: float) -> None:
        """The replica's work, and that of requests which have not reached it."""
        self._pass(now)
        view = self._views[replica]
        coming = (self._sent[name] for name in self._computing if name not in state.known)
        missing = sum(sent.missing for sent in coming if sent.view is view)
        view.backlog = state.prefill_s + missing / self._cluster.engine.prefill

    def _pass(self, now: float) -> None:
        for view in self._views.values():
            view.backlog = max(0.0, view.backlog - (now - self._now))
        self._now = now

    @abstractmethod
    def costs(self, views: Sequence[View], prompt: Prompt) -> list[float]:
        """The least is chosen, at random among equals."""


class InTurn(_Rival):
    """xinference: one after another."""

    _last = -1

    def costs(self, views: Sequence[View], prompt: Prompt) -> list[float]:
        self._last = (self._last + 1) % len(views)
        return [float(number != self._last) for number in range(len(views))]


class FewestRequests(_Rival):
    """The usual rule of proxies."""

    def costs(self, views: Sequence[View], prompt: Prompt) -> list[float]:
        return [view.requests for view in views]


class ShortestBacklog(_Rival):
    """The seconds of prefill that a replica has still to do, and nothing of the prompt."""

    def costs(self, views: Sequence[View], prompt: Prompt) -> list[float]:
        return [view.backlog for view in views]


class Thresholds(_Rival):
    """SGLang's gateway, `cache_aware`: the fewest requests where their numbers differ much; else
    the longest match if it is long enough; else the replica that has stored least."""

    MATCH, APART, TIMES = 0.3, 64, 1.5

    def costs(self, views: Sequence[View], prompt: Prompt) -> list[float]:
        requests = [view.requests for view in views]
        least, most = min(requests), max(requests)
        if most - least > self.APART and most > self.TIMES * least:
            return [float(count) for count in requests]
        longest = max(view.held for view in views)
        if longest * self._cluster.engine.chunk > self.MATCH * prompt.tokens:
            return [-view.held for view in views]
        return [view.stored for view in views]


class Weights(_Rival):
    """llm-d's scorers: matched prefix, unused KV cache and short queue, 2 : 1 : 1, each up to 1.
    The latter two are from the engine's metrics."""

    def costs(self, views: Sequence[View], prompt: Prompt) -> list[float]:
        gauges = [view.gauges() for view in views]
        longest = max(each.waiting for each in gauges)
        spread = longest - min(each.waiting for each in gauges)
        return [
            -2 * view.held / max(1, len(prompt.keys))
            - (1 - each.used)
            - ((longest - each.waiting) / spread if spread else 1)
            for view, each in zip(views, gauges, strict=True)
        ]


class Blocks(_Rival):
    """NVIDIA Dynamo's cost: blocks to compute, waiting ones and the prompt's that miss, and blocks
    of requests that have not ended, the prompt's included. Shared blocks count once, and those of
    answers not, as is the default."""

    def costs(self, views: Sequence[View], prompt: Prompt) -> list[float]:
        chunk = self._cluster.engine.chunk
        return [
            (view.missing + prompt.tokens) / chunk
            - view.held
            + sum(key not in view.active for key in prompt.keys)
            + len(view.active)
            + view.requests
            for view in views
        ]
