"""Puts routing between xinference's text routes and the replicas of a model.

xinference 4.1 and 4.0 have no seam for it. Their routes find a model by the module's function
`require_model`, which is wrapped. If that is missing, requests go in turn, as without us.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from fastapi import HTTPException

from xinference_xavier.errors import (
    NOT_FOUND_HEADER,
    PrefixNotFoundError,
    ReplicaNotServingError,
    SupervisorError,
)
from xinference_xavier.frontend.model_router import AT_LIMIT, ModelRouter, QueueFullError, Routers
from xinference_xavier.frontend.question import Keep
from xinference_xavier.runtime.aio import within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.serving.answers import add_middleware
from xinference_xavier.serving.prefixes.kept_model import KeptModel
from xinference_xavier.serving.prefixes.named_model import NamedModel, WrongKindError, check
from xinference_xavier.serving.routing.middleware import (
    TEXT_ENDPOINTS,
    Asked,
    ClientGoneError,
    RoutingMiddleware,
    current,
    remember_texts,
)
from xinference_xavier.serving.routing.routed_model import AtLimitError, Connect, RoutedModel

logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)

_CONNECT_DEADLINE = 5.0  # seconds
_CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody sees it
Require = Callable[..., Awaitable[Any]]


class Prefixes(Protocol):
    """What requests may begin with."""

    async def content_of(self, model_uid: str, tenant: str, name: str) -> Mapping[str, Any]:
        """Raises PrefixNotFoundError."""


def add_routing(context: Any, routers: Routers, prefixes: Prefixes) -> None:
    """`context` is xinference's APIExtensionContext."""
    from xinference.api import restful_api

    original = getattr(restful_api, "require_model", None)
    if original is None:
        logger.warning("this xinference gives requests to replicas in turn: no require_model")
        return
    missing = TEXT_ENDPOINTS - remember_texts(context.router)
    if missing:
        logger.warning(
            "requests go to replicas in turn where this xinference has no: %s",
            ", ".join(sorted(missing)),
        )
    restful_api.require_model = routing_require(original, routers, prefixes)
    add_middleware(context, RoutingMiddleware)
    routers.in_use = True


def routing_require(original: Require, routers: Routers, prefixes: Prefixes) -> Require:
    @functools.wraps(original)
    async def require_model(get_supervisor_ref: Any, model_uid: str, *args: Any) -> Any:
        asked = current()
        if asked is None:
            return await original(get_supervisor_ref, model_uid, *args)
        keep, content = await asked.keep(), None
        if keep.name:
            content = await _content(prefixes, model_uid, keep)
            try:
                check(keep.name, content, await asked.body())
            except WrongKindError as error:  # xinference makes a 500 of what its model raises
                raise HTTPException(400, str(error)) from error

        async def connect(replica: str) -> Any:
            return await _model_of(get_supervisor_ref, replica)

        router = routers.get(model_uid)
        model: Any = None
        if router is not None:
            model = await _routed(asked, router, connect, content)
        model = model or await original(get_supervisor_ref, model_uid, *args)
        if router is not None and (keep.marks or keep.prompt_s):
            model = KeptModel(model, keep.prompt_s)
        return model if content is None else NamedModel(model, keep.name, content)

    return require_model


async def _content(prefixes: Prefixes, model_uid: str, keep: Keep) -> Mapping[str, Any]:
    try:
        return await prefixes.content_of(model_uid, keep.tenant, keep.name)
    except PrefixNotFoundError as error:
        raise HTTPException(404, error.reason, {NOT_FOUND_HEADER: "prefix"}) from error


async def _model_of(get_supervisor_ref: Any, replica: str) -> Any:
    """A reference to the model actor of a replica. Raises ReplicaNotServingError; SupervisorError
    says nothing about the replica."""
    try:
        supervisor = await get_supervisor_ref()
        call = supervisor.get_model(replica, xavier_replica=True)
        model = await within(_CONNECT_DEADLINE, call)
    except ReplicaNotServingError:
        raise
    except Exception as error:
        raise SupervisorError(
            f"xinference's supervisor does not say where replica {replica} is ({error!r})"
        ) from error
    return _correlated(model)


def _correlated(model: Any) -> Any:
    """Lets the model's log name the request, as xinference's own `require_model` does."""
    from xinference.api.model_request_logging import get_current_model_request_id
    from xinference.core.rpc_context import correlate_model_ref

    return correlate_model_ref(model, get_current_model_request_id())


async def _routed(
    asked: Asked, router: ModelRouter, connect: Connect, before: Mapping[str, Any] | None
) -> RoutedModel | None:
    """None where requests go in turn."""
    try:
        route = await asked.route_by(router, before)
        while route is not None:
            try:
                return RoutedModel(router, route, await connect(route.replica), connect)
            except ReplicaNotServingError as error:
                logger.warning("request goes to another replica: error=%r", error)
                if not await router.move(route):
                    break
    except QueueFullError as error:
        raise AtLimitError(AT_LIMIT, error.retry_after) from error
    except ClientGoneError as error:
        raise HTTPException(_CLIENT_CLOSED_REQUEST) from error
    except SupervisorError as error:
        _log.warn("supervisor", "requests go to the replicas in turn: %s", error)
    asked.end()
    return None
