"""The engine's handle on its transfer process: starts it, calls it, restarts it.

Threading: the replica's background event loop.
"""

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import xoscar

from xinference_xavier.errors import XavierError
from xinference_xavier.limits import CALL_DEADLINE, MOST_PAUSE, START_DEADLINE
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import (
    MAX_LINE,
    TRANSFER_UID,
    Endpoint,
    PullOrder,
    PullResult,
    Startup,
)
from xinference_xavier.runtime.aio import UNREACHABLE, Rollback, within
from xinference_xavier.runtime.backoff import Backoff
from xinference_xavier.runtime.host import parent_pid
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

_REGISTERED_PER_SECOND = 1 << 30  # bytes of the pool; NIXL took half a second for each GiB
_CONFIGURE_TIMEOUT = 20.0
_GRACE = 2.0  # after its deadline, before a call counts as stuck


class _Child(NamedTuple):
    process: asyncio.subprocess.Process
    control: asyncio.StreamWriter
    endpoint: Endpoint
    actor: xoscar.ActorRefType
    exited: asyncio.Future[int]


class TransferProcess:
    """`endpoint` is where peers' transfer processes find ours; None while it is down.

    `ready` says that the process runs and has the model's current secret; `ready_changed` is set
    whenever that has changed.
    """

    def __init__(
        self,
        region: Region,
        *,
        incarnation: str,
        host: str,
        port_range: tuple[int, int] | None,
        transports: Sequence[str],
    ) -> None:
        self._region = region
        self._startup = Startup(
            incarnation=incarnation,
            region_fd=region.fd,
            rows=region.rows,
            row_bytes=region.row_bytes,
            host=host,
            port_range=port_range,
            transports=tuple(transports),
            parent=parent_pid(),
        )
        self._secret: bytes | None = None
        self._configured: bytes | None = None  # the secret that the child has
        self._child: _Child | None = None
        self.starts = 0
        self.error: str | None = None  # of the last failed start
        self._log = RateLimitedLog(logger)
        self.ready = False
        self.ready_changed = asyncio.Event()

    @property
    def endpoint(self) -> Endpoint | None:
        return self._child.endpoint if self._child is not None else None

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child is not None else None

    async def run(self) -> None:
        """Keep a process alive until cancelled; then end it."""
        backoff = Backoff()
        while True:
            began = time.monotonic()
            try:
                child = await self._start()
            except (XavierError, ValueError, *UNREACHABLE) as error:  # ValueError: a long line
                self._log.warn(
                    "start", "transfer process did not start: error=%s", error, level=logging.ERROR
                )
                self.error = str(error) or type(error).__name__
            else:
                try:
                    await self._supervise(child)
                finally:
                    self._child = self._configured = None
                    self._update_ready()
                    child.control.close()
                    await _end(child.process)
                code = child.process.returncode
                self._log.warn("end", "transfer process ended: exit_code=%s", code)
            if time.monotonic() - began > MOST_PAUSE:
                backoff.reset()
            await asyncio.sleep(backoff.pause())

    async def _start(self) -> _Child:
        ours, theirs = socket.socketpair()
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "xinference_xavier.transfer",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._region.fd),
                env=environment,
            )
        self.starts += 1
        async with Rollback() as scope:
            scope.undo(_end, process)
            answer, control = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE)
            scope.undo(control.close)
            control.write(self._startup.to_json())
            async with asyncio.timeout(START_DEADLINE + self._region.size / _REGISTERED_PER_SECOND):
                endpoint = Endpoint.from_json(await answer.readline())
            finding = xoscar.actor_ref(endpoint.address, TRANSFER_UID)
            actor = await within(START_DEADLINE, finding)
            scope.commit()
        exited = asyncio.ensure_future(process.wait())
        return _Child(process, control, endpoint, actor, exited)

    async def _supervise(self, child: _Child) -> None:
        while self._configured != self._secret:  # which may change meanwhile
            if not await self._configure(child):
                return
        self._child = child
        self._update_ready()
        await asyncio.shield(child.exited)

    async def configure(self, secret: bytes) -> None:
        """Set the model's secret, also for later processes."""
        self._secret = secret
        self._update_ready()
        child = self._child
        if child is not None and not await self._configure(child):
            _kill(child.process)

    async def _configure(self, child: _Child) -> bool:
        """True if the child has the secret now; if not, it must be replaced."""
        secret = self._secret
        try:
            await self._call(child, _CONFIGURE_TIMEOUT, "configure", secret)
        except UNREACHABLE:
            return False
        self._configured = secret
        self._update_ready()
        return True

    def _update_ready(self) -> None:
        configured = self._configured is not None and self._configured == self._secret
        ready = self._child is not None and configured
        if ready != self.ready:
            self.ready = ready
            self.ready_changed.set()

    async def close_links_except(self, members: frozenset[str]) -> None:
        if self._child is not None:
            with suppress(*UNREACHABLE):
                await self._call(self._child, CALL_DEADLINE, "close_links_except", members)

    async def try_link(self, peer: str, endpoint: Endpoint, timeout: float) -> str | None:
        """Why no link to the peer's transfer process can be opened, or None."""
        if self._child is None:
            return "this replica has no transfer process"
        call = peer, endpoint, timeout
        try:
            reason = await self._call(self._child, timeout + _GRACE, "try_link", *call)
        except UNREACHABLE as error:
            return f"this replica's transfer process does not answer: {error!r}"
        return reason and f"no link to {endpoint.address}: {reason}"

    async def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = {}
        if self._child is not None:
            with suppress(*UNREACHABLE):
                stats = await self._call(self._child, CALL_DEADLINE, "stats")
        return stats

    async def _call(self, child: _Child, timeout: float, method: str, *arguments: object) -> Any:
        """Raises one of UNREACHABLE."""
        try:
            return await within(timeout, getattr(child.actor, method)(*arguments))
        except UNREACHABLE as error:
            self._log.warn("call", "call failed: method=%s error=%r", method, error)
            raise

    async def pull(self, order: PullOrder) -> PullResult:
        """Fetch rows. Never raises; when it returns, nothing writes to the rows any more: a process
        that does not answer in time is killed."""
        if not self._startup.transports:
            return PullResult(0, "out of reach")
        child = self._child
        if child is None or not self.ready:
            return PullResult(0, "no transfer process")
        pulling = asyncio.ensure_future(child.actor.pull(order))
        await asyncio.wait(
            {pulling, child.exited},
            timeout=order.timeout + _GRACE,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if pulling.done() and pulling.exception() is None:
            return pulling.result()  # type: ignore[no-any-return]  # xoscar's refs are untyped
        pulling.cancel()
        _kill(child.process)
        await child.exited
        return PullResult(0, "transfer process died")


async def _end(process: asyncio.subprocess.Process) -> None:
    _kill(process)
    await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
