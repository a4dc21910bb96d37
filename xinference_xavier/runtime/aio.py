"""asyncio with deadlines: calls that end in time, undone transactions, a loop in a thread."""

import asyncio
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

import xoscar

from xinference_xavier.limits import CALL_DEADLINE

logger = logging.getLogger(__name__)

T = TypeVar("T")


def take_all(queue: deque[T]) -> list[T]:
    """What is in a queue to which another thread may append meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]


UNREACHABLE = (OSError, TimeoutError, xoscar.ActorNotExist, xoscar.ServerClosed)
"""What a call raises when its actor cannot be reached."""
CANCEL_GRACE = 0.5
"""Seconds in which an abandoned call can tell its peer that nobody waits for the answer."""


def remaining(deadline: float) -> float:
    """Seconds until `deadline` (`time.monotonic()`), but never 0, which often means no limit."""
    return max(0.001, deadline - time.monotonic())


async def within(seconds: float, call: Awaitable[T]) -> T:
    """Await `call` for at most `seconds`; then raise TimeoutError.

    `asyncio.wait_for` is not enough: it waits for the cancelled call to end, and a cancelled
    xoscar call first asks the peer to cancel, without a deadline. Here the call is cancelled in the
    background, twice, because the second time also ends that question. Cancelling the caller
    abandons the call in the same way.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.add_done_callback(retrieve)
            task.cancel()
            asyncio.get_running_loop().call_later(CANCEL_GRACE, task.cancel)
    if task.cancelled() or not task.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return task.result()


async def ask(seconds: float, address: str, uid: str, method: str, *args: object) -> Any:
    """Call a method of the actor `uid` at `address`. Raises what it raises, and TimeoutError after
    `seconds` in all."""

    async def call() -> Any:
        actor = await xoscar.actor_ref(address=address, uid=uid)
        return await getattr(actor, method)(*args)

    return await within(seconds, call())


_running: set[asyncio.Future[Any]] = set()


def spawn(work: Awaitable[Any]) -> asyncio.Future[Any]:
    """Run `work` on the running loop; unlike asyncio, keep the task from being collected."""
    task = asyncio.ensure_future(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


_threads = ThreadPoolExecutor(8, "xavier")  # it starts them when they are needed


def in_thread(work: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """What `work` returns, in a thread of ours. Those of asyncio may all be taken: xinference 4.1
    keeps three for each process that it starts beside its first API, of six on two cores."""
    return asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args))


async def to_its_end(work: asyncio.Future[T]) -> T:
    """What `work` returns. A caller that is cancelled waits for it all the same: threads go on."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return work.result()


async def finishing(work: Awaitable[T]) -> T:
    """What `work` returns. If the caller is cancelled, as xoscar does with a call whose caller has
    given up, `work` goes on to its end."""
    return await asyncio.shield(spawn(work))


def retrieve(task: asyncio.Future[Any]) -> None:
    """Done callback that keeps asyncio from reporting an exception that nobody retrieved."""
    if not task.cancelled():
        task.exception()


class Rollback:
    """Undoes a transaction's steps unless all of them succeed. An asynchronous context manager::

    async with Rollback() as scope:
        actor = await create()
        scope.undo(destroy, actor)
        await rest_of_the_work(actor)
        scope.commit()

    Enter the scope, acquire, register the undo at once, and ``commit()`` last. A scope that ends
    without a commit, by an exception or a cancellation, runs its undos in reverse order, each
    within `CALL_DEADLINE`. A failed undo is logged; it neither stops the others nor replaces the
    original error. A scope belongs to one asyncio task.
    """

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    def undo(self, action: Callable[..., object], *args: object) -> None:
        """Register ``action(*args)``, which may return an awaitable. A synchronous action must not
        block: it runs on the event loop."""
        self._stack.push_async_callback(self._run, action, args)

    def commit(self) -> None:
        """Drop the undos registered so far."""
        self._stack.pop_all()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # In a task of its own: our cancellation, even a second one, must not reach the undos.
        unwinding = asyncio.ensure_future(self._stack.aclose())
        cancelled: asyncio.CancelledError | None = None
        while not unwinding.done():
            try:
                await asyncio.shield(unwinding)
            except asyncio.CancelledError as late:
                cancelled = late
        unwinding.result()
        # With an error, that one propagates already.
        if cancelled is not None and error is None:
            raise cancelled

    async def _run(self, action: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            outcome = action(*args)
            if inspect.isawaitable(outcome):
                await within(CALL_DEADLINE, outcome)
        # A failed undo must neither stop the others nor hide the original error.
        except (Exception, asyncio.CancelledError) as error:
            name = getattr(action, "__qualname__", action)
            logger.warning("undo failed: action=%s error=%r", name, error)


Begin = Callable[[Rollback], Awaitable[Collection[asyncio.Task[None]]]]
"""Starts the tasks of the loop; the scope's undos run when the loop ends."""


class LoopThread:
    """An event loop in a thread of its own, beside code that is not asynchronous. It ends at
    `stop`, or when a task fails."""

    def __init__(self, name: str, begin: Begin) -> None:
        self.loop = asyncio.new_event_loop()
        self._begin = begin
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._up = threading.Event()
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, timeout: float) -> None:
        """Return when `begin` has returned. Raises what it raised, or TimeoutError."""
        self._thread.start()
        if not self._up.wait(timeout):
            raise TimeoutError(f"{self._thread.name} did not start within {timeout:g} s")
        if self._error is not None:
            raise self._error

    def stop(self, timeout: float) -> None:
        """Cancel the tasks and wait for the thread, `timeout` seconds at most."""
        if self._task is None:  # it never ran
            self.loop.close()
            return
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(timeout)

    def _run(self) -> None:
        runner = asyncio.Runner(loop_factory=lambda: self.loop)
        with runner, suppress(asyncio.CancelledError):  # `stop`
            runner.run(self._main())

    async def _main(self) -> None:
        self._task = asyncio.current_task()
        async with Rollback() as scope:  # never committed
            try:
                tasks = await self._begin(scope)
            except Exception as error:  # `start` raises it
                self._error = error
                return
            finally:
                self._up.set()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)


class DaemonThreads(Executor):
    """Threads for calls that may never return, such as those to a disk. They do not keep the
    process from ending."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Calls that no thread has begun."""
        return self._calls.qsize()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The threads end after the calls before; nobody waits for them."""
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, call  # what they hold must not wait for the next one
