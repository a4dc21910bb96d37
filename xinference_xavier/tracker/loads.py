"""The latest loads of all replicas, for routers. Pure; times are passed in, in monotonic seconds.

Every report gets the next version number, so that a router learns what is new since its last look.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import NamedTuple, TypeVar

from xinference_xavier.protocol.load import Load, ReplicaLoad, ScheduledPrompt

MAX_REMEMBERED = 2000
"""Prompts, and incarnations that have left."""
MAX_PROMPT_BYTES = 16 << 20
"""Of the remembered prompts' keys."""


_T = TypeVar("_T")


class News(NamedTuple):
    """See `Observation`."""

    version: int
    complete: bool
    loads: tuple[ReplicaLoad, ...]
    gone: tuple[str, ...]
    prompts: tuple[ScheduledPrompt, ...]


class _Reported(NamedTuple):
    version: int
    at: float
    load: Load


class Loads:
    def __init__(self) -> None:
        # Higher than any number of an earlier tracker, so that a router notices a new one.
        self.version = self._first = time.time_ns()
        self._latest: OrderedDict[str, _Reported] = OrderedDict()  # in the order of versions
        self._gone: deque[tuple[int, str]] = deque(maxlen=MAX_REMEMBERED)
        self._prompts: deque[tuple[int, ScheduledPrompt]] = deque()
        self._prompt_bytes = 0

    def report(
        self, incarnation: str, load: Load, prompts: Iterable[ScheduledPrompt], now: float
    ) -> None:
        self.version += 1
        self._latest[incarnation] = _Reported(self.version, now, load)
        self._latest.move_to_end(incarnation)
        for prompt in prompts:
            self._prompts.append((self.version, prompt))
            self._prompt_bytes += len(prompt.keys)
        while len(self._prompts) > MAX_REMEMBERED or self._prompt_bytes > MAX_PROMPT_BYTES:
            _, oldest = self._prompts.popleft()
            self._prompt_bytes -= len(oldest.keys)

    def forget(self, incarnation: str) -> None:
        if self._latest.pop(incarnation, None) is not None:
            self.version += 1
            self._gone.append((self.version, incarnation))

    def since(self, seen: int, name_of: Callable[[str], str], now: float) -> News:
        """What is newer than version `seen`; everything if what left since then is forgotten."""
        oldest = self._gone[0][0] if len(self._gone) == MAX_REMEMBERED else self._first
        complete = not oldest <= seen <= self.version
        seen = 0 if complete else seen
        reported = takewhile(lambda item: item[1].version > seen, reversed(self._latest.items()))
        loads = [
            ReplicaLoad(incarnation, name_of(incarnation), max(0.0, now - each.at), each.load)
            for incarnation, each in reported
        ]
        gone = [name for _, name in takewhile(lambda item: item[0] > seen, reversed(self._gone))]
        prompts = [
            each for _, each in takewhile(lambda item: item[0] > seen, reversed(self._prompts))
        ]
        return News(
            self.version,
            complete,
            tuple(reversed(loads)),
            () if complete else tuple(reversed(gone)),
            tuple(reversed(prompts)),
        )
