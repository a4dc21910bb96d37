"""Warnings about conditions that can occur with every request, logged once each.

Threading: each `RateLimitedLog` belongs to one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

REMINDER_INTERVAL = 600.0
"""Seconds."""
MAX_CONDITIONS = 1000


class RateLimitedLog:
    """Logs a condition when it first occurs, then once per `REMINDER_INTERVAL` with the number of
    repetitions. Keeps the newest `MAX_CONDITIONS`."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._logged: dict[str, float] = {}  # when
        self._repeated: dict[str, int] = {}  # how often since

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
        if last is not None and now - last < REMINDER_INTERVAL:
            self._repeated[condition] = self._repeated.get(condition, 0) + 1
            return
        repeated = self._repeated.pop(condition, 0)
        if repeated:
            message += " repeated=%d"
            args = (*args, repeated)
        self._logger.log(level, message, *args, exc_info=exc_info)
        self._logged.pop(condition, None)
        self._logged[condition] = now
        if len(self._logged) > MAX_CONDITIONS:
            oldest = next(iter(self._logged))
            del self._logged[oldest]
            self._repeated.pop(oldest, None)
