"""The REST routes; docs/api.md has their answers, scopes and status codes."""

import asyncio
from functools import partial
from typing import Annotated, Any

import xxhash
from fastapi import HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response

from xinference_xavier.frontend.question import SALT
from xinference_xavier.protocol.tracker import Settings, pack_question
from xinference_xavier.runtime.aio import in_thread
from xinference_xavier.serving.bodies import Change, Question, Weights
from xinference_xavier.serving.gateway import MAX_AGE, ModelReport, TrackerGateway, cluster_info
from xinference_xavier.serving.rest import (
    ASK_SCOPE,
    MODEL,
    READ_SCOPE,
    WRITE_SCOPE,
    Access,
    add_route,
    answered,
    answered_for,
    model_access,
    tenant_of,
)
from xinference_xavier.tracker.fanout import EXPLAIN_DEADLINE


def add_cluster(context: Any, trackers: TrackerGateway) -> None:
    """The only route where the extension is off. `context` is xinference's APIExtensionContext."""

    async def cluster() -> JSONResponse:
        """What every process of the cluster runs, for `doctor`."""
        return JSONResponse(await answered("the supervisor", cluster_info(trackers)))

    add_route(context, "GET", "/v1/cluster/xavier", READ_SCOPE, cluster)


def add_routes(context: Any, trackers: TrackerGateway) -> None:
    """`context` is xinference's APIExtensionContext."""
    routes = _Routes(trackers, model_access(context))
    add = partial(add_route, context)
    add_cluster(context, trackers)
    add("GET", "/v1/xavier", READ_SCOPE, routes.all_models)
    add("GET", MODEL, READ_SCOPE, routes.one_model)
    add("GET", f"{MODEL}/events", READ_SCOPE, routes.events)
    add("GET", f"{MODEL}/history", READ_SCOPE, routes.history)
    add("PATCH", MODEL, WRITE_SCOPE, routes.change)
    add("PUT", f"{MODEL}/weights", WRITE_SCOPE, routes.set_weights)
    add("POST", f"{MODEL}/explain", ASK_SCOPE, routes.explain)
    add("POST", f"{MODEL}/flush", WRITE_SCOPE, routes.flush)


class _Routes:
    def __init__(self, trackers: TrackerGateway, access: Access) -> None:
        self._trackers = trackers
        self._access = access

    async def all_models(self, request: Request) -> JSONResponse:
        """The reports of all models that share."""
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

    async def one_model(self, model_uid: str, request: Request) -> Response:
        """The report of a model, unless the caller has it."""
        known = request.headers.get("if-none-match")
        making = (
            self._trackers.report(model_uid)
            if known is None
            else self._trackers.shared_report(model_uid, MAX_AGE)
        )
        report = await answered_for(model_uid, making)
        body = await in_thread(report.json, partial(self._may_ask, request))
        etag = f'"{xxhash.xxh3_128_hexdigest(body)}"'
        headers = {"etag": etag, "cache-control": "private, no-cache", "vary": "authorization"}
        if known == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="application/json")

    async def events(self, model_uid: str, after: Annotated[int, Query(ge=0)] = 0) -> JSONResponse:
        """The latest events of a model, or those of them after a number."""
        records = await answered_for(model_uid, self._trackers.call(model_uid, "events", after))
        last = records[-1].number if records else after
        return JSONResponse({"last": last, "events": [record.event for record in records]})

    async def history(self, model_uid: str) -> Response:
        """Samples of the last hour."""
        samples = await answered_for(model_uid, self._trackers.call(model_uid, "history"))
        return Response(samples, media_type="application/json")

    async def change(self, model_uid: str, change: Change, request: Request) -> JSONResponse:
        """Change settings of a model that runs."""
        report = await answered_for(model_uid, self._change(model_uid, change))
        return JSONResponse(self._seen(request, report))

    async def _change(self, model_uid: str, change: Change) -> ModelReport:
        for name, value in change.settings.items():
            call = self._trackers.call(model_uid, f"set_{name}", value, change.for_s)
            settings: Settings = await call
        report = await self._trackers.report(model_uid)
        if settings.routing is not None:
            # This process learns of it from the tracker, perhaps a moment later.
            report.public["routing"]["mode"] = settings.routing
        return report

    async def set_weights(self, model_uid: str, weights: Weights, request: Request) -> JSONResponse:
        """Let replicas share again after a reset, by the name of their weights."""
        return await self._ask_all(request, model_uid, "set_weights_version", weights.version)

    async def flush(self, model_uid: str, request: Request) -> JSONResponse:
        """Empty the pools of all replicas."""
        return await self._ask_all(request, model_uid, "flush")

    async def _ask_all(
        self, request: Request, model_uid: str, method: str, *args: object
    ) -> JSONResponse:
        answers = await answered_for(model_uid, self._trackers.call(model_uid, method, *args))
        report = await answered_for(model_uid, self._trackers.report(model_uid))
        return JSONResponse({**self._seen(request, report), "answers": answers})

    async def explain(self, model_uid: str, body: Question, request: Request) -> JSONResponse:
        """The places of the chunks of a prompt, if the caller asks it."""
        self._access(request, model_uid)
        tenant = tenant_of(request, body.cache_salt)
        question = {**body.question, SALT: tenant} if tenant else body.question
        packed = await in_thread(pack_question, question)
        deadline = EXPLAIN_DEADLINE + 1
        explaining = self._trackers.call(model_uid, "explain", packed, deadline=deadline)
        return JSONResponse(await answered_for(model_uid, explaining))
