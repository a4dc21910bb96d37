"""Puts routing between xinference's text routes and the replicas of a model.

xinference 4.1 and 4.0 have no seam for it. Their routes find a model by the module's function
`require_model`, which is wrapped. If that is missing, requests go in turn, as without us.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import HTTPException

from xinference_xavier.errors import NOT_FOUND_HEADER, PrefixNotFoundError
from xinference_xavier.frontend.asked import NamedPrefix
from xinference_xavier.frontend.model_router import AT_LIMIT, ModelRouter, QueueFullError
from xinference_xavier.frontend.request_body import ClientGoneError
from xinference_xavier.frontend.routers import Routers
from xinference_xavier.runtime.deadline import within
from xinference_xavier.serving.prefixes.named_model import NamedModel
from xinference_xavier.serving.routing.middleware import Asked, RoutingMiddleware, current
from xinference_xavier.serving.routing.routed_model import RoutedModel

logger = logging.getLogger(__name__)

_CONNECT_DEADLINE = 5.0  # seconds
_CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody sees it
Require = Callable[..., Awaitable[Any]]


ContentOf = Callable[[str, str, str], Awaitable[Mapping[str, Any]]]
"""The content of a prefix: the model's uid, tenant and name."""


def add_routing(context: Any, routers: Routers, content_of: ContentOf) -> None:
    """`context` is xinference's APIExtensionContext."""
    from xinference.api import restful_api

    original = getattr(restful_api, "require_model", None)
    if original is None:
        logger.warning("this xinference gives requests to replicas in turn: no require_model")
        return
    restful_api.require_model = routing_require(original, routers, content_of)
    context.app.add_middleware(RoutingMiddleware)
    routers.in_use = True


def routing_require(original: Require, routers: Routers, content_of: ContentOf) -> Require:
    @functools.wraps(original)
    async def require_model(get_supervisor_ref: Any, model_uid: str, *args: Any) -> Any:
        asked = current()
        if asked is None:
            return await original(get_supervisor_ref, model_uid, *args)
        prefix, content = await asked.prefix(), None
        if prefix is not None:
            content = await _content(content_of, model_uid, prefix)

        async def connect(replica: str) -> Any:
            supervisor = await get_supervisor_ref()
            return await within(_CONNECT_DEADLINE, supervisor.xavier_replica(replica))

        model, router = None, routers.get(model_uid)
        if router is not None:
            model = await _routed(asked, router, connect, content)
        model = model or await original(get_supervisor_ref, model_uid, *args)
        return model if prefix is None else NamedModel(model, prefix.name, content)

    return require_model


async def _content(content_of: ContentOf, model_uid: str, prefix: NamedPrefix) -> Mapping[str, Any]:
    try:
        return await content_of(model_uid, prefix.tenant, prefix.name)
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
