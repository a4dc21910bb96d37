"""Warnings about conditions that can occur with every request, logged once each.

Threading: each `RateLimitedLog` belongs to one thread.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

REMINDER_INTERVAL = 600.0  # seconds
MAX_CONDITIONS = 1000


@dataclass
class _Logged:
    time: float
    repeated: int = 0


class RateLimitedLog:
    """Logs a condition when it first occurs, then once per `REMINDER_INTERVAL` with the number of
    repetitions. Keeps the newest `MAX_CONDITIONS`."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._logged: dict[str, _Logged] = {}  # by condition, the newest last

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
        self._logged.pop(condition, None)
        self._logged[condition] = _Logged(now)
        if len(self._logged) > MAX_CONDITIONS:
            del self._logged[next(iter(self._logged))]
