"""Pauses between tries that fail, and until when what failed is left alone."""

import math
import random

from xinference_xavier.limits import LEAST_PAUSE, MOST_PAUSE


class Backoff:
    """Each pause is twice as long as the one before."""

    def __init__(
        self, least: float = LEAST_PAUSE, most: float = MOST_PAUSE, *, jitter: bool = False
    ) -> None:
        """`least` and `most` are in seconds. `jitter` shortens each pause at random, to half of it
        at most, so that those who failed together do not try again together."""
        self._least = self._next = least
        self._most = most
        self._jitter = jitter

    def pause(self) -> float:
        """How many seconds to wait after one more failure."""
        pause, self._next = self._next, min(2 * self._next, self._most)
        return pause * random.uniform(0.5, 1.0) if self._jitter else pause

    def reset(self) -> None:
        """The next pause is the shortest again."""
        self._next = self._least


class Outage:
    """What fails is left alone until the time `until`, longer after each failure in a row. `reason`
    is the latest failure's. So many failures in a row are `tolerated`."""

    def __init__(self, least: float, most: float, *, tolerated: int = 0) -> None:
        self.reason = ""
        self.until = -math.inf
        self._left = self._tolerated = tolerated
        self._pause = 0.0
        self._backoff = Backoff(least, most)

    @property
    def is_on(self) -> bool:
        """It has failed, and has not worked since."""
        return self._left < 0

    def fail(self, now: float, reason: str) -> None:
        self.reason = reason
        self._left -= 1
        if self.is_on:
            self._pause = self._backoff.pause()
            self.until = now + self._pause

    def prolong(self, now: float) -> None:
        """A try says neither that it works nor that it does not."""
        self.until = now + self._pause

    def end(self) -> None:
        """It works."""
        self._left, self.until = self._tolerated, -math.inf
        self._backoff.reset()
