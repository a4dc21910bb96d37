"""A cancelled call costs its pool no processor time afterwards, whatever address it was sent to.

The pool is a process of its own, whose processor time is measured.
"""

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil
import pytest
import xoscar as xo
from xoscar.backends.context import IndigenActorContext
from xoscar.backends.indigen.pool import MainActorPool
from xoscar.backends.message import MessageType

from xinference_xavier.runtime.net import patch_cancels
from xinference_xavier.tracker.actor import BlockTracker

pytestmark = pytest.mark.process

DEADLINE = 30.0
WINDOW = 1.0  # seconds over which processor time is measured
QUIET = 0.2  # of it; an idle pool takes a hundredth, one with a circling cancel all of it
WAYS = [
    ("0.0.0.0", "127.0.0.1"),
    ("0.0.0.0", "127.0.0.2"),  # any address of the host
    ("0.0.0.0", "localhost"),
    ("127.0.0.1", "localhost"),
    ("localhost", "127.0.0.1"),
]
"""The host that a pool listens on, and the one by which it is reached."""


class Subject(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    async def nap(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def running(self) -> None:
        """Returns once the calls before it run."""

    async def mend(self) -> None:
        patch_cancels()

    async def hold_a_tracker(self) -> None:
        await xo.create_actor(BlockTracker, "m", address=self.address, uid="tracker")


class Pool(NamedTuple):
    process: psutil.Process
    port: str

    async def at(self, host: str) -> Any:
        return await xo.actor_ref(address=f"{host}:{self.port}", uid="subject")

    async def processor_seconds(self, subject: Any) -> float:
        """Processor seconds of the pool while it is idle."""
        before = sum(self.process.cpu_times()[:2])
        await subject.nap(WINDOW)
        return float(sum(self.process.cpu_times()[:2]) - before)


@contextmanager
def pool_on(host: str, mended: bool) -> Iterator[Pool]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, host, mended), daemon=True)
    process.start()
    try:
        assert ours.poll(DEADLINE), "the pool did not start"
        yield Pool(psutil.Process(process.pid), ours.recv().rpartition(":")[2])
    finally:
        process.kill()
        process.join()


def _run(pipe: Connection, host: str, mended: bool) -> None:
    asyncio.run(_serve(pipe, host, mended))
    os._exit(0)


async def _serve(pipe: Connection, host: str, mended: bool) -> None:
    if mended:
        patch_cancels()
    pool = await xo.create_actor_pool(f"{host}:0", n_process=0, use_uvloop=False)
    await xo.create_actor(Subject, address=pool.external_address, uid="subject")
    pipe.send(pool.external_address)
    await pool.join()


async def cancel_a_call(subject: Any) -> None:
    call = asyncio.ensure_future(subject.nap(3600.0))
    await subject.running()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, DEADLINE)


async def cancel_what_has_ended(subject: Any) -> None:
    call = asyncio.ensure_future(IndigenActorContext().cancel(subject.address, os.urandom(32)))
    await asyncio.wait({call}, timeout=1.0)  # without our patch there is no answer
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize(("host", "way"), WAYS)
async def test_cancelled_calls_leave_nothing_behind(host: str, way: str) -> None:
    with pool_on(host, mended=True) as pool:
        subject = await pool.at(way)
        for _ in range(20):
            await cancel_a_call(subject)
        await cancel_what_has_ended(subject)
        assert await pool.processor_seconds(subject) < QUIET


@pytest.mark.parametrize("mend", ["mend", "hold_a_tracker"])
async def test_a_cancel_that_already_circles_is_noticed_and_ended(mend: str) -> None:
    """xinference's control process does not load our code until it holds a tracker."""
    with pool_on("0.0.0.0", mended=False) as pool:
        subject = await pool.at("127.0.0.1")
        await cancel_what_has_ended(subject)
        assert await pool.processor_seconds(subject) > QUIET
        await getattr(subject, mend)()
        assert await pool.processor_seconds(subject) < QUIET


async def test_a_call_of_a_sub_pools_actor_is_cancelled_there() -> None:
    patch_cancels()
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=1, use_uvloop=False)
    async with pool:
        main, sub = pool.external_address, next(iter(pool.sub_processes))
        in_sub_pool = await xo.create_actor(Subject, address=sub, uid="subject")
        await cancel_a_call(in_sub_pool)
        cancelling = IndigenActorContext().cancel(main, os.urandom(32))
        with pytest.raises(Exception, match="maybe it is done or cancelled already"):
            await asyncio.wait_for(cancelling, DEADLINE)


def test_patching_twice_changes_nothing() -> None:
    patch_cancels()
    mended = MainActorPool._message_handler[MessageType.cancel]
    patch_cancels()
    assert MainActorPool._message_handler[MessageType.cancel] is mended


def test_an_unknown_xoscar_is_left_alone_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MainActorPool, "_message_handler", {})
    patch_cancels()
    assert "start xinference with -H and the host's own address" in caplog.text
