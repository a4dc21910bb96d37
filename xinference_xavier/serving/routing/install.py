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

from xinference_xavier.errors import NOT_FOUND_HEADER, PrefixNotFoundError
from xinference_xavier.frontend.asked import Keep
from xinference_xavier.frontend.model_router import AT_LIMIT, ModelRouter, QueueFullError
from xinference_xavier.frontend.request_body import ClientGoneError
from xinference_xavier.frontend.routers import Routers
from xinference_xavier.runtime.deadline import within
from xinference_xavier.serving.prefixes.kept_model import KeptModel
from xinference_xavier.serving.prefixes.named_model import NamedModel
from xinference_xavier.serving.routing.middleware import Asked, RoutingMiddleware, current
from xinference_xavier.serving.routing.routed_model import RoutedModel

logger = logging.getLogger(__name__)

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
    restful_api.require_model = routing_require(original, routers, prefixes)
    context.app.add_middleware(RoutingMiddleware)
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

        async def connect(replica: str) -> Any:
            supervisor = await get_supervisor_ref()
            return await within(_CONNECT_DEADLINE, supervisor.xavier_replica(replica))

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


async def _routed(
    asked: Asked, router: ModelRouter, connect: Any, before: Mapping[str, Any] | None
) -> RoutedModel | None:
    try:
        route = await asked.route_by(router, before)
    except QueueFullError as error:
        headers = {"Retry-After": str(error.retry_after)}
        raise HTTPException(429, AT_LIMIT, headers) from error
    except ClientGoneError as error:
        raise HTTPException(_CLIENT_CLOSED_REQUEST) from error
    while route is not None:
        try:
            return RoutedModel(router, route, await connect(route.replica), connect)
        except Exception:
            logger.warning("replica %s does not take requests", route.replica, exc_info=True)
            if not await router.move(route):
                asked.end()
                return None
    return None
