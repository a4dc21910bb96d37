"""A scope left without a commit undoes all of it, in reverse, whatever happens meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from tests.logged import messages
from xinference_xavier.runtime import aio
from xinference_xavier.runtime.aio import Rollback


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


async def test_after_a_commit_nothing_is_undone() -> None:
    undone: list[str] = []
    async with Rollback() as scope:
        scope.undo(undone.append, "kept")
        scope.commit()
    assert undone == []


async def test_leaving_without_a_commit_undoes_everything() -> None:
    undone: list[str] = []
    async with Rollback() as scope:
        scope.undo(undone.append, "dropped")
    assert undone == ["dropped"]


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
    monkeypatch.setattr(aio, "UNDO_DEADLINE", 0.01)
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


async def test_a_cancellation_undoes_everything_and_a_second_one_does_not_stop_that() -> None:
    undone: list[str] = []
    working, undoing, proceed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_undo() -> None:
        undoing.set()
        await proceed.wait()
        undone.append("slow")

    async def work() -> None:
        async with Rollback() as scope:
            scope.undo(undone.append, "first")
            scope.undo(slow_undo)
            working.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await working.wait()
    task.cancel()
    await undoing.wait()
    task.cancel()
    # One turn of the loop delivers the second cancellation.
    await asyncio.sleep(0)
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == ["slow", "first"]


async def test_a_cancellation_during_the_undos_of_a_silent_scope_is_not_lost() -> None:
    undoing, proceed = asyncio.Event(), asyncio.Event()

    async def slow_undo() -> None:
        undoing.set()
        await proceed.wait()

    async def work() -> None:
        async with Rollback() as scope:
            scope.undo(slow_undo)

    task = asyncio.create_task(work())
    await undoing.wait()
    task.cancel()
    await asyncio.sleep(0)
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
