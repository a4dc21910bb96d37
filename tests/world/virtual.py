"""An event loop whose time passes when nothing is left to do."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.DefaultSelector):
    now = 1000.0
    threads = 0
    """Calls that run in other threads."""

    def select(self, timeout: float | None = None) -> Any:
        """Other threads are waited for; timers are not."""
        waits = timeout is None or (timeout > 0 and self.threads)
        found = super().select(None if waits else 0)
        if not found and timeout:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Any, *args: Any
    ) -> Any:
        self._virtual.threads += 1
        running = super().run_in_executor(executor, function, *args)
        running.add_done_callback(self._thread_ended)
        return running

    def _thread_ended(self, _: object) -> None:
        self._virtual.threads -= 1


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """The result of `main`, in a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
