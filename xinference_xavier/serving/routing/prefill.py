"""Has a prefill replica compute the prompt of a request that another replica answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio

from xinference_xavier.frontend.model_router import ModelRouter, Route
from xinference_xavier.runtime.aio import within

logger = logging.getLogger(__name__)

_PREFILL_TIMEOUT, _ABORT_TIMEOUT = 600.0, 5.0  # seconds
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
    """Until the prompt is computed; if cancelled, the replica stops. A failure is counted, and the
    replica that answers notices it."""
    request = f"{kwargs['request_id']}:prefill"
    router.named(route, request)
    asked, *rest = args
    call = {**kwargs, "request_id": request}
    if rest:
        rest[0] = one_token(rest[0])
    else:
        call["generate_config"] = one_token(call.get("generate_config"))
    model, failed = None, False
    try:
        model = await connect(route.prefill_replica)
        await within(_PREFILL_TIMEOUT, getattr(model, method)(asked, *rest, **call))
    except asyncio.CancelledError:
        if model is not None:
            with anyio.CancelScope(shield=True), suppress(Exception):
                await within(_ABORT_TIMEOUT, model.abort_request(request))
        raise
    except Exception as error:
        failed = True
        logger.warning(
            "a prefill failed, so another replica does it: replica=%s error=%r",
            route.prefill_replica,
            error,
        )
    finally:
        router.prefilled(route, failed)
