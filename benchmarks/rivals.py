"""How others choose a replica, written from their documentation.

All see what our router sees, so that only the choice differs: its forecast, its count of requests
under way, and which chunks each replica holds or will hold soon.
"""

import random
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator import ENGINE
from benchmarks.traces import CHUNK
from xinference_xavier.routing.choice import Choice, Forecast, Prompt
from xinference_xavier.routing.router import Router

Scores = NDArray[np.float64]


class EarliestFinish:
    """Ours."""

    def __init__(self, router: Router, source: random.Random) -> None:
        self._router = router

    def choose(self, request: str, prompt: Prompt, now: float) -> Choice:
        choice = self._router.choose(prompt, now)
        if choice is None:
            raise RuntimeError("no replica accepts a request")
        return choice

    def answered(self, request: str) -> None:
        pass


class _Rival(ABC):
    def __init__(self, router: Router, source: random.Random) -> None:
        self._router = router
        self._source = source
        self._sent: dict[str, tuple[int, int, int]] = {}
        self.missing = np.zeros(0)
        """Tokens that each replica has to compute, by the hits that were known when they were sent;
        they count until the first token."""
        self.tokens = np.zeros(0)
        """Tokens of all prompts under way."""
        self.stored = np.zeros(0)
        """Tokens that were ever new to the replica."""

    def choose(self, request: str, prompt: Prompt, now: float) -> Choice:
        found = self._router.forecast(prompt, now)
        loads = self._router.loads
        if not len(self.missing):
            self.missing, self.tokens, self.stored = np.zeros((3, len(loads.names)))
        costs = self.costs(found)
        number = int(self._source.choice(np.flatnonzero(costs == costs.min())))
        missing = prompt.tokens - int(found.runs[number]) * CHUNK
        self._sent[request] = number, missing, prompt.tokens
        self.missing[number] += missing
        self.tokens[number] += prompt.tokens
        self.stored[number] += missing
        return Choice(loads.names[number], number, "", found, loads.names)

    def answered(self, request: str) -> None:
        number, missing, tokens = self._sent.pop(request)
        self.missing[number] -= missing
        self.tokens[number] -= tokens

    @abstractmethod
    def costs(self, found: Forecast) -> Scores:
        """Costs by number; the least is chosen, at random among equals."""


class InTurn(_Rival):
    """xinference: one after another."""

    _last = -1

    def costs(self, found: Forecast) -> Scores:
        count = len(found.runs)
        self._last = (self._last + 1) % count
        costs: Scores = (np.arange(count) != self._last).astype(np.float64)
        return costs


class ShortestBacklog(_Rival):
    """Our forecast of the seconds until a replica is idle, and nothing of the prompt."""

    def costs(self, found: Forecast) -> Scores:
        return found.backlog


class Thresholds(_Rival):
    """SGLang's gateway, `cache_aware`: the fewest requests where their numbers differ much; else
    the longest match if it is long enough; else the replica that has stored least."""

    MATCH, APART, TIMES = 0.3, 64, 1.5

    def costs(self, found: Forecast) -> Scores:
        running = self._router.loads.running
        least, most = running.min(), running.max()
        if most - least > self.APART and most > self.TIMES * least:
            return running.astype(np.float64)
        if found.runs.max() * CHUNK > self.MATCH * found.prompt.tokens:
            return -found.runs.astype(np.float64)
        return self.stored


class Weights(_Rival):
    """llm-d's scorers: matched prefix, free KV cache and short queue, 2 : 1 : 1, each up to 1."""

    def costs(self, found: Forecast) -> Scores:
        queue = self._router.loads.running
        spread = queue.max() - queue.min()
        shortness = (queue.max() - queue) / spread if spread else np.ones(len(queue))
        matched = found.runs / max(1, len(found.prompt.keys))
        free = 1 - np.minimum(1, self.tokens / CHUNK / ENGINE.slots)
        scores: Scores = 2 * matched + free + shortness
        return -scores


class Tokens(_Rival):
    """NVIDIA Dynamo's cost: tokens to compute, waiting ones and the prompt's that miss; its other
    term, blocks that decode, is 0 here."""

    def costs(self, found: Forecast) -> Scores:
        costs: Scores = self.missing + found.prompt.tokens - found.runs * CHUNK
        return costs
