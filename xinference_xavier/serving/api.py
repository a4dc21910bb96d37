"""The REST routes; docs/api.md has their answers, scopes and status codes."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse

from xinference_xavier.frontend.question import prompt_text
from xinference_xavier.protocol.tracker import (
    MAX_QUESTION_BYTES,
    MAX_WEIGHTS_VERSION,
    check_question,
    check_routing,
    check_switch,
    check_weights_version,
)
from xinference_xavier.serving.answers import (
    ASK_SCOPE,
    MODEL,
    READ_SCOPE,
    WRITE_SCOPE,
    Access,
    add_route,
    answered,
    answered_for,
    model_access,
)
from xinference_xavier.serving.gateway import TrackerGateway, cluster_info
from xinference_xavier.serving.sse import Filter, Listeners, Stream, live, notice_servers
from xinference_xavier.tracker.fanout import EXPLAIN_DEADLINE

MAX_CHANGE = 1 << 10
MAX_QUESTION = MAX_QUESTION_BYTES + (1 << 20)
"""Bytes of a body; it may have spaces that do not count."""


def add_routes(context: Any, trackers: TrackerGateway) -> None:
    """`context` is xinference's APIExtensionContext."""
    notice_servers()
    routes = _Routes(trackers, model_access(context))
    add_route(context, "GET", "/v1/xavier", READ_SCOPE, routes.all_models)
    add_route(context, "GET", "/v1/xavier_cluster", READ_SCOPE, routes.cluster)
    add_route(context, "GET", MODEL, READ_SCOPE, routes.one_model)
    add_route(context, "GET", f"{MODEL}/events", READ_SCOPE, routes.events)
    add_route(context, "POST", MODEL, WRITE_SCOPE, routes.change)
    add_route(context, "POST", f"{MODEL}/explain", ASK_SCOPE, routes.explain)
    add_route(context, "POST", f"{MODEL}/flush", WRITE_SCOPE, routes.flush)


class _Routes:
    def __init__(self, trackers: TrackerGateway, access: Access) -> None:
        self._trackers = trackers
        self._access = access
        self._listeners = Listeners()

    async def all_models(self, request: Request) -> JSONResponse:
        uids = await answered("the supervisor", self._trackers.models())
        answers = await asyncio.gather(*map(self._report_or_reason, uids))
        reports = [
            self._visible(request, uid)(answer)
            for uid, answer in zip(uids, answers, strict=True)
            if isinstance(answer, dict)
        ]
        unavailable = {
            uid: answer
            for uid, answer in zip(uids, answers, strict=True)
            if isinstance(answer, str)
        }
        return JSONResponse({"models": reports, "unavailable": unavailable})

    async def _report_or_reason(self, model_uid: str) -> dict[str, Any] | str:
        try:
            return await answered_for(model_uid, self._trackers.report(model_uid))
        except HTTPException as error:
            return str(error.detail)

    def _visible(self, request: Request, model_uid: str) -> Filter:
        """What the caller may see of a model's report: names are texts of those who may ask it."""
        try:
            self._access(request, model_uid)
        except HTTPException:
            return lambda report: {**report, "prefixes": []}
        return lambda report: report

    async def cluster(self) -> JSONResponse:
        return JSONResponse(await answered("the supervisor", cluster_info(self._trackers)))

    async def one_model(self, model_uid: str, request: Request) -> JSONResponse:
        report = await answered_for(model_uid, self._trackers.report(model_uid))
        return JSONResponse(self._visible(request, model_uid)(report))

    async def events(self, model_uid: str, request: Request) -> Stream:
        # A later error would be part of the stream.
        await answered_for(model_uid, self._trackers.find(model_uid))
        return Stream(
            self._listeners, live(self._trackers, model_uid, self._visible(request, model_uid))
        )

    async def change(self, model_uid: str, request: Request) -> JSONResponse:
        change = _checked_change(await request.body())
        return JSONResponse(await answered_for(model_uid, self._change(model_uid, change)))

    async def _change(self, model_uid: str, change: Mapping[str, Any]) -> dict[str, Any]:
        if "enabled" in change:
            await self._trackers.call(model_uid, "set_enabled", change["enabled"])
            return await self._trackers.report(model_uid)
        if "routing" in change:
            await self._trackers.call(model_uid, "set_routing", change["routing"])
            report = await self._trackers.report(model_uid)
            # This process learns of it from the tracker, perhaps a moment later.
            return {**report, "routing": {**report["routing"], "mode": change["routing"]}}
        return await self._ask_all(model_uid, "set_weights_version", change["weights_version"])

    async def flush(self, model_uid: str) -> JSONResponse:
        return JSONResponse(await answered_for(model_uid, self._ask_all(model_uid, "flush")))

    async def _ask_all(self, model_uid: str, method: str, *args: object) -> dict[str, Any]:
        answers = await self._trackers.call(model_uid, method, *args)
        return {**await self._trackers.report(model_uid), "answers": answers}

    async def explain(self, model_uid: str, request: Request) -> JSONResponse:
        self._access(request, model_uid)
        # A long one would hold up the event loop.
        question = await asyncio.to_thread(_checked_question, await request.body())
        deadline = EXPLAIN_DEADLINE + 1
        explaining = self._trackers.call(model_uid, "explain", question, deadline=deadline)
        explanation = await answered_for(model_uid, explaining)
        router = self._trackers.routers.get(model_uid)
        forecasts = {}
        if router is not None:
            forecasts = router.explain(await asyncio.to_thread(prompt_text, question))
        return JSONResponse({**explanation, "routing": forecasts})


def _check_size(body: bytes, most: int) -> None:
    """Refuse a body that is too long before it is parsed."""
    if len(body) > most:
        raise ValueError(f"it has {len(body)} bytes")


def _checked_change(body: bytes) -> dict[str, Any]:
    with suppress(ValueError):  # refused below
        _check_size(body, MAX_CHANGE)
        change: dict[str, Any] = json.loads(body)
        match change:
            case {"enabled": enabled} if len(change) == 1:
                check_switch("enabled", enabled)
                return change
            case {"routing": routing} if len(change) == 1:
                check_routing(routing)
                return change
            case {"weights_version": version} if len(change) == 1:
                check_weights_version(version)
                return change
    raise HTTPException(
        400,
        'the body must be {"enabled": true}, {"enabled": false}, {"routing": "auto"}, {"routing": '
        '"backlog"}, {"routing": "off"} or {"weights_version": "<text of 1 to '
        f'{MAX_WEIGHTS_VERSION} characters>"}}',
    )


def _checked_question(body: bytes) -> dict[str, Any]:
    try:
        _check_size(body, MAX_QUESTION)
        question: dict[str, Any] = json.loads(body)
        check_question(question)
        return question
    except (ValueError, RecursionError) as error:
        raise HTTPException(
            400,
            'the body must be {"prompt": "<text>"} or {"messages": [{"role": …, "content": …}, …]} '
            f"of at most {MAX_QUESTION_BYTES} bytes: {error}",
        ) from error
