"""What the REST routes have in common: failures as HTTP answers, who may ask a model, and for which
tenant."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from fastapi import HTTPException, Request, Security
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from xinference_xavier.errors import NOT_FOUND_HEADER, ExplainError, NotFoundError
from xinference_xavier.frontend.prefix import check_tenant
from xinference_xavier.runtime.aio import UNREACHABLE
from xinference_xavier.serving import seam
from xinference_xavier.serving.bodies import Refusal
from xinference_xavier.stats.answers import SALT_HEADER

MODEL = "/v1/xavier/{model_uid}"
READ_SCOPE = "models:list"
ASK_SCOPE = "models:read"
WRITE_SCOPE = "models:write"
_T = TypeVar("_T")
Access = Callable[[Request, str], None]
"""Raises HTTPException unless the request may ask the model of that uid."""


EVENTS = "text/event-stream"
"""The answer of a route that streams."""
_REFUSALS = {
    400: "The body or a header is malformed.",
    401: "No login, or the token has expired.",
    403: "A right is missing.",
    404: "No such model shares its cache, or it has no prefix of that name.",
    413: "The body of a named prefix is too long.",
    500: "An extension that supplies cache_salt fails.",
    503: "Supervisor or tracker does not answer, or the names of prefixes cannot be read.",
}


def add_route(
    context: Any,
    method: str,
    path: str,
    scope: str,
    endpoint: Callable[..., Awaitable[Response]],
    answer: Any,
    body: type[BaseModel] | None = None,
    status: int = 200,
) -> None:
    """`context` is xinference's APIExtensionContext. `answer` (a class, or `EVENTS`) and `body` are
    for the documentation: endpoints read a body themselves, because a refusal names the remedy."""
    guard = [Security(context.auth_service, scopes=[scope])] if context.auth_enabled else []
    responses: dict[int | str, dict[str, Any]] = {
        code: {"model": Refusal, "description": text} for code, text in _REFUSALS.items()
    }
    described: dict[str, Any] = {}
    if body is not None:
        content = {"application/json": {"schema": body.model_json_schema()}}
        described["requestBody"] = {"content": content, "required": True}
    if answer == EVENTS:
        responses[status] = {"content": {EVENTS: {"schema": {"type": "string"}}}}
    context.router.add_api_route(
        path,
        endpoint,
        methods=[method],
        dependencies=guard,
        openapi_extra=described,
        response_model=None if answer == EVENTS else answer,
        response_class=Response if answer == EVENTS else JSONResponse,
        responses=responses,
        status_code=status,
        tags=["xavier"],
    )


def model_access(context: Any) -> Access:
    """Only those who may ask the model may learn what it has computed. `context` is xinference's
    APIExtensionContext."""
    auth_service, guarded = context.auth_service, context.auth_enabled

    def check(request: Request, model_uid: str) -> None:
        if guarded and not seam.may_ask(auth_service, request, model_uid):
            raise HTTPException(403, f"the API key is not valid for model {model_uid!r}")

    return check


def tenant_of(request: Request, given: object) -> str:
    """The `cache_salt` with which xinference computes what this request asks: that of an extension
    which supplies salts, or else the one that the client has `given`. Empty if there is none.
    Raises HTTPException."""
    try:
        supplied = seam.supplied_salt(request)
    except Exception:
        # Like xinference, without the error: it may contain credentials.
        raise HTTPException(500, "the extension that supplies cache_salt fails") from None
    try:
        return check_tenant(given if supplied is None else supplied.value)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


def tenant_of_header(request: Request) -> str:
    """The same where a header has what the client gives. Raises HTTPException."""
    if "cache_salt" in request.query_params:
        raise HTTPException(
            400,
            f"cache_salt is in the URL, which servers write to logs; use the header {SALT_HEADER}",
        )
    given = request.headers.get(SALT_HEADER)
    if given is None:
        return tenant_of(request, None)
    try:
        salt = unquote_to_bytes(given.encode("latin-1")).decode()
    except UnicodeDecodeError as error:
        raise HTTPException(
            400, f"{SALT_HEADER} is not UTF-8 ({error}); percent-encode it"
        ) from error
    return tenant_of(request, salt)


async def answered_for(model_uid: str, work: Awaitable[_T]) -> _T:
    return await answered(f"the tracker of {model_uid!r}", work)


async def answered(who: str, work: Awaitable[_T]) -> _T:
    """Await `work` and turn its failures into HTTP answers."""
    try:
        return await work
    except NotFoundError as error:
        # Not str(error), which begins with the address that xoscar adds.
        raise HTTPException(404, error.reason, {NOT_FOUND_HEADER: "model"}) from error
    except ExplainError as error:
        raise HTTPException(503, error.reason) from error
    except UNREACHABLE as error:
        raise HTTPException(503, f"{who} does not answer") from error
