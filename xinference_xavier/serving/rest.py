"""What the REST routes have in common: failures as HTTP answers, who may ask a model, and for which
tenant."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from inspect import signature
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from fastapi import HTTPException, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Message, Receive

from xinference_xavier.errors import NOT_FOUND_HEADER, ExplainError, NotFoundError, shown
from xinference_xavier.frontend.prefix import check_tenant
from xinference_xavier.runtime.aio import UNREACHABLE
from xinference_xavier.serving import seam
from xinference_xavier.serving.bodies import Body
from xinference_xavier.stats.answers import SALT_HEADER

MODEL = "/v1/xavier/{model_uid}"
READ_SCOPE = "models:list"
ASK_SCOPE = "models:read"
WRITE_SCOPE = "models:write"
_T = TypeVar("_T")
Access = Callable[[Request, str], None]
"""Raises HTTPException unless the request may ask the model of that uid."""


MAX_BODY = 9 << 20
"""Bytes: a prefix may have as many as a question, and its other fields."""


class Route(APIRoute):
    """A route of ours. It refuses a wrong body or query with status 400, the value, the reason and
    the remedy, and stops reading a body that is longer than `MAX_BODY`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_or_refuse(request: Request) -> Response:
            try:
                return await handle(Request(request.scope, _limited(request.receive)))
            except RequestValidationError as error:
                raise HTTPException(400, self._why(error.errors()[0])) from error

        return handle_or_refuse

    def _why(self, fault: Mapping[str, Any]) -> str:
        if fault["type"] == "value_error":  # one of ours, complete
            return str(fault["ctx"]["error"])
        if fault["type"] == "json_invalid":
            found = str(fault["ctx"]["error"])
        else:
            name = ".".join(map(str, fault["loc"][1:])) or "body"
            found = f"{name}={shown(fault['input'])}: {fault['msg']}"
        if fault["loc"][0] == "query":
            return found
        kinds = (each.annotation for each in signature(self.endpoint).parameters.values())
        (body,) = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Body))
        fields = ", ".join(body.model_fields)
        return f"the body must be an object with {fields}, as application/json: {found}"


def _limited(receive: Receive) -> Receive:
    """`receive` until a body is too long. Then it raises HTTPException."""
    length = 0

    async def receive_some() -> Message:
        nonlocal length
        message = await receive()
        length += len(message.get("body", b""))
        if length > MAX_BODY:
            raise HTTPException(413, f"the body has more than {MAX_BODY} bytes; send a shorter one")
        return message

    return receive_some


def add_route(
    context: Any,
    method: str,
    path: str,
    scope: str,
    endpoint: Callable[..., Awaitable[Response]],
    status: int = 200,
) -> None:
    """`context` is xinference's APIExtensionContext."""
    guard = [Security(context.auth_service, scopes=[scope])] if context.auth_enabled else []
    context.router.add_api_route(
        path,
        endpoint,
        methods=[method],
        dependencies=guard,
        status_code=status,
        tags=["xavier"],
        route_class_override=Route,
    )


def model_access(context: Any) -> Access:
    """Only those who may ask the model may learn what it has computed. `context` is xinference's
    APIExtensionContext."""

    def check(request: Request, model_uid: str) -> None:
        if context.auth_enabled and not seam.may_ask(context.auth_service, request, model_uid):
            raise HTTPException(403, f"the API key is not valid for model {model_uid!r}")

    return check


def tenant_of(request: Request, given: object) -> str:
    """The `cache_salt` with which xinference computes what this request asks: that of an extension
    which supplies salts, or else the one that the client has `given`. Empty if there is none.
    Raises HTTPException."""
    seam.note_own_salt(request, given)
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
