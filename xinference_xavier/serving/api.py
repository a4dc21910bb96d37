"""The REST routes; docs/api.md has their answers, scopes and status codes."""

import asyncio
from functools import partial
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse

from xinference_xavier.protocol.tracker import MAX_QUESTION_BYTES, Settings, unpack_question
from xinference_xavier.runtime.validate import first_reason
from xinference_xavier.serving.answers import (
    ASK_SCOPE,
    EVENTS,
    MODEL,
    READ_SCOPE,
    WRITE_SCOPE,
    Access,
    add_route,
    answered,
    answered_for,
    model_access,
)
from xinference_xavier.serving.bodies import (
    Body,
    Change,
    Cluster,
    Explained,
    Flushed,
    Joined,
    Question,
    Report,
    Reports,
    Weights,
)
from xinference_xavier.serving.gateway import ModelReport, TrackerGateway, cluster_info
from xinference_xavier.serving.sse import Listeners, Stream, live, notice_servers
from xinference_xavier.tracker.fanout import EXPLAIN_DEADLINE

_MAX_CHANGE = 1 << 10


def add_cluster(context: Any, trackers: TrackerGateway) -> None:
    """The only route where the extension is off. `context` is xinference's APIExtensionContext."""

    async def cluster() -> JSONResponse:
        """What every process of the cluster runs, for `doctor`."""
        return JSONResponse(await answered("the supervisor", cluster_info(trackers)))

    add_route(context, "GET", "/v1/cluster/xavier", READ_SCOPE, cluster, Cluster)


def add_routes(context: Any, trackers: TrackerGateway) -> None:
    """`context` is xinference's APIExtensionContext."""
    notice_servers()
    routes = _Routes(trackers, model_access(context))
    add = partial(add_route, context)
    add_cluster(context, trackers)
    add("GET", "/v1/xavier", READ_SCOPE, routes.all_models, Reports)
    add("GET", MODEL, READ_SCOPE, routes.one_model, Report)
    add("GET", f"{MODEL}/events", READ_SCOPE, routes.events, EVENTS)
    add("PATCH", MODEL, WRITE_SCOPE, routes.change, Report, Change)
    add("PUT", f"{MODEL}/weights", WRITE_SCOPE, routes.set_weights, Joined, Weights)
    add("POST", f"{MODEL}/explain", ASK_SCOPE, routes.explain, Explained, Question)
    add("POST", f"{MODEL}/flush", WRITE_SCOPE, routes.flush, Flushed)


class _Routes:
    def __init__(self, trackers: TrackerGateway, access: Access) -> None:
        self._trackers = trackers
        self._access = access
        self._listeners = Listeners()

    async def all_models(self, request: Request) -> JSONResponse:
        """Report of every model that shares."""
        uids = await answered("the supervisor", self._trackers.models())
        found = await asyncio.gather(*map(self._report_or_reason, uids))
        answers = dict(zip(uids, found, strict=True))
        reports = [
            self._seen(request, answer)
            for answer in answers.values()
            if isinstance(answer, ModelReport)
        ]
        unavailable = {uid: answer for uid, answer in answers.items() if isinstance(answer, str)}
        return JSONResponse({"models": reports, "unavailable": unavailable})

    async def _report_or_reason(self, model_uid: str) -> ModelReport | str:
        try:
            return await answered_for(model_uid, self._trackers.report(model_uid))
        except HTTPException as error:
            return str(error.detail)

    def _may_ask(self, request: Request, model_uid: str) -> bool:
        try:
            self._access(request, model_uid)
        except HTTPException:
            return False
        return True

    def _seen(self, request: Request, report: ModelReport) -> dict[str, Any]:
        return report.seen_by(partial(self._may_ask, request))

    async def one_model(self, model_uid: str, request: Request) -> JSONResponse:
        """Report of a model."""
        report = await answered_for(model_uid, self._trackers.report(model_uid))
        return JSONResponse(self._seen(request, report))

    async def events(self, model_uid: str, request: Request) -> Stream:
        """A model's recent events, new ones, and a report every second."""
        # A later error would be part of the stream.
        await answered_for(model_uid, self._trackers.find(model_uid))
        messages = live(self._trackers, model_uid, partial(self._may_ask, request))
        return Stream(self._listeners, messages)

    async def change(self, model_uid: str, request: Request) -> JSONResponse:
        """Change settings of a model that runs."""
        change = _read(Change, await request.body())
        report = await answered_for(model_uid, self._change(model_uid, change))
        return JSONResponse(self._seen(request, report))

    async def _change(self, model_uid: str, change: Change) -> ModelReport:
        for name, value in change.model_dump(exclude_none=True, exclude={"for_s"}).items():
            call = self._trackers.call(model_uid, f"set_{name}", value, change.for_s)
            settings: Settings = await call
        report = await self._trackers.report(model_uid)
        if settings.routing is not None:
            # This process learns of it from the tracker, perhaps a moment later.
            report.public["routing"]["mode"] = settings.routing
        return report

    async def set_weights(self, model_uid: str, request: Request) -> JSONResponse:
        """Let replicas share again after a reset, by the name of their weights."""
        version = _read(Weights, await request.body()).version
        return await self._ask_all(request, model_uid, "set_weights_version", version)

    async def flush(self, model_uid: str, request: Request) -> JSONResponse:
        """Empty the pools of all replicas."""
        return await self._ask_all(request, model_uid, "flush")

    async def _ask_all(
        self, request: Request, model_uid: str, method: str, *args: object
    ) -> JSONResponse:
        answers = await answered_for(model_uid, self._trackers.call(model_uid, method, *args))
        report = await answered_for(model_uid, self._trackers.report(model_uid))
        return JSONResponse({**self._seen(request, report), "answers": answers})

    async def explain(self, model_uid: str, request: Request) -> JSONResponse:
        """Where the chunks of a prompt are."""
        self._access(request, model_uid)
        # A long one would hold up the event loop.
        await asyncio.to_thread(_checked_question, body := await request.body())
        deadline = EXPLAIN_DEADLINE + 1
        explaining = self._trackers.call(model_uid, "explain", body, deadline=deadline)
        return JSONResponse(await answered_for(model_uid, explaining))


_BodyT = TypeVar("_BodyT", bound=Body)


def _read(kind: type[_BodyT], body: bytes) -> _BodyT:
    """Raises HTTPException. An empty body is refused, too."""
    try:
        _check_size(body, _MAX_CHANGE)
        found = kind.model_validate_json(body)
        if not found.model_dump(exclude_none=True, exclude={"for_s"}):
            raise ValueError("nothing is given")
        return found
    except ValueError as error:
        fields = ", ".join(kind.model_fields)
        reason = f"the body must be an object with {fields}: {first_reason(error)}"
        raise HTTPException(400, reason) from error


def _check_size(body: bytes, most: int) -> None:
    """Refuse a body that is too long before it is parsed."""
    if len(body) > most:
        raise ValueError(f"it has {len(body)} bytes")


def _checked_question(body: bytes) -> dict[str, Any]:
    try:
        return unpack_question(body)
    except ValueError as error:
        raise HTTPException(
            400,
            'the body must be {"prompt": "<text>"} or {"messages": [{"role": …, "content": …}, …]} '
            f"of at most {MAX_QUESTION_BYTES} bytes: {error}",
        ) from error
