"""A loop in its own thread starts, stops, and cleans up whatever happens."""

from __future__ import annotations

import asyncio
import threading

import pytest

from xinference_xavier.runtime.aio import LoopThread, Rollback

PATIENCE = 30.0


class Recorded:
    """Work for a loop that records what happens to it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.fail: asyncio.Event
        self.loop: asyncio.AbstractEventLoop
        self.thread = ""
        self.undone = threading.Event()

    async def begin(self, scope: Rollback) -> list[asyncio.Task[None]]:
        scope.undo(self.undone.set)
        if self.error is not None:
            raise self.error
        self.loop, self.fail = asyncio.get_running_loop(), asyncio.Event()
        self.thread = threading.current_thread().name
        return [asyncio.ensure_future(self.work()), asyncio.ensure_future(self.rest())]

    async def work(self) -> None:
        await self.fail.wait()
        raise OSError("broken")

    async def rest(self) -> None:
        await asyncio.Event().wait()


def test_it_runs_in_its_own_thread_until_it_is_stopped() -> None:
    recorded = Recorded()
    loop = LoopThread("the-loop", recorded.begin)
    loop.start(PATIENCE)
    assert recorded.thread == "the-loop"
    assert not recorded.undone.is_set()
    loop.stop(PATIENCE)
    assert recorded.undone.is_set()
    loop.stop(PATIENCE)  # again: does nothing


def test_a_task_that_fails_ends_it() -> None:
    recorded = Recorded()
    loop = LoopThread("the-loop", recorded.begin)
    loop.start(PATIENCE)
    recorded.loop.call_soon_threadsafe(recorded.fail.set)
    assert recorded.undone.wait(PATIENCE)
    loop.stop(PATIENCE)


def test_an_error_at_the_start_is_raised_there_and_cleaned_up() -> None:
    recorded = Recorded(OSError("no port"))
    with pytest.raises(OSError, match="no port"):
        LoopThread("the-loop", recorded.begin).start(PATIENCE)
    assert recorded.undone.wait(PATIENCE)


def test_a_loop_that_was_never_started_is_stopped_at_once() -> None:
    LoopThread("the-loop", Recorded().begin).stop(PATIENCE)
