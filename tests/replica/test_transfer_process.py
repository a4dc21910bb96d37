"""The transfer process starts, is replaced when it dies, and ends with its engine."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import Endpoint, PullOrder, PullResult, Startup
from xinference_xavier.replica import transfer_process as process_module
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.backoff import Backoff

GLOO = "xinference_xavier.transfer.transports.gloo:GlooTransport"
NONE = "tests.transfer.no_transport:NoTransport"
HOST = "127.0.0.1"
ROWS, ROW_BYTES = 8, 4096
PATIENCE = 60.0


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create(ROWS, ROW_BYTES)
    yield region
    region.close()


@asynccontextmanager
async def running(region: Region, **options: Any) -> AsyncIterator[TransferProcess]:
    arguments = {"incarnation": "a", "host": HOST, "port_range": None, "transports": (NONE,)}
    process = TransferProcess(region, **arguments | options)
    task = asyncio.create_task(process.run())
    try:
        yield process
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.01)


async def next_change(process: TransferProcess) -> bool:
    """Wait until it becomes ready, or no longer is; return which."""
    async with asyncio.timeout(PATIENCE):
        await process.ready_changed.wait()
    process.ready_changed.clear()
    return process.ready


def order(timeout: float = 1.0) -> PullOrder:
    """A fetch from an address at which nothing listens."""
    expires = time.monotonic() + PATIENCE
    nowhere = Endpoint("127.0.0.1:1")
    return PullOrder("nobody", nowhere, (0,), expires, (b"key",), (0,), (0,), timeout)


@pytest.mark.process
async def test_it_is_ready_once_it_knows_the_secret_and_gone_at_the_end(region: Region) -> None:
    async with running(region) as process:
        assert not process.ready
        await until(lambda: process.pid)
        assert not process.ready
        assert await process.pull(order()) == PullResult(0, "no transfer process")
        await process.configure(b"secret")
        assert process.ready
        assert (await process.stats())["transport"] == "none"
        assert (await process.pull(order()))[:2] == (0, "link"), "nothing listens there"
        child = psutil.Process(process.pid)
    assert not child.is_running()
    assert (process.pid, process.endpoint, process.ready) == (None, None, False)
    assert await process.stats() == {}


@pytest.mark.process
async def test_without_transports_it_runs_and_no_donor_is_in_reach(region: Region) -> None:
    """What neighbours hold is not fetched through it."""
    async with running(region, transports=()) as process:
        await process.configure(b"secret")
        await until(lambda: process.ready)
        assert await process.pull(order()) == PullResult(0, "out of reach")
        assert (await process.stats())["transport"] == ""


@pytest.mark.process
async def test_a_killed_one_is_replaced_and_gets_the_current_secret(region: Region) -> None:
    async with running(region) as process:
        await process.configure(b"first")
        await until(lambda: process.ready)
        old = process.pid
        os.kill(old, 9)
        await process.configure(b"second")
        await until(lambda: process.ready and process.pid != old)
        assert process.starts == 2


@pytest.mark.process
async def test_whether_it_is_ready_is_told_at_once(region: Region) -> None:
    async with running(region) as process:
        await until(lambda: process.pid)
        await process.configure(b"first")
        assert await next_change(process) is True
        configuring = asyncio.create_task(process.configure(b"second"))
        changes = [await next_change(process) for _ in range(2)]
        assert changes == [False, True], "for a moment, peers had another secret"
        await configuring
        os.kill(process.pid, 9)
        assert [await next_change(process) for _ in range(2)] == [False, True]
    assert await next_change(process) is False


@pytest.mark.process
async def test_after_a_long_life_the_next_one_starts_soon(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses grow only if it dies again and again."""
    pauses = []

    class Noted(Backoff):
        def pause(self) -> float:
            pauses.append(super().pause())
            return 0.0

    monkeypatch.setattr(process_module, "MOST_PAUSE", 0.0)
    monkeypatch.setattr(process_module, "Backoff", Noted)
    async with running(region) as process:
        for starts in (1, 2):
            await until(lambda starts=starts: process.pid and process.starts == starts)
            os.kill(process.pid, 9)
        await until(lambda: process.starts == 3)
    assert pauses == [0.1, 0.1]


@pytest.mark.process
async def test_one_that_cannot_start_says_why(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(region, host="192.0.2.1", transports=(GLOO,)) as process:
        await until(lambda: "did not start" in caplog.text)
        assert "Gloo cannot listen on host '192.0.2.1'" in caplog.text
        assert not process.ready


@pytest.mark.process
async def test_collecting_garbage_does_not_hold_it_up(region: Region) -> None:
    telling = "tests.transfer.no_transport:TellingTransport"
    async with running(region, transports=(telling,)) as process:
        await until(lambda: process.pid)
        assert (await process.stats())["transport"] == "frozen"


@pytest.mark.process
async def test_its_actors_port_is_in_the_configured_range(region: Region) -> None:
    async with running(region, port_range=(22000, 22049)) as process:
        await until(lambda: process.pid)
        sockets = psutil.Process(process.pid).net_connections("tcp")
        (port,) = {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN}
        assert 22000 <= port <= 22049


def start_raw(region: Region) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "xinference_xavier.transfer", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(), region.fd))
    startup = Startup("a", region.fd, ROWS, ROW_BYTES, HOST, None, (NONE,))
    ours.sendall(startup.to_json())
    return process, ours


@pytest.mark.process
@pytest.mark.parametrize("answer_was_read", [True, False])
def test_it_ends_when_its_engine_ends(region: Region, answer_was_read: bool) -> None:
    process, ours = start_raw(region)
    assert ours.recv(4096, 0 if answer_was_read else socket.MSG_PEEK)
    ours.close()
    try:
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0


async def test_a_pull_that_takes_too_long_returns_only_when_its_process_has_ended(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may write to the rows until then."""
    monkeypatch.setattr(process_module, "_GRACE", 0.0)
    process = TransferProcess(
        region, incarnation="a", host=HOST, port_range=None, transports=(NONE,)
    )
    killed, exited = asyncio.Event(), asyncio.get_running_loop().create_future()
    child: Any = SimpleNamespace(
        process=SimpleNamespace(kill=killed.set),
        actor=SimpleNamespace(pull=lambda _: asyncio.Event().wait()),
        exited=exited,
    )
    process._child, process.ready = child, True
    pulling = asyncio.ensure_future(process.pull(order(timeout=0.001)))
    await killed.wait()
    await asyncio.sleep(0)
    assert not pulling.done()
    exited.set_result(-9)
    assert await pulling == PullResult(0, "transfer process died")
