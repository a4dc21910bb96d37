"""xinference's own pages and ours, over answers that a test writes, without supervisor and engine.

`Stage` serves the export that xinference ships, our pages through the extension's interface, and
the few answers of xinference's API that its launch dialog needs.
"""

import asyncio
import copy
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
import xinference
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from xinference.api.frontend_static import mount_frontend

from tests.serving.supervisors import api_context
from xinference_xavier.serving.ui.routes import add_pages

TOKEN = "good"
_EXPORT = Path(xinference.__file__).parent / "ui" / "web" / "dist"
_SPEC = {
    "model_format": "pytorch",
    "model_size_in_billions": 1,
    "quantization": "none",
    "cache_status": True,
}
_ENGINES = {
    engine: [{**_SPEC, "model_name": "small", "quantizations": ["none"]}]
    for engine in ("vLLM", "Transformers")
}
_ANSWERS: dict[str, Any] = {
    "/v1/cluster/auth": {"auth": False},
    "/v1/cluster/ui_config": {"auth_advanced": False},
    "/v1/cluster/version": {"version": "4.1.0"},
    "/v1/cluster/devices": 0,
    "/v1/cluster/info": [],
    "/v1/cluster/system_settings": {},
    "/v1/model_favorites": [],
    "/v1/virtualenvs": {"list": []},
    "/v1/cache/models": {"list": []},
    "/v1/autostart/models/summary": [],
    "/v1/models": {"object": "list", "data": []},
    "/v1/engines/LLM/small": _ENGINES,
    "/v1/engines/small": _ENGINES,
    "/v1/model_registrations/LLM": [
        {
            "model_name": "small",
            "is_builtin": True,
            "version": 2,
            "model_lang": ["en"],
            "model_ability": ["generate", "chat"],
            "context_length": 16384,
            "model_description": "A small model",
            "model_specs": [_SPEC],
        }
    ],
}


class Stage:
    """`reports` has the models that share, by uid; pages see `happen` and `change` in a second.

    `posted` collects what pages post, as (path, body).
    """

    def __init__(self) -> None:
        self.reports: dict[str, dict[str, Any]] = {}
        self.history: dict[str, Any] = {"interval_s": 10, "samples": []}
        self.events: list[dict[str, Any]] = []
        self.posted: list[tuple[str, Any]] = []
        self.launch_history: list[dict[str, Any]] = []
        self.cluster: dict[str, Any] = {"models": {}}
        self.wrong_tokens: list[str] = []  # those that pages sent
        self.needs_token = False
        self.may_read = self.may_change = self.serves = True
        self.unavailable = False  # the tracker
        self._port = 0
        self._site = 0
        self._start()

    @property
    def address(self) -> str:
        """A new site for each test, because a browser may write the storage of the old one late."""
        return f"http://test{self._site}.localhost:{self._port}"

    @property
    def plain_address(self) -> str:
        """For clients that cannot resolve subdomains of localhost."""
        return f"http://127.0.0.1:{self._port}"

    def reset(self) -> None:
        """Restore the initial state, for the next test."""
        self._site += 1
        self.posted.clear()
        self.launch_history.clear()
        self.cluster = {"models": {}}
        self.wrong_tokens.clear()
        self.needs_token = self.unavailable = False
        self.may_read = self.may_change = self.serves = True
        self.history = {"interval_s": 10, "samples": []}
        self.events = []
        self.change(self.reports.clear)

    def share(self, report: dict[str, Any]) -> None:
        self.change(lambda: self.reports.update({report["model_uid"]: copy.deepcopy(report)}))

    def happen(self, event: dict[str, Any]) -> None:
        self.change(lambda: self.events.append(event))

    def change(self, work: Callable[[], object]) -> None:
        """Run `work` on the server's loop."""
        self._loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        """Stop like a killed server."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def restart(self) -> None:
        """Start again on the same port."""
        self._start()

    def _start(self) -> None:
        config = uvicorn.Config(
            self._app(), host="127.0.0.1", port=self._port, log_level="critical", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        running = threading.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            running.set()
            await self._server.serve([listener])

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()
        running.wait()

    def _app(self) -> FastAPI:
        context = api_context()
        app: FastAPI = context.app
        router = context.router
        add_pages(context)
        self._add_sharing(router)
        for path, answer in _ANSWERS.items():
            router.add_api_route(path, _giving(answer), methods=["GET"])
        router.add_api_route("/v1/launch_history", self._get_launch_history, methods=["GET"])
        for path in ("/v1/models", "/v1/launch_history", "/v1/autostart/models"):
            router.add_api_route(path, self._take, methods=["POST"])
        app.include_router(router)
        mount_frontend(app, _EXPORT)
        return app

    async def _get_launch_history(self) -> JSONResponse:
        return JSONResponse(self.launch_history)

    async def _take(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.posted.append((request.url.path, body))
        if request.url.path == "/v1/launch_history":
            now = "2026-11-21T00:00:00Z"
            self.launch_history.append({**body, "updated_at": now, "is_owner": True})
        return JSONResponse({"model_uid": body.get("model_uid") or body.get("model_name")})

    # The answers of serving/api.py

    def _add_sharing(self, router: APIRouter) -> None:
        async def get_models(request: Request) -> JSONResponse:
            self._check_rights(request)
            if self.unavailable:
                reasons = dict.fromkeys(self.reports, "the tracker does not answer")
                return JSONResponse({"models": [], "unavailable": reasons})
            return JSONResponse({"models": list(self.reports.values())})

        async def get_model(model_uid: str, request: Request) -> JSONResponse:
            self._check_rights(request)
            return JSONResponse(self._current(model_uid))

        async def get_events(model_uid: str, request: Request, after: int = 0) -> JSONResponse:
            self._check_rights(request)
            self._current(model_uid)
            return JSONResponse({"last": len(self.events), "events": self.events[after:]})

        async def get_history(model_uid: str, request: Request) -> JSONResponse:
            self._check_rights(request)
            self._current(model_uid)
            return JSONResponse(self.history)

        async def post(model_uid: str, request: Request) -> JSONResponse:
            self._check_rights(request)
            report = self._report(model_uid)
            if not self.may_change:
                raise HTTPException(403, "Not enough permissions")
            body = await request.json()
            self.posted.append((request.url.path, body))
            report["enabled"] = body.get("enabled", report["enabled"])
            if "routing" in body:
                report["routing"] = {**report.get("routing", {}), "mode": body["routing"]}
            return JSONResponse(report)

        async def get_cluster(request: Request) -> JSONResponse:
            self._check_rights(request)
            return JSONResponse(self.cluster)

        async def remove_prefix(model_uid: str, name: str) -> JSONResponse:
            self.share(self._report(model_uid) | {"prefixes": []})
            return JSONResponse({"removed": name})

        async def renew(request: Request) -> JSONResponse:
            if (await request.json()) != {"refresh_token": "renew"}:
                raise HTTPException(401, "Invalid refresh token")
            return JSONResponse({"access_token": TOKEN})

        router.add_api_route("/v1/auth/refresh", renew, methods=["POST"])
        router.add_api_route("/v1/xavier", get_models, methods=["GET"])
        router.add_api_route("/v1/xavier/{model_uid}", get_model, methods=["GET"])
        router.add_api_route("/v1/xavier/{model_uid}/events", get_events, methods=["GET"])
        router.add_api_route("/v1/xavier/{model_uid}/history", get_history, methods=["GET"])
        router.add_api_route("/v1/xavier/{model_uid}", post, methods=["PATCH"])
        router.add_api_route("/v1/xavier/{model_uid}/flush", post, methods=["POST"])
        router.add_api_route("/v1/cluster/xavier", get_cluster, methods=["GET"])
        prefix = "/v1/xavier/{model_uid}/prefixes/{name}"
        router.add_api_route(prefix, remove_prefix, methods=["DELETE"])

    def _check_rights(self, request: Request) -> None:
        if not self.serves:
            raise HTTPException(404, "Not Found")
        if not self.may_read:
            raise HTTPException(403, "Not enough permissions")
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.needs_token and shown != TOKEN:
            if shown:
                self.wrong_tokens.append(shown)
            raise HTTPException(401, "Not authenticated")

    def _current(self, model_uid: str) -> dict[str, Any]:
        if self.unavailable:
            raise HTTPException(503, "the tracker does not answer")
        return self._report(model_uid)

    def _report(self, model_uid: str) -> dict[str, Any]:
        if model_uid not in self.reports:
            raise HTTPException(404, f"model {model_uid!r} does not share its cache here")
        return self.reports[model_uid]


def _giving(answer: object) -> Callable[[], Any]:
    async def give() -> JSONResponse:
        return JSONResponse(answer)

    return give
