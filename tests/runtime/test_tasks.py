"""Background tasks run to their end without a reference, and fail without a warning."""

from __future__ import annotations

import asyncio
import gc

import pytest

from xinference_xavier.runtime.aio import retrieve, spawn


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
