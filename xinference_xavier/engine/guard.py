"""Keeps errors of ours out of vLLM's scheduler, where they would end the engine.

A `guarded` method costs a hit or a store where it fails. Methods whose failure could load wrong
bytes are not guarded: a wrong token is worse than a dead engine.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from xinference_xavier.runtime.rate_limited_log import RateLimitedLog


class SchedulerErrors:
    """Belongs to the scheduler thread; any thread may read `count`."""

    def __init__(self, logger: logging.Logger) -> None:
        self.count = 0
        self._log = RateLimitedLog(logger)

    def caught(self, where: str) -> None:
        """Count and log the error that is being handled."""
        self.count += 1
        self._log.warn(
            where, "error in vLLM's scheduler: where=%s", where, level=logging.ERROR, exc_info=True
        )


_Method = TypeVar("_Method", bound=Callable[..., Any])


def guarded(otherwise: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """A method that returns `otherwise()` instead of raising. Its object has `errors`."""

    def guard(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(owner, *args, **kwargs)
            except Exception:
                owner.errors.caught(method.__name__)
                return otherwise()

        return cast(_Method, call)

    return guard


def nothing() -> None:
    """The result of a method that returns none."""
