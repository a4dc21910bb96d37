"""A model's reference for one routed request, which may move to another replica.

If the replica is lost before it answers, the request goes to another one. For a divided request, a
prefill replica computes the prompt meanwhile (`prefill`): one token to answer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import xoscar as xo
from fastapi import HTTPException

from xinference_xavier.errors import ReplicaNotServingError, XavierError
from xinference_xavier.frontend.model_router import (
    AT_LIMIT,
    Failure,
    ModelRouter,
    QueueFullError,
)
from xinference_xavier.limits import CALL_DEADLINE, LONGEST
from xinference_xavier.protocol.load import prefill_id
from xinference_xavier.routing.route import Route
from xinference_xavier.runtime.aio import spawn, within
from xinference_xavier.serving import seam

logger = logging.getLogger(__name__)

_ONE_TOKEN = {"max_tokens": 1, "n": 1, "stream": False, "temperature": 0}
_ABOUT_ANSWERS = {
    "best_of",
    "logprobs",
    "max_completion_tokens",
    "min_tokens",
    "response_format",
    "seed",
    "stop",
    "stream_options",
    "top_logprobs",
}


def one_token(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The generation config with which only the prompt is computed. The rest stays: a template may
    depend on it."""
    kept = {name: each for name, each in (config or {}).items() if name not in _ABOUT_ANSWERS}
    return {**kept, **_ONE_TOKEN}


async def prefill(
    router: ModelRouter,
    route: Route,
    connect: Callable[[str], Awaitable[Any]],
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Return when the prompt is computed; if cancelled, the replica stops. A failure is counted,
    and the replica that answers notices it."""
    request = prefill_id(kwargs["request_id"])
    router.named(route, request)
    asked, *rest = args
    call = {**kwargs, "request_id": request}
    if rest:
        rest[0] = one_token(rest[0])
    else:
        call["generate_config"] = one_token(call.get("generate_config"))
    model, failed = None, False
    try:
        model = await connect(route.prefills_at)
        await within(LONGEST, getattr(model, method)(asked, *rest, **call))
    except asyncio.CancelledError:
        if model is not None:
            with anyio.CancelScope(shield=True), suppress(Exception):
                await within(CALL_DEADLINE, model.abort_request(request))
        raise
    except Exception as error:
        failed = True
        logger.warning(
            "a prefill failed, so another replica does it: replica=%s error=%r",
            route.prefills_at,
            error,
        )
    finally:
        router.prefilled(route, failed)


_T = TypeVar("_T")
Connect = Callable[[str], Awaitable[Any]]
"""Returns a reference to the model actor of a replica. Raises ReplicaNotServingError."""
_DEAD = "EngineDeadError"
_OF_ITS_REPLICA = {"address", "uid"}
SILENCE = 30.0
"""Seconds in which an answer that has begun may go on although the tracker has lost its replica."""


class ReplicaLostError(XavierError):
    """The tracker has lost the replica."""


class AtLimitError(HTTPException):
    """All replicas are at their limit, and no more requests may wait. Some of xinference's handlers
    let an HTTPException pass; the others know a refusal by its text."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(429, AT_LIMIT, {"Retry-After": f"{retry_after}"})

    def __str__(self) -> str:
        return str(self.detail)


class RoutedModel:
    """Behaves like `model`, the reference to the replica of `route`."""

    def __init__(self, router: ModelRouter, route: Route, model: Any, connect: Connect) -> None:
        self._router = router
        self._route = route
        self._model = model
        self._replica = route.replica  # that `model` is of
        self._connect = connect
        self._names: dict[str, str] = {}  # the replica's for the request, by xinference's

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ITS_REPLICA:
            return getattr(self._model, name)

        async def ask(*args: Any, **kwargs: Any) -> Any:
            """Calls about the model that xinference makes before the request itself."""
            return await self._with_another(lambda: self._call(name, args, kwargs))

        return ask

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        return await self._request("generate", args, kwargs)

    async def chat(self, *args: Any, **kwargs: Any) -> Any:
        return await self._request("chat", args, kwargs)

    async def abort_request(self, name: str, *args: Any, **kwargs: Any) -> Any:
        aborting = self._model.abort_request(self._names.get(name, name), *args, **kwargs)
        return await within(CALL_DEADLINE, aborting)

    async def _request(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # By this id the replica reports the request. The route of responses gives none.
        name = str(kwargs.setdefault("request_id", uuid.uuid4().hex))
        route = self._route
        if route.elsewhere is not None:
            prefilling = prefill(self._router, route, self._connect, method, args, {**kwargs})
            route.at_end.append(spawn(prefilling).cancel)

        async def ask() -> Any:
            kwargs["request_id"] = self._names[name] = route.marked(name)
            self._router.named(route, self._names[name])
            return await self._call(method, args, kwargs)

        result = await self._with_another(ask)
        if not isinstance(result, _Place):
            self._router.answered(self._route, streamed=False)
            return result
        completed = functools.partial(self._router.completed, self._route)
        stream = _Stream(result, lambda: self._begin(stream, ask), self._go_on, completed)
        route.at_end.append(stream.abandon)
        return stream

    async def _begin(self, stream: _Stream, ask: Callable[[], Awaitable[Any]]) -> Any:
        """The first item of a stream."""

        async def first() -> Any:
            place = stream.place = stream.place or await ask()
            try:
                return await self._unless_lost(anext(place.iterator))
            except Exception:
                stream.place = None
                spawn(place.leave())
                raise

        item = await self._with_another(first)
        self._router.answered(self._route, streamed=True)
        return item

    async def _go_on(self, place: _Place) -> Any:
        """The next item of a stream that has begun."""
        return await self._unless_lost(anext(place.iterator), SILENCE)

    async def _with_another(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask the replica, and if that fails another one."""
        while True:
            try:
                if self._replica != self._route.replica:
                    self._model = await self._connect(self._route.replica)
                    self._replica = self._route.replica
                return await ask()
            except Exception as error:
                failure = _failure(error)
                if failure is None or not await self._moves(failure):
                    raise
                logger.warning(
                    "request goes to another replica: replica=%s error=%r", self._replica, error
                )

    async def _moves(self, failure: Failure) -> bool:
        """True if the request was sent to another replica. Raises AtLimitError."""
        try:
            moves = await self._router.move(self._route, failure)
            if failure is Failure.FULL and not moves:
                self._router.refuse(self._route)
        except QueueFullError as error:
            raise AtLimitError(error.retry_after) from error
        return moves

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self._model

        async def call() -> Any:
            result = await getattr(model, method)(*args, **kwargs)
            return _Place(model, result) if hasattr(result, "__anext__") else result

        return await self._unless_lost(call())

    async def _unless_lost(self, call: Awaitable[_T], patience: float = 0.0) -> _T:
        """Raises ReplicaLostError once the tracker has lost the replica, and `patience` is over."""
        answering, lost = asyncio.ensure_future(call), self._route.lost
        assert lost is not None, "the request was sent"
        either: set[asyncio.Future[Any]] = {answering, lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and patience:
                await asyncio.wait({answering}, timeout=patience)
            if not answering.done():
                raise ReplicaLostError(f"replica {self._replica} is lost")
        except BaseException:
            answering.add_done_callback(_give_back)
            answering.cancel()
            raise
        return answering.result()


class _Place:
    """A stream of a replica. It occupies a place in the replica's request limit, which xinference
    gives back for streams of its own only."""

    def __init__(self, model: Any, iterator: Any) -> None:
        self.iterator = iterator
        self._model = model
        seam.keep_open(iterator)

    async def leave(self) -> None:
        """The replica may be gone."""
        calls = (self._model.decrease_serve_count, self.iterator.destroy)
        closing = (within(CALL_DEADLINE, call()) for call in calls)
        for each in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(each, Exception):
                logger.debug("a stream is not closed by its replica", exc_info=each)


class _Stream(AsyncIterator[Any]):
    """An answer, which `begin` begins. At its end, or once it is closed, its place is left.

    A class, because it owns a place before its first item is asked for: to close a generator that
    has not begun has no effect.
    """

    def __init__(
        self,
        place: _Place,
        begin: Callable[[], Awaitable[Any]],
        go_on: Callable[[_Place], Awaitable[Any]],
        completed: Callable[[], object],
    ) -> None:
        self.place: _Place | None = place
        self._go_on = go_on
        self._completed = completed
        self._begin: Callable[[], Awaitable[Any]] | None = begin
        self._closed = False

    async def __anext__(self) -> Any:
        if self._closed:
            raise StopAsyncIteration
        begin, self._begin = self._begin, None
        try:
            if begin is not None:
                return await begin()
            assert self.place is not None
            return await self._go_on(self.place)
        except StopAsyncIteration:
            self._completed()
            self.abandon()
            raise
        except BaseException:
            self.abandon()
            raise

    async def aclose(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Close it in the background: the end of the answer does not wait for the replica."""
        self._closed = True
        place, self.place = self.place, None
        if place is not None:
            spawn(place.leave())


def _failure(error: Exception) -> Failure | None:
    """None if it is the request's error: what the model actor itself raised, whatever its type,
    such as the OSError of an unreadable image."""
    if seam.is_full(error):
        return Failure.FULL
    if isinstance(error, ReplicaNotServingError):
        return Failure.NOT_SERVING
    if isinstance(error, OSError):
        lost = not seam.is_of_actor(error)
    else:
        gone = isinstance(error, xo.ServerClosed | xo.ActorNotExist | ReplicaLostError)
        lost = gone or _DEAD in {each.__name__ for each in type(error).__mro__}
    return Failure.LOST if lost else None


def _give_back(asked: asyncio.Future[Any]) -> None:
    """What arrives after all, although nobody waits for it any more."""
    if not asked.cancelled() and asked.exception() is None:
        result = asked.result()
        if isinstance(result, _Place):
            spawn(result.leave())
