"""Objects in processes of their own: their methods are commands, which a pipe takes there.

`Remote` is the handle. In the process, `obey` carries out one command after the other;
`obey_at_once` and `serve_actors` run commands, which are coroutines then, side by side on one event
loop. A process ends when it is told to or when the one that started it is gone.

xoscar keeps one event loop per process, so whatever must not share one is such an object.
"""

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, Self

import psutil
import xoscar

PATIENCE = 60.0
"""Seconds for an answer, far above any that was observed."""
_READY = -1  # a number that no command has


class RemoteError(Exception):
    """What the object raised, as text."""


class EndedError(RemoteError):
    """The process has ended, or ended before it answered."""


def forked(preload: str = "tests.harness.preload") -> ForkServerContext:
    """Processes are forked from one that has imported `preload`: imports take seconds. That one is
    started with the first of them, which waits for the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    return context


def spawned() -> SpawnContext:
    """Processes begin with nothing."""
    return multiprocessing.get_context("spawn")


start_context: Callable[[], ForkServerContext | SpawnContext] = forked
"""How processes are started unless they say how. A test may replace it."""


class Pending(Future[Any]):
    """An answer on its way, which nobody waits for without a deadline: that is `patience` seconds,
    unless the caller names another one."""

    def __init__(self, missing: str, patience: float) -> None:
        """`missing` says what there is not in time."""
        super().__init__()
        self._missing = missing
        self._patience = patience

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(self._patience if timeout is None else timeout)
        except TimeoutError:
            raise TimeoutError(self._missing) from None


class Remote:
    """A process that runs `serve(pipe, *arguments)`, one of the functions below. Any thread may
    give it commands."""

    def __init__(
        self,
        serve: Callable[..., None],
        *arguments: Any,
        name: str = "",
        context: ForkServerContext | SpawnContext | None = None,
        daemon: bool = True,
        patience: float = PATIENCE,
    ) -> None:
        self.name = name or type(self).__name__
        self.patience = patience
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ready = Pending(f"{self.name} is not ready", patience)
        self._waiting: dict[int, Pending] = {_READY: self._ready}
        context = context or start_context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_run, args=(dict(os.environ), theirs, serve, arguments), daemon=daemon
        )
        self.process.start()
        theirs.close()
        threading.Thread(target=self._listen, name=f"{self.name}-answers", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def wait_until_ready(self, seconds: float | None = None) -> Any:
        """What it tells when it can take commands, such as an address. Raises RemoteError if it
        cannot."""
        return self._ready.result(seconds)

    def begin(self, method: str, *args: Any, **named: Any) -> Pending:
        """Call a method of the object; the answer, or RemoteError, is in the future."""
        future = Pending(f"{self.name} does not answer {method}", self.patience)
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            try:
                self._pipe.send((number, method, args, named))
            except OSError:
                del self._waiting[number]
                future.set_exception(EndedError(f"{self.name} has ended"))
        return future

    def call(self, method: str, *args: Any, **named: Any) -> Any:
        """Call a method of the object and wait for its answer."""
        return self.begin(method, *args, **named).result()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def cpu_seconds(self) -> float:
        """Processor time so far, with that of the processes that it has started."""
        own = psutil.Process(self.pid)
        return sum(_cpu_seconds(process) for process in (own, *own.children(recursive=True)))

    def close(self, seconds: float = PATIENCE) -> None:
        """Tell it to end; kill it and what it has started if they have not within `seconds`.
        Idempotent."""
        try:
            started = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        with self._lock, suppress(OSError):  # it has ended
            self._pipe.send(None)
        self.process.join(seconds)
        if self.process.is_alive():
            self.kill()
        for process in psutil.wait_procs(started, seconds)[1]:
            process.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):  # it has ended
            while True:
                number, error, answer = self._pipe.recv()
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is None:
                    continue  # it was ready, and failed later
                if error is None:
                    future.set_result(answer)
                else:
                    future.set_exception(RemoteError(f"{self.name}: {error}"))
        with self._lock:
            self._pipe.close()
            left = list(self._waiting.values())
            self._waiting.clear()
        for future in left:
            future.set_exception(EndedError(f"{self.name} has ended"))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


# -- in the process ---------------------------------------------------------------------------


def _run(
    environment: dict[str, str],
    pipe: Connection,
    serve: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()  # a forked process has that of the one which was started first
    os.environ.update(environment)
    try:
        serve(pipe, *arguments)
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):
            pipe.send((_READY, repr(error), None))
    os._exit(0)


def tell_ready(pipe: Connection, about: object = None) -> None:
    """Let `wait_until_ready` return."""
    pipe.send((_READY, None, about))


def obey(pipe: Connection, make: Callable[..., Any], *arguments: Any) -> None:
    """Make an object and carry out commands, one after the other."""
    target = make(*arguments)
    tell_ready(pipe)
    while (command := _next(pipe)) is not None:
        number, method, args, named = command
        try:
            pipe.send((number, None, getattr(target, method)(*args, **named)))
        except Exception as error:
            traceback.print_exc()
            pipe.send((number, repr(error), None))


async def obey_at_once(pipe: Connection, target: Any, about: object = None) -> None:
    """Carry out commands, whose methods are coroutine functions, without waiting for earlier ones.
    `about` is for `wait_until_ready`."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    tell_ready(pipe, about)
    while (command := await loop.run_in_executor(None, _next, pipe)) is not None:
        task = asyncio.ensure_future(_carry_out(pipe, target, *command))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def serve_actors(
    pipe: Connection,
    start: Callable[..., Awaitable[Any]],
    *arguments: Any,
    address: str = "127.0.0.1:0",
) -> None:
    """Run a pool for actors, and the commands of what `start(pool, *arguments)` returns. It is
    ready with the pool's address."""

    async def serve() -> None:
        pool = await xoscar.create_actor_pool(address, n_process=0, use_uvloop=False)
        await obey_at_once(pipe, await start(pool, *arguments), pool.external_address)
        os._exit(0)  # whatever others still ask its actors

    asyncio.run(serve())


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):  # the one that started this process is gone
        return None


async def _carry_out(
    pipe: Connection, target: Any, number: int, method: str, args: Any, named: Any
) -> None:
    try:
        pipe.send((number, None, await getattr(target, method)(*args, **named)))
    except Exception as error:
        pipe.send((number, repr(error), None))
