"""The text routes of xinference itself, through the router."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import xoscar as xo
from fastapi import Request
from PIL import UnidentifiedImageError

from tests.e2e.text_routes import CHAT, COMPLETIONS, TEXT_ROUTES, body_of
from tests.serving.text_api import Supervisor, TextApi
from xinference_xavier.errors import SupervisorError
from xinference_xavier.protocol.prefixes import Keeping, keeping_of
from xinference_xavier.routing.router import Router
from xinference_xavier.serving import routing

Start = Callable[..., Awaitable[TextApi]]
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ROUTES = pytest.mark.parametrize("path", TEXT_ROUTES)


@STREAMS
async def test_every_route_is_answered_by_the_chosen_replica_and_says_why(
    text_api: TextApi, stream: bool
) -> None:
    chosen = set()
    for path in (*TEXT_ROUTES, "/anthropic/v1/messages"):
        answer = await text_api.ask(path, stream=stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-xavier-replica"] in answer.text
        assert answer.headers["x-xavier-route"].startswith("backlog; backlog=0.00")
        chosen.add(answer.headers["x-xavier-replica"])
    assert chosen == {"m-0", "m-1"}
    await left(text_api)
    assert not text_api.cluster.router._routes


def assert_in_turn(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text
    assert "x-xavier-replica" not in answer.headers


async def test_other_routes_and_models_go_in_turn(text_api: TextApi) -> None:
    counted = await text_api.ask("/v1/messages/count_tokens")
    assert "x-xavier-replica" not in counted.headers
    assert_in_turn(await text_api.ask(COMPLETIONS, model="another"))


async def test_while_routing_is_off_requests_go_in_turn(text_api: TextApi) -> None:
    text_api.cluster.configure(routing="off")
    assert_in_turn(await text_api.ask(COMPLETIONS))
    text_api.cluster.configure(routing="auto")
    assert "x-xavier-replica" in (await text_api.ask(COMPLETIONS)).headers


async def test_a_replica_that_is_no_longer_there_is_left_out(text_api: TextApi) -> None:
    """The supervisor knows it before the tracker does."""
    del text_api.supervisor._replica_model_uid_to_worker["m-0"]
    answers = [await text_api.ask(COMPLETIONS) for _ in range(4)]
    assert {answer.headers["x-xavier-replica"] for answer in answers} == {"m-1"}


async def test_a_replica_that_is_not_there_yet_gets_requests_soon(text_api: TextApi) -> None:
    worker = text_api.supervisor._replica_model_uid_to_worker.pop("m-0")
    for _ in range(4):
        assert (await text_api.ask(COMPLETIONS)).headers["x-xavier-replica"] == "m-1"
    text_api.supervisor._replica_model_uid_to_worker["m-0"] = worker
    text_api.cluster.now += 2.0
    answers = [await text_api.ask(COMPLETIONS) for _ in range(4)]
    assert {answer.headers["x-xavier-replica"] for answer in answers} == {"m-0", "m-1"}


async def test_without_any_replica_requests_go_in_turn(text_api: TextApi) -> None:
    text_api.supervisor._replica_model_uid_to_worker.clear()
    assert_in_turn(await text_api.ask(COMPLETIONS))


@STREAMS
async def test_an_error_of_the_router_costs_no_request(
    text_api: TextApi, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def choose(*_: object, **__: object) -> None:
        raise IndexError("a defect")

    monkeypatch.setattr(Router, "choose", choose)
    assert_in_turn(await text_api.ask(COMPLETIONS, stream=stream))
    assert text_api.cluster.router.counts.failures == 1


def assert_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert len(answer.headers.get_list("retry-after")) == 1
    assert "limit" in answer.text
    assert "x-xavier-replica" not in answer.headers


async def test_a_full_queue_is_a_429_with_retry_after(start_text_api: Start) -> None:
    api = await start_text_api(queue=0, request_limit=0)
    assert_refused(await api.ask(COMPLETIONS))


@ROUTES
@STREAMS
async def test_a_request_that_every_replica_refuses_is_a_429_with_retry_after(
    text_api: TextApi, path: str, stream: bool
) -> None:
    await text_api.prepare(limit=0)
    assert_refused(await text_api.ask(path, stream=stream))
    assert [len(await model.asked()) for model in text_api.models.values()] == [1, 1]


async def refuses(api: TextApi, replica: str) -> None:
    await api.prepare(limit=0)


async def was_lost(api: TextApi, replica: str) -> None:
    await api.end(replica)


async def breaks_before_the_first_word_of_a_stream(api: TextApi, replica: str) -> None:
    await api.prepare(breaks=xo.ServerClosed("the engine has ended"))


async def is_unknown_to_the_supervisor(api: TextApi, replica: str) -> None:
    del api.supervisor._replica_model_uid_to_worker[replica]


@ROUTES
@pytest.mark.parametrize(
    ("happens", "stream"),
    [
        (refuses, False),
        (refuses, True),
        (was_lost, False),
        (was_lost, True),
        (breaks_before_the_first_word_of_a_stream, True),
        (is_unknown_to_the_supervisor, False),
    ],
)
async def test_a_request_that_may_not_wait_is_a_429_with_retry_after_if_its_replica(
    start_text_api: Start, path: str, happens: Any, stream: bool
) -> None:
    api = await start_text_api(queue=0, request_limit=1)
    route = await api.cluster.router.route()
    assert route is not None
    (its,) = api.models.keys() - {route.replica}
    await happens(api, its)
    answer = await api.ask(path, stream=stream)
    assert_refused(answer)


@ROUTES
@STREAMS
@pytest.mark.parametrize(
    "error",
    [
        UnidentifiedImageError("cannot identify image file"),
        OSError(28, "No space left on device"),
        TimeoutError("the image did not arrive"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_the_model_raises_is_the_error_of_the_request(
    text_api: TextApi, path: str, stream: bool, error: Exception
) -> None:
    await text_api.prepare(fails=error)
    await text_api.ask(path, stream=stream)
    await text_api.prepare(breaks=error)
    await text_api.ask(path, stream=stream)
    asked = [len(await model.asked()) for model in text_api.models.values()]
    assert sum(asked) == 2
    await text_api.prepare()
    answers = [await text_api.ask(path) for _ in range(4)]
    assert {each.headers["x-xavier-replica"] for each in answers} == {*text_api.models}


@STREAMS
async def test_while_a_supervisor_is_relaunched_requests_are_routed(
    text_api: TextApi, stream: bool
) -> None:
    """Only what xinference's gateway calls reads reaches the supervisor then."""
    async with relaunching(text_api):
        for path in TEXT_ROUTES:
            answer = await text_api.ask(path, stream=stream)
            assert answer.headers["x-xavier-replica"] in answer.text


@asynccontextmanager
async def relaunching(api: TextApi) -> AsyncIterator[None]:
    from xinference.core.supervisor_upgrade import SupervisorGateway

    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    address = pool.external_address
    supervisor = await xo.create_actor(ActorOf, api.supervisor, address=address, uid="supervisor")
    gateway = await xo.create_actor(SupervisorGateway, address=address, uid="gateway")
    await gateway.select_supervisor(supervisor)
    await gateway.prepare_supervisor_switch()
    api.supervisor = gateway
    yield
    await gateway.release_supervisor()
    await pool.stop()


class ActorOf(xo.StatelessActor):
    """A supervisor as an actor."""

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__()
        self._supervisor = supervisor

    async def get_model(self, model_uid: str, **more: Any) -> Any:
        return await self._supervisor.get_model(model_uid, **more)

    async def describe_model(self, model_uid: str) -> Any:
        return await self._supervisor.describe_model(model_uid)

    async def resolve_token_router_runtime(self, model_uid: str) -> None:
        return None


async def silent(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


async def broken(*_: object, **__: object) -> None:
    raise xo.ServerClosed("the supervisor has ended")


@pytest.mark.parametrize("find", [silent, broken])
async def test_a_supervisor_that_does_not_answer_is_not_held_against_a_replica(
    text_api: TextApi, monkeypatch: pytest.MonkeyPatch, find: Any
) -> None:
    monkeypatch.setattr(routing, "_CONNECT_DEADLINE", 0.01)
    in_turn = text_api.supervisor.get_model

    async def get_model(model_uid: str, xavier_replica: bool = False, **more: Any) -> Any:
        return await (find() if xavier_replica else in_turn(model_uid, **more))

    monkeypatch.setattr(text_api.supervisor, "get_model", get_model)
    for path in TEXT_ROUTES:
        answer = await text_api.ask(path)
        assert answer.status_code == 200
        assert "x-xavier-replica" not in answer.headers
    monkeypatch.undo()
    answers = [await text_api.ask(path) for path in TEXT_ROUTES]
    assert {each.headers["x-xavier-replica"] for each in answers} == {*text_api.models}


async def test_a_supervisor_that_cannot_be_found_ends_the_search_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "_CONNECT_DEADLINE", 0.01)
    with pytest.raises(SupervisorError, match="does not say where replica m-rep0 is"):
        await routing._model_of(silent, "m-rep0")


async def test_routed_requests_keep_xinferences_correlation_id(text_api: TextApi) -> None:
    for path in TEXT_ROUTES:
        answer = await text_api.ask(path)
        asked = (await text_api.models[answer.headers["x-xavier-replica"]].asked())[-1]
        assert asked.correlation == answer.headers["x-request-id"]


async def test_streams_leave_their_places_where_they_were_admitted(text_api: TextApi) -> None:
    """Also the one from which a stream was moved: the replica hangs, and the tracker loses it."""
    for path in TEXT_ROUTES:
        await text_api.prepare(hangs=True)
        asking = asyncio.create_task(text_api.ask(path, stream=True))
        first = await asked_one(text_api)
        (other,) = text_api.models.keys() - {first}
        await text_api.models[other].prepare()
        text_api.cluster.tell(gone=[first])
        answer = await asking
        assert answer.headers["x-xavier-replica"] == other
        assert other in answer.text
        await left(text_api)
        text_api.cluster.tell(text_api.cluster.load(first))


async def asked_one(api: TextApi) -> str:
    """The replica that a request occupies, once it does."""
    while True:
        for name, count in (await api.serving()).items():
            if count:
                return name


async def left(api: TextApi) -> None:
    """Waits until no request occupies a replica any more."""
    async with asyncio.timeout(30):
        while any((await api.serving()).values()):
            pass


@ROUTES
async def test_a_stream_whose_client_goes_before_its_first_word_is_closed(
    text_api: TextApi, path: str
) -> None:
    await text_api.prepare(hangs=True)
    asking = asyncio.create_task(text_api.ask(path, stream=True))
    await asked_one(text_api)
    asking.cancel()
    await left(text_api)
    while not any([await model.closed() for model in text_api.models.values()]):
        pass


@ROUTES
async def test_a_client_that_goes_before_the_first_byte_is_no_error(
    text_api: TextApi, path: str
) -> None:
    """xinference's own middlewares wait for the answer to begin."""

    @text_api.app.middleware("http")
    async def around(request: Request, call_next: Any) -> Any:
        return await call_next(request)

    await text_api.prepare(hangs=True)
    asked, sent = asyncio.Event(), []

    async def receive() -> Any:
        if not asked.is_set():
            asked.set()
            return {"type": "http.request", "body": body, "more_body": False}
        await asked_one(text_api)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    body = json.dumps(body_of(path, "m", "hi", stream=True)).encode()
    headers = [(b"content-type", b"application/json"), (b"anthropic-version", b"2023-06-01")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
    }
    await text_api.app(scope, receive, send)
    assert sent[0]["status"] == 200
    await left(text_api)


CONTENTS: dict[str, Any] = {
    "story": {"prompt": "Once upon a time"},
    "guide": {"messages": [{"role": "system", "content": "You are a guide."}]},
    "poet": {"prompt": "A rose", "lora_name": "poet"},
    "poets": {"messages": [{"role": "user", "content": "A rose"}], "lora_name": "poet"},
}


async def named(model_uid: str, tenant: str, name: str) -> Any:
    return CONTENTS[name]


@STREAMS
@pytest.mark.parametrize(
    ("path", "name", "more", "reason"),
    [
        (COMPLETIONS, "guide", {}, "'guide' has messages; use it on a route of chats"),
        (COMPLETIONS, "poet", {}, "'poet' belongs to adapter 'poet'"),
        (COMPLETIONS, "poet", {"lora_name": "clerk"}, "'poet' belongs to adapter 'poet'"),
        (COMPLETIONS, "story", {"lora_name": "poet"}, "belongs to the model without an adapter"),
        *(
            (path, name, {}, reason)
            for path in TEXT_ROUTES
            if path != COMPLETIONS
            for name, reason in (
                ("story", "'story' has a prompt; use it on the route of completions"),
                ("poets", "'poets' belongs to adapter 'poet'"),
            )
        ),
        (CHAT, "story", {"prompt": "ignored"}, "'story' has a prompt; use it on the route of"),
    ],
)
async def test_a_prefix_of_another_kind_or_adapter_is_a_400_with_its_reason(
    start_text_api: Start, path: str, name: str, more: Any, reason: str, stream: bool
) -> None:
    api = await start_text_api(named)
    answer = await api.ask(path, stream=stream, prefix_name=name, **more)
    assert answer.status_code == 400, answer.text
    assert reason in answer.text
    assert not any([await model.asked() for model in api.models.values()])


@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.parametrize("by", ["header", "body"])
@pytest.mark.parametrize(
    ("path", "name", "text", "adapter"),
    [
        (COMPLETIONS, "story", "Once upon a time", {}),
        (COMPLETIONS, "poet", "A rose", {"lora_name": "poet"}),
        (CHAT, "guide", "You are a guide.", {}),
        (CHAT, "poets", "A rose", {"lora_name": "poet"}),
    ],
)
async def test_a_prefix_of_the_right_kind_and_adapter_goes_before_the_request(
    start_text_api: Start, path: str, name: str, text: str, adapter: Any, by: str, mode: str
) -> None:
    api = await start_text_api(named)
    api.cluster.configure(routing=mode)
    headers = {"x-xavier-prefix": name} if by == "header" else {}
    body = {"prefix_name": name} if by == "body" else {}
    answer = await api.ask(path, headers=headers, **body, **adapter)
    assert answer.status_code == 200, answer.text
    (asked,) = await api.asked()
    assert text in str(asked.content)


async def test_a_prompt_is_kept_as_openai_s_clients_ask(text_api: TextApi) -> None:
    for retention in ("24h", "for ever", None):
        await text_api.ask(COMPLETIONS, prompt_cache_retention=retention)
    names = [asked.request_id or "" for asked in await text_api.asked()]
    assert [*filter(None, map(keeping_of, names))] == [Keeping(86400.0, 1.0)]
