"""Pauses between tries that fail."""

import random


class Backoff:
    """Each pause is twice as long as the one before."""

    def __init__(self, least: float, most: float, *, jitter: bool = False) -> None:
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
