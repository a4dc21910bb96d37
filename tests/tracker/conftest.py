"""Real xoscar pools for the tracker: in this process, and in one that may be stopped or killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.protocol import tracker_uid

MODEL = "model"

TRACKER_PROCESS = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
import xoscar as xo
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.protocol import tracker_uid

async def main():
    loop = asyncio.get_running_loop()
    # Each of its threads is taken, as in xinference's supervisor on two processors.
    loop.set_default_executor(ThreadPoolExecutor(1))
    reading = loop.run_in_executor(None, sys.stdin.read)
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    await xo.create_actor(
        BlockTracker, sys.argv[1], address=pool.external_address, uid=tracker_uid(sys.argv[1])
    )
    print(pool.external_address, flush=True)
    # The end of the parent is the end of this process.
    await reading

asyncio.run(main())
"""


@pytest.fixture
async def pool() -> AsyncIterator[Any]:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    yield pool
    await pool.stop()


@pytest.fixture
async def tracker(pool: Any) -> Any:
    return await create_tracker(pool.external_address)


@pytest.fixture
async def tracker_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process with a tracker, and its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TRACKER_PROCESS, MODEL),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def create_tracker(address: str, **arguments: float) -> Any:
    return await xo.create_actor(
        BlockTracker, MODEL, address=address, uid=tracker_uid(MODEL), **arguments
    )
