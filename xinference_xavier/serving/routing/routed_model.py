"""A model's reference for one request. If the replica is lost before it answers, the request goes
to another one."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import xoscar as xo

from xinference_xavier.errors import XavierError
from xinference_xavier.frontend.model_router import ModelRouter, Route
from xinference_xavier.runtime.tasks import spawn
from xinference_xavier.serving.routing.prefill import prefill

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Connect = Callable[[str], Awaitable[Any]]
"""Returns a reference to the model actor of a replica."""
_GONE = (OSError, xo.ServerClosed, xo.ActorNotExist)
_DEAD = "EngineDeadError"
_OF_ITS_REPLICA = {"address", "decrease_serve_count", "uid"}
_FULL = "Rate limit reached"


class ReplicaLostError(XavierError):
    """The tracker has lost the replica."""


class RoutedModel:
    """Behaves like `model`, the reference to the replica of `route`."""

    def __init__(self, router: ModelRouter, route: Route, model: Any, connect: Connect) -> None:
        self._router = router
        self._route = route
        self._model = model
        self._connect = connect
        self._name: str | None = None  # of the request, as xinference knows it

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ITS_REPLICA:
            return getattr(self._model, name)

        async def ask(*args: Any, **kwargs: Any) -> Any:
            """Before the request itself, xinference asks a few things about the model."""
            return await self._with_another(lambda: self._call(name, args, kwargs))

        return ask

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        return await self._request("generate", args, kwargs)

    async def chat(self, *args: Any, **kwargs: Any) -> Any:
        return await self._request("chat", args, kwargs)

    async def abort_request(self, name: str, *args: Any) -> Any:
        if name == self._name:
            name = self._route.marked(name)
        return await self._model.abort_request(name, *args)

    async def _request(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # By this id the replica reports the request. The route of responses gives none.
        self._name = str(kwargs.setdefault("request_id", uuid.uuid4().hex))
        route = self._route
        if route.elsewhere is not None:
            route.prefill = spawn(
                prefill(self._router, route, self._connect, method, args, {**kwargs})
            )
            kwargs["request_id"] = route.marked(self._name)
        self._router.named(route, kwargs["request_id"])

        async def ask() -> Any:
            return await self._call(method, args, kwargs)

        result = await self._with_another(ask)
        if not hasattr(result, "__anext__"):
            self._router.answered(self._route, streamed=False)
            return result
        return self._stream(result, ask)

    async def _stream(
        self, iterator: AsyncIterator[Any], ask: Callable[[], Awaitable[Any]]
    ) -> AsyncIterator[Any]:
        iterators = [iterator]

        async def first() -> Any:
            if not iterators:
                iterators.append(await ask())
            try:
                return await self._unless_lost(_next(iterators[0]))
            except Exception:
                await _close(iterators.pop())
                raise

        try:
            item = await self._with_another(first)
            self._router.answered(self._route, streamed=True)
            while item is not _END:
                yield item
                item = await _next(iterators[0])
        finally:
            for each in iterators:
                await _close(each)

    async def _with_another(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask the replica, and if that fails another one."""
        try:
            return await ask()
        except Exception as error:
            full = _FULL in str(error)
            if not (full or _is_lost(error)) or not await self._router.move(self._route, full):
                raise
            logger.warning(
                "request goes to another replica: replica=%s error=%r", self._route.replica, error
            )
            self._model = await self._connect(self._route.replica)
            return await ask()

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await self._unless_lost(getattr(self._model, method)(*args, **kwargs))

    async def _unless_lost(self, call: Awaitable[_T]) -> _T:
        """Raises ReplicaLostError once the tracker has lost the replica."""
        answering = asyncio.ensure_future(call)
        losing = asyncio.ensure_future(self._route.lost.wait())
        try:
            await asyncio.wait({answering, losing}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            raise ReplicaLostError(f"replica {self._route.replica} is lost")
        finally:
            losing.cancel()
            answering.cancel()


_END = object()


async def _next(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator, _END)


def _is_lost(error: Exception) -> bool:
    names = {each.__name__ for each in type(error).__mro__}
    return isinstance(error, (*_GONE, ReplicaLostError)) or _DEAD in names


async def _close(iterator: Any) -> None:
    """An xoscar iterator that is collected unclosed would block the event loop. Its replica may be
    gone."""
    with anyio.CancelScope(shield=True), suppress(Exception):
        if hasattr(iterator, "aclose"):
            await iterator.aclose()
        else:
            iterator._gc_destroy = False
            await iterator.destroy()
