"""Warnings about conditions that can occur with every request, logged once each.

Threading: each `RateLimitedLog` belongs to one thread.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from cachetools import LRUCache

from xinference_xavier.limits import LIMIT

REMINDER_INTERVAL = 600.0  # seconds


@dataclass
class _Logged:
    time: float
    repeated: int = 0


class RateLimitedLog:
    """Logs a condition when it first occurs, then once per `REMINDER_INTERVAL` with the number of
    repetitions. Keeps the latest `LIMIT`."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._logged: LRUCache[str, _Logged] = LRUCache(LIMIT)

    def warn(
        self,
        condition: str,
        message: str,
        *args: object,
        level: int = logging.WARNING,
        exc_info: bool = False,
    ) -> None:
        """`message` and `args` as for a logger."""
        now = self._clock()
        last = self._logged.get(condition)
        if last is not None and now - last.time < REMINDER_INTERVAL:
            last.repeated += 1
            return
        if last is not None and last.repeated:
            message += " repeated=%d"
            args = (*args, last.repeated)
        self._logger.log(level, message, *args, exc_info=exc_info)
        self._logged[condition] = _Logged(now)
