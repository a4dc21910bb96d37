"""Calls end in time; what was begun is undone or cleaned up, whatever happens meanwhile."""

import asyncio
import gc
import threading

import pytest

from tests.logged import messages
from xinference_xavier.runtime import aio
from xinference_xavier.runtime.aio import LoopThread, Rollback, finishing, retrieve, spawn, within


class Stubborn:
    """A call that, when cancelled, first waits for a peer that never answers."""

    def __init__(self) -> None:
        self.asking = asyncio.Event()
        self.ended = asyncio.Event()

    async def call(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.asking.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()


async def test_the_answer_or_the_error_is_passed_on() -> None:
    async def fail() -> None:
        raise LookupError("nothing here")

    assert await within(60.0, asyncio.sleep(0, "answer")) == "answer"
    with pytest.raises(LookupError, match="nothing here"):
        await within(60.0, fail())


async def test_the_deadline_does_not_wait_for_a_call_that_resists_cancellation() -> None:
    peer = Stubborn()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        await within(0.01, peer.call())
    assert not peer.ended.is_set()
    await peer.ended.wait()
    assert peer.asking.is_set()


async def test_cancelling_the_caller_does_not_wait_either() -> None:
    peer = Stubborn()
    caller = asyncio.create_task(within(60.0, peer.call()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not peer.ended.is_set()
    await peer.ended.wait()


async def test_a_task_is_not_collected_while_it_waits() -> None:
    gate, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await gate.wait()
        done.set()

    spawn(work())
    await asyncio.sleep(0)
    gc.collect()
    gate.set()
    await done.wait()


async def test_work_goes_on_to_its_end_when_its_caller_is_cancelled() -> None:
    gate, done = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        await gate.wait()
        done.set()
        return "answer"

    caller = asyncio.create_task(finishing(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    gate.set()
    await done.wait()
    assert await finishing(work()) == "answer"


async def test_an_error_that_nobody_retrieves_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise LookupError

    for task in (spawn(fail()), spawn(asyncio.Event().wait())):
        task.add_done_callback(retrieve)
        task.cancel()
        await asyncio.wait({task})
        del task
    failed = spawn(fail())
    failed.add_done_callback(retrieve)
    await asyncio.wait({failed})
    del failed
    gc.collect()
    assert "LookupError" not in caplog.text


class FirstError(Exception):
    pass


async def fail_inside(scope: Rollback) -> None:
    async with scope:
        raise FirstError


async def test_undos_run_in_reverse_and_the_error_propagates(
    caplog: pytest.LogCaptureFixture,
) -> None:
    undone: list[str] = []

    async def undo(what: str) -> None:
        await asyncio.sleep(0)
        undone.append(what)

    scope = Rollback()
    scope.undo(undone.append, "first")
    scope.undo(undo, "second")
    scope.undo(undone.append, "third")
    with pytest.raises(FirstError):
        await fail_inside(scope)
    assert undone == ["third", "second", "first"]
    assert messages(caplog) == []


@pytest.mark.parametrize(("commits", "expected"), [(True, []), (False, ["all"])])
async def test_without_a_commit_everything_is_undone_even_without_an_error(
    commits: bool, expected: list[str]
) -> None:
    undone: list[str] = []
    async with Rollback() as scope:
        scope.undo(undone.append, "all")
        if commits:
            scope.commit()
    assert undone == expected


async def test_a_failing_undo_neither_stops_the_others_nor_hides_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    undone: list[str] = []

    def fail() -> None:
        raise RuntimeError("undo")

    async def cancel() -> None:
        raise asyncio.CancelledError

    scope = Rollback()
    scope.undo(undone.append, "reached")
    scope.undo(fail)
    scope.undo(cancel)
    with pytest.raises(FirstError):
        await fail_inside(scope)
    assert undone == ["reached"]
    assert caplog.text.count("undo failed") == 2


async def test_a_hanging_undo_ends_at_its_own_deadline_even_if_it_resists(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aio, "CALL_DEADLINE", 0.01)
    undone: list[str] = []
    released = asyncio.Event()

    async def hang() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    scope = Rollback()
    scope.undo(undone.append, "reached")
    scope.undo(hang)
    with pytest.raises(FirstError):
        await fail_inside(scope)
    released.set()
    assert undone == ["reached"]
    assert caplog.text.count("undo failed") == 1


@pytest.mark.parametrize("works", [True, False], ids=["at work", "at its end"])
async def test_a_cancellation_undoes_everything_and_one_during_the_undos_is_not_lost(
    works: bool,
) -> None:
    undone: list[str] = []
    begun, undoing, proceed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_undo() -> None:
        undoing.set()
        await proceed.wait()
        undone.append("slow")

    async def work() -> None:
        async with Rollback() as scope:
            scope.undo(undone.append, "first")
            scope.undo(slow_undo)
            begun.set()
            if works:
                await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await begun.wait()
    if works:
        task.cancel()
    await undoing.wait()
    task.cancel()
    # One turn of the loop delivers the cancellation.
    await asyncio.sleep(0)
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == ["slow", "first"]


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
