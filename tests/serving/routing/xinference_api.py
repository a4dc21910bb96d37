"""xinference's own handlers of LLM routes, with our routing, over two model actors. No engine."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import xoscar as xo
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from xinference.api import restful_api
from xinference.api.restful_api import RESTfulAPI
from xinference.api.routers import llm

from tests.frontend.cluster import Cluster
from xinference_xavier.frontend.model_router import ModelRouter
from xinference_xavier.frontend.routers import Routers
from xinference_xavier.serving.routing import install
from xinference_xavier.serving.routing.replica import finding_replicas

BODIES: dict[str, dict[str, Any]] = {
    "create_completion": {"prompt": "hi"},
    "create_chat_completion": {"messages": [{"role": "user", "content": "hi"}]},
    "create_message": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "create_response": {"input": "hi"},
}
"""A request to each of the functions that answer with a text."""
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


class Model(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Remembers what it was asked, and with which salt."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: list[tuple[Any, Any]] = []

    async def asked(self) -> list[tuple[Any, Any]]:
        return self._asked

    async def is_vllm_backend(self) -> bool:
        return True

    async def decrease_serve_count(self) -> None:
        pass

    async def prepare_anthropic_request(self, messages: list[Any], config: Any) -> Any:
        return {"messages": messages, "generate_config": config, "input_tokens": 1}

    async def generate(self, prompt: str, config: dict[str, Any], **_: Any) -> bytes:
        self._asked.append((prompt, config.get("cache_salt")))
        return _answer("text_completion", {"text": "answer", "logprobs": None})

    async def chat(self, messages: list[Any], config: dict[str, Any], **_: Any) -> bytes:
        self._asked.append((messages, config.get("cache_salt")))
        return _answer("chat.completion", {"message": {"role": "assistant", "content": "answer"}})


def _answer(kind: str, choice: dict[str, Any]) -> bytes:
    choices = [{"index": 0, "finish_reason": "stop", **choice}]
    answer = {"id": "1", "object": kind, "created": 1, "model": "m", "choices": choices}
    return json.dumps({**answer, "usage": _USAGE}).encode()


class _Known(Routers):
    def __init__(self, router: ModelRouter) -> None:
        self.router = router

    def get(self, model_uid: str) -> ModelRouter | None:
        return self.router


def llm_router() -> APIRouter:
    """xinference's routes of LLMs."""
    return _api_of(object.__new__(RESTfulAPI))


def _api_of(api: Any) -> APIRouter:
    api._advanced_auth_service = api._auth_service = None
    api._router = APIRouter()
    llm.register_routes(api)
    return api._router  # type: ignore[no-any-return]


class XinferenceApi:
    """With the model "m" and the replicas "m-0" and "m-1"."""

    async def start(self, prefixes: Any) -> XinferenceApi:
        self.prefixes = prefixes
        self._original = restful_api.require_model
        self._pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
        at = self._pool.external_address
        self.models = {
            name: await xo.create_actor(Model, address=at, uid=name) for name in ("m-0", "m-1")
        }
        self.cluster = Cluster(*self.models)
        api: Any = object.__new__(RESTfulAPI)
        api._get_supervisor_ref = self.get_supervisor
        api._report_error_event = self._report
        app, router = FastAPI(), _api_of(api)
        context = SimpleNamespace(app=app, router=router)
        install.add_routing(context, _Known(self.cluster.router), prefixes)
        app.include_router(router)
        self.paths = {
            route.path: route.endpoint.__name__
            for route in router.routes
            if isinstance(route, APIRoute) and route.endpoint.__name__ in BODIES
        }
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://api",
            headers={"anthropic-version": "2023-06-01"},
            timeout=30,
        )
        return self

    async def stop(self) -> None:
        restful_api.require_model = self._original
        await self.client.aclose()
        await self._pool.stop()

    async def ask(self, path: str, headers: Any = None, **more: Any) -> httpx.Response:
        body = {"model": "m", **BODIES[self.paths[path]], **more}
        return await self.client.post(path, json=body, headers=headers)

    async def asked(self) -> list[tuple[Any, Any]]:
        """What the replicas were asked, and with which salt."""
        return [each for model in self.models.values() for each in await model.asked()]

    async def get_supervisor(self) -> Any:
        return self

    async def _report(self, *_: object) -> None:
        pass

    # What it needs of a supervisor, and of its workers.

    @property
    def _replica_model_uid_to_worker(self) -> dict[str, Any]:
        return dict.fromkeys(self.models, SimpleNamespace(get_model=self._model))

    async def _model(self, model_uid: str) -> Any:
        return self.models[model_uid]

    @finding_replicas
    async def get_model(self, model_uid: str) -> Any:
        return self.models[model_uid]

    async def describe_model(self, model_uid: str) -> dict[str, str]:
        return {"model_family": "qwen2.5-instruct", "model_name": "qwen2.5-instruct"}

    async def resolve_token_router_runtime(self, model_uid: str) -> None:
        return None
