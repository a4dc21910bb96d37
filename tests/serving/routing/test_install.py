"""Requests of the text routes go through the router, and everything else as before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from tests.frontend.cluster import Cluster
from tests.serving.routing.replicas import Replica
from xinference_xavier.errors import PrefixNotFoundError
from xinference_xavier.frontend.model_router import ModelRouter, Routers
from xinference_xavier.frontend.question import MAX_BODY
from xinference_xavier.protocol.prefixes import Keeping, keeping_of
from xinference_xavier.serving import routing as module
from xinference_xavier.serving.launch.supervisor import xavier_replica as find
from xinference_xavier.serving.routing import RoutingMiddleware, remember_texts, routing_require

CHAT = "/v1/chat/completions"
COUNT = "/v1/messages/count_tokens"


class Known(Routers):
    """The router of the model "m" only."""

    def __init__(self, router: ModelRouter) -> None:
        self.router = router

    def get(self, model_uid: str) -> ModelRouter | None:
        return self.router if model_uid == "m" else None


class Prefixes:
    """A story."""

    async def content_of(self, model_uid: str, tenant: str, name: str) -> Mapping[str, Any]:
        if (model_uid, tenant, name) != ("m", "tenant", "story"):
            raise PrefixNotFoundError(f"no prefix named {name!r}")
        return {"prompt": "Once upon a time"}


class Api:
    """An API like xinference's, with two replicas. In turn is "in turn"."""

    async def start(self, **serving: Any) -> Api:
        self.cluster = Cluster("m-0", "m-1", **serving)
        self.replicas = {name: await Replica().start(name) for name in ("m-0", "m-1")}
        self.in_turn = await Replica().start("in turn")
        self.supervisor = SimpleNamespace(
            get_model=lambda name, xavier_replica: find(self.supervisor, name),
            _replica_model_uid_to_worker={
                name: SimpleNamespace(get_model=self.get_model) for name in self.replicas
            },
        )
        self.bodies: list[bytes] = []
        self.prefixes = Prefixes()
        app = FastAPI()
        app.add_middleware(RoutingMiddleware)
        router = APIRouter()
        for path, endpoint in (
            (CHAT, self.create_chat_completion),
            (COUNT, self.answer),
            ("/v1/embeddings", self.answer),
        ):
            router.add_api_route(path, endpoint, methods=["POST"], response_model=None)
        remember_texts(router)
        app.include_router(router)
        self.require = routing_require(
            self.require_in_turn, Known(self.cluster.router), self.prefixes
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://api", timeout=30
        )
        return self

    async def stop(self) -> None:
        await self.client.aclose()
        for replica in [self.in_turn, *self.replicas.values()]:
            await replica.stop()

    async def get_model(self, model_uid: str) -> Any:
        return self.replicas[model_uid].model

    async def get_supervisor(self) -> Any:
        return self.supervisor

    async def require_in_turn(self, get_supervisor_ref: Any, model_uid: str, report: Any) -> Any:
        return self.in_turn.model

    async def create_chat_completion(self, request: Request) -> Any:
        return await self.answer(request)

    async def answer(self, request: Request) -> Any:
        self.bodies.append(await request.body())
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            return JSONResponse({"detail": "not JSON"}, 400)
        model = await self.require(self.get_supervisor, body["model"], None)
        if not body.get("stream"):
            return JSONResponse(await model.generate(body["prompt"], {}, request_id="r"))
        words = await model.chat([body["prompt"]], {}, request_id="r")
        return StreamingResponse(words, media_type="text/plain")

    async def ask(self, path: str = CHAT, **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": "m", "prompt": "text ", **body})


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = await Api().start()
    yield api
    await api.stop()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_says_where_the_request_went_and_why(api: Api, stream: bool) -> None:
    answer = await api.ask(stream=stream)
    replica = answer.headers["x-xavier-replica"]
    assert replica in api.replicas
    assert replica in answer.text
    assert answer.headers["x-xavier-route"].startswith("backlog; backlog=0.000, ")
    assert not api.cluster.router._routes


async def test_requests_spread(api: Api) -> None:
    answers = [await api.ask() for _ in range(4)]
    assert {answer.headers["x-xavier-replica"] for answer in answers} == {"m-0", "m-1"}


async def test_other_routes_and_models_go_in_turn(api: Api) -> None:
    for answer in (
        await api.ask(COUNT),
        await api.ask("/v1/embeddings"),
        await api.ask(model="another"),
    ):
        assert "in turn" in answer.text
        assert "x-xavier-replica" not in answer.headers


async def test_while_routing_is_off_requests_go_in_turn(api: Api) -> None:
    api.cluster.configure(routing="off")
    assert "in turn" in (await api.ask()).text
    api.cluster.configure(routing="auto")
    assert "in turn" not in (await api.ask()).text


async def test_a_full_queue_is_a_429_with_retry_after() -> None:
    api = await Api().start(request_limit=0, queue=0)
    answer = await api.ask()
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "all replicas are at their request limit" in answer.json()["detail"]
    await api.stop()


async def test_a_replica_that_is_no_longer_there_is_left_out(api: Api) -> None:
    """The supervisor knows it before the tracker does."""
    del api.supervisor._replica_model_uid_to_worker["m-0"]
    answers = [await api.ask() for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.headers["x-xavier-replica"] for answer in answers} == {"m-1"}


async def test_without_any_replica_requests_go_in_turn(api: Api) -> None:
    api.supervisor._replica_model_uid_to_worker.clear()
    answer = await api.ask()
    assert "in turn" in answer.text
    assert "x-xavier-replica" not in answer.headers


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": "m", "prompt": "' + b"x" * (100 << 20) + b'"}',
    ],
    ids=["empty", "not UTF-8", "deep", "long"],
)
async def test_hostile_bodies_arrive_unchanged(api: Api, body: bytes) -> None:
    answer = await api.client.post(CHAT, content=body)
    assert answer.status_code == (200 if len(body) > 1 << 20 else 400)
    assert api.bodies == [body]


@pytest.mark.parametrize("by", ["header", "body"])
@pytest.mark.parametrize("mode", ["auto", "off"])
async def test_a_named_prefix_goes_before_the_prompt(api: Api, by: str, mode: str) -> None:
    api.cluster.configure(routing=mode)
    named = {"prefix_name": "story"} if by == "body" else {}
    headers = {"x-xavier-prefix": "story"} if by == "header" else {}
    body = {"model": "m", "prompt": ", there was", "cache_salt": "tenant", **named}
    answer = await api.client.post(CHAT, json=body, headers=headers)
    assert answer.json().startswith("Once upon a time, there was")


@pytest.mark.parametrize("by", ["header", "body"])
async def test_a_long_body_keeps_its_prefix_and_its_tenant(api: Api, by: str) -> None:
    long = "x" * (MAX_BODY + 1)
    named = {"prefix_name": "story"} if by == "body" else {}
    headers = {"x-xavier-prefix": "story"} if by == "header" else {}
    body = {"model": "m", "prompt": long, "cache_salt": "tenant", **named}
    answer = await api.client.post(CHAT, json=body, headers=headers)
    assert answer.json().startswith("Once upon a timexxx")
    del body["cache_salt"]
    assert (await api.client.post(CHAT, json=body, headers=headers)).status_code == 404


@pytest.mark.parametrize("wrong", [7, ["story"], {}, False, ""])
async def test_what_cannot_be_the_name_of_a_prefix_is_refused(api: Api, wrong: object) -> None:
    answer = await api.ask(prefix_name=wrong, cache_salt="tenant")
    assert answer.status_code == 400
    assert "is not the name of a prefix" in answer.json()["detail"]


@pytest.mark.parametrize("body", [{"prefix_name": "another"}, {"prefix_name": "story"}])
async def test_an_unknown_prefix_is_a_404(api: Api, body: dict[str, str]) -> None:
    answer = await api.ask(**body)
    assert (answer.status_code, answer.headers["x-xavier-not-found"]) == (404, "prefix")


async def test_a_prompt_is_kept_as_openai_s_clients_ask(api: Api) -> None:
    for retention in ("24h", "for ever", None):
        await api.ask(prompt_cache_retention=retention)
    requests = [name for each in api.replicas.values() for name in (await each.model.requests())[0]]
    assert [*filter(None, map(keeping_of, requests))] == [Keeping(86400.0, 1.0)]


def test_an_xinference_without_require_model_keeps_its_own_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from xinference.api import restful_api

    monkeypatch.delattr(restful_api, "require_model")
    app = FastAPI()
    module.add_routing(
        SimpleNamespace(app=app, router=APIRouter()), Routers(lambda uid: None), Prefixes()
    )  # type: ignore[arg-type, return-value]
    assert not app.user_middleware
    assert "require_model is gone: requests go to replicas in turn" in caplog.text


def test_it_is_put_before_xinferences_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from xinference.api import restful_api

    original = restful_api.require_model
    monkeypatch.setattr(restful_api, "require_model", original)  # to restore it
    app = FastAPI()
    module.add_routing(
        SimpleNamespace(app=app, router=APIRouter()), Routers(lambda uid: None), Prefixes()
    )  # type: ignore[arg-type, return-value]
    assert restful_api.require_model is not original
    assert [each.cls for each in app.user_middleware] == [RoutingMiddleware]
