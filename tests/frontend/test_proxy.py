"""The proxy sends requests where the router says, passes on everything as it comes, and answers as
long as any replica does."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.frontend.cluster import Cluster
from tests.frontend.servers import Engine, mute, refusing, served, until
from xinference_xavier.frontend import asked
from xinference_xavier.frontend.model_router import ModelRouter
from xinference_xavier.frontend.proxy import make_app
from xinference_xavier.frontend.upstreams import Upstreams

CHAT = "/v1/chat/completions"


class Proxy:
    """A proxy with a router, and the servers behind it: by name, an engine, or the URL of another
    server."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, *servers: Engine | tuple[str, str], **serving: Any) -> Proxy:
        urls = {}
        for each in servers:
            if isinstance(each, Engine):
                urls[each.name] = await self._stack.enter_async_context(served(each))
            else:
                urls |= dict([each])
        self.upstreams = Upstreams(urls)
        self.cluster = Cluster(*urls, **serving)
        self.router: ModelRouter | None = self.cluster.router
        app = make_app(self.upstreams, lambda: self.router)
        url = await self._stack.enter_async_context(served(app))
        self.client = await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=None)
        )
        return self

    async def ask(self, path: str = CHAT, **arguments: Any) -> httpx.Response:
        return await self.client.post(path, **{"json": {"prompt": "text"}, **arguments})

    def begin(self, path: str = CHAT) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.ask(path))

    @property
    def running(self) -> list[int]:
        return [
            each.running
            for name in self.upstreams.names
            if (each := self.upstreams.named(name)) is not None
        ]

    async def rests(self) -> None:
        """Nothing is left of any request. The client has its answer a little earlier."""
        await until(lambda: not any(self.running) and not self.cluster.router._routes)


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with AsyncExitStack() as stack:
        yield Proxy(stack)


def replica(answer: httpx.Response) -> str:
    return answer.headers["x-xavier-replica"]


# -- the choice --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", asked.ROUTES)
async def test_text_routes_go_where_the_router_says(proxy: Proxy, path: str) -> None:
    await proxy.start(Engine("a"), Engine("b"))
    proxy.cluster.tell(proxy.cluster.load("a", 5.0), proxy.cluster.load("b"))
    answers = [await proxy.ask(path) for _ in range(3)]
    assert [(answer.text, replica(answer)) for answer in answers] == [("b", "b")] * 3
    assert answers[0].headers["x-xavier-route"].startswith("backlog; backlog=0.000, ")
    await proxy.rests()


async def test_all_other_requests_go_to_the_server_with_the_fewest(proxy: Proxy) -> None:
    a, b = Engine("a", "hang"), Engine("b")
    await proxy.start(a, b)
    busy = proxy.begin("/v1/embeddings")
    await a.arrived.wait()
    answers = [await proxy.client.get("/v1/models") for _ in range(3)]
    assert {answer.text for answer in answers} == {"b"}
    assert answers[0].headers["x-xavier-route"] == "in turn"
    busy.cancel()
    await proxy.rests()
    a.does = "answer"
    assert [(await proxy.client.get("/v1/models")).text for _ in range(4)] == ["a", "b", "a", "b"]


@pytest.mark.parametrize("state", ["no tracker", "nothing known", "off"])
async def test_without_a_choice_requests_go_in_turn(proxy: Proxy, state: str) -> None:
    await proxy.start(Engine("a"), Engine("b"), routing="off")
    if state != "off":
        proxy.router = ModelRouter() if state == "nothing known" else None
    answers = [await proxy.ask() for _ in range(4)]
    assert [answer.text for answer in answers] == ["a", "b", "a", "b"]
    assert answers[0].headers["x-xavier-route"] == "in turn"
    assert replica(answers[0]) == "a"


async def test_an_engine_of_a_data_parallel_server_is_reached_through_it(proxy: Proxy) -> None:
    await proxy.start(Engine("a"), Engine("b"))
    proxy.cluster.tell(gone=["a", "b"])
    proxy.cluster.join("b_dp1")
    assert (await proxy.ask()).text == "b"


# -- what is passed on ---------------------------------------------------------------------------


async def test_a_request_arrives_as_it_was_sent(proxy: Proxy) -> None:
    a = Engine("a", status=418)
    await proxy.start(a)
    target = "/v1/files/a%2Fb?q=%20x&q=y"
    headers = {"authorization": "Bearer key", "x-two": "2", "connection": "x-hop", "x-hop": "1"}
    answer = await proxy.client.request("PUT", target, content=b"\x00body", headers=headers)
    assert (answer.status_code, answer.text) == (418, "a")
    assert (answer.headers["x-own"], answer.headers["server"]) == ("kept", "engine")
    scope, body = a.asked[0]
    assert (scope["method"], body) == ("PUT", b"\x00body")
    assert (scope["raw_path"], scope["query_string"]) == (b"/v1/files/a%2Fb", b"q=%20x&q=y")
    assert (a.headers["authorization"], a.headers["x-two"]) == ("Bearer key", "2")
    assert a.headers["content-length"] == "5"
    assert not {"x-hop", "x-request-id"} & a.headers.keys()


@pytest.mark.parametrize("target", ["/v1/a/../b?q", "/v1/./a//b?q", '/v1/a?q="x"&r=[1]'])
async def test_a_target_arrives_letter_by_letter(proxy: Proxy, target: str) -> None:
    engine = Engine("a")
    await proxy.start(engine)
    url = proxy.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"GET {target} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".encode())
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    scope, _ = engine.asked[-1]
    assert (scope["raw_path"] + b"?" + scope["query_string"]).decode() == target


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"[" * 100_000, b'{"prompt": 5}'])
async def test_bodies_are_not_judged(proxy: Proxy, body: bytes) -> None:
    a = Engine("a")
    await proxy.start(a)
    assert (await proxy.ask(json=None, content=body)).text == "a"
    assert a.asked[0][1] == body


async def test_an_answer_is_passed_on_as_it_is_encoded(proxy: Proxy) -> None:
    a = Engine("a", "stream")
    await proxy.start(a)
    a.encoding, packed = "gzip", gzip.compress(b"many words")
    a.words.put_nowait(packed)
    a.words.put_nowait(None)
    async with proxy.client.stream("POST", CHAT, json={}) as answer:
        assert b"".join([chunk async for chunk in answer.aiter_raw()]) == packed


async def test_an_answer_arrives_word_by_word(proxy: Proxy) -> None:
    a = Engine("a", "stream")
    await proxy.start(a)
    a.words.put_nowait(b"one")
    async with proxy.client.stream("POST", CHAT, json={"stream": True}) as answer:
        words = answer.aiter_raw()
        assert await anext(words) == b"one"
        a.words.put_nowait(b"two")
        assert await anext(words) == b"two"
        a.words.put_nowait(None)
        assert [word async for word in words] == []
    await proxy.rests()
    assert proxy.cluster.router.counts.forecasts == 1


async def test_a_body_arrives_piece_by_piece(proxy: Proxy) -> None:
    a = Engine("a")
    await proxy.start(a)
    arrived: list[bytes] = []

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        arrived.append(await a.chunks.get())
        yield b"two"

    assert (await proxy.ask("/v1/audio", json=None, content=pieces())).text == "a"
    assert arrived == [b"one"]
    assert a.asked[0][1] == b"onetwo"


async def test_long_bodies_pass_through(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xinference_xavier.frontend.request_body.MAX_BODY", 100_000)
    a = Engine("a")
    await proxy.start(a)
    body = b"x" * 5_000_000
    answer = await proxy.ask(json=None, content=body)
    assert (answer.text, answer.headers["x-xavier-route"].split(";")[0]) == ("a", "backlog")
    assert a.asked[0][1] == body


@pytest.mark.parametrize(
    ("path", "name"),
    [(CHAT, "chatcmpl-{}"), ("/v1/messages", "chatcmpl-{}"), ("/v1/completions", "cmpl-{}-0")],
)
@pytest.mark.parametrize("own", ["", "header", "body"])
async def test_the_router_knows_the_id_by_which_vllm_knows_the_request(
    proxy: Proxy, path: str, name: str, own: str
) -> None:
    a = Engine("a", "hang")
    await proxy.start(a)
    headers = {"x-request-id": "mine"} if own == "header" else {}
    body = {"request_id": "mine"} if own == "body" else {}
    asking = asyncio.create_task(proxy.ask(path, headers=headers, json=body))
    await a.arrived.wait()
    sent = a.headers["x-request-id"]
    assert sent == "mine" if own else len(sent) == 32
    assert [*proxy.cluster.router._names] == [name.format(sent)]
    asking.cancel()
    await proxy.rests()


async def test_a_streamed_response_tells_its_id(proxy: Proxy) -> None:
    a = Engine("a", "stream")
    await proxy.start(a)
    a.words.put_nowait(b'data: {"type":"response.created","response":{"id":"resp_5"}}\n\n')
    async with proxy.client.stream("POST", "/v1/responses", json={}) as answer:
        await anext(answer.aiter_raw())
        assert [*proxy.cluster.router._names] == ["resp_5_0"]
    await proxy.rests()


# -- clients that go ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_client_that_goes_ends_its_request(proxy: Proxy, path: str) -> None:
    a = Engine("a", "hang")
    await proxy.start(a)
    asking = proxy.begin(path)
    await a.arrived.wait()
    asking.cancel()
    await a.left.wait()
    await proxy.rests()


async def test_a_client_that_goes_in_the_middle_of_an_answer_ends_it(proxy: Proxy) -> None:
    a = Engine("a", "stream")
    await proxy.start(a)
    a.words.put_nowait(b"one")
    async with proxy.client.stream("POST", CHAT, json={}) as answer:
        await anext(answer.aiter_raw())
    await a.left.wait()
    await proxy.rests()


async def test_a_client_that_goes_in_the_middle_of_its_body_ends_its_request(proxy: Proxy) -> None:
    a = Engine("a")
    await proxy.start(a)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        await a.chunks.get()
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await proxy.ask("/v1/audio", json=None, content=pieces())
    await a.left.wait()
    await proxy.rests()


async def test_a_client_that_goes_while_it_waits_leaves_the_queue(proxy: Proxy) -> None:
    await proxy.start(Engine("a"), request_limit=0, queue=5)
    asking = proxy.begin()
    await until(lambda: proxy.cluster.router._waiting)
    asking.cancel()
    await until(lambda: not proxy.cluster.router._waiting)
    await proxy.rests()


# -- servers that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_servers_that_do_not_listen_are_left_out(proxy: Proxy, path: str) -> None:
    """However many they are: the request has reached none of them."""
    dead = [(name, refusing()) for name in ("a", "b", "c")]
    await proxy.start(*dead, Engine("d"))
    answers = [await proxy.ask(path) for _ in range(4)]
    assert [(answer.text, replica(answer)) for answer in answers] == [("d", "d")] * 4
    await proxy.rests()


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize("headers", [True, False])
async def test_a_server_that_breaks_before_the_first_byte_is_replaced(
    proxy: Proxy, path: str, headers: bool
) -> None:
    async with mute() as url:
        await proxy.start(Engine("a", "begin") if headers else ("a", url), Engine("b"))
        proxy.cluster.tell(proxy.cluster.load("a"), proxy.cluster.load("b", 9.0))
        answer = await proxy.ask(path)
        assert (answer.text, replica(answer)) == ("b", "b")
        await proxy.rests()
        assert proxy.cluster.router.counts.moved == (path == CHAT)


async def test_what_changes_a_server_is_not_sent_to_another_when_it_breaks(proxy: Proxy) -> None:
    engines = [Engine(name, "begin") for name in ("a", "b")]
    await proxy.start(*engines)
    answer = await proxy.ask("/v1/load_lora_adapter")
    assert answer.status_code == 502
    assert sum(len(engine.asked) for engine in engines) == 1
    await proxy.rests()


async def test_a_request_that_breaks_two_servers_does_not_break_a_third(proxy: Proxy) -> None:
    engines = [Engine(name, "begin") for name in ("a", "b", "c")]
    await proxy.start(*engines)
    answer = await proxy.ask()
    assert answer.status_code == 502
    assert sum(len(engine.asked) for engine in engines) == 2
    told = answer.json()["error"]
    assert told["message"].startswith("no replica answers (")
    assert told["message"].count("RemoteProtocolError") == 2
    await proxy.rests()


async def test_without_any_server_the_answer_is_a_502(proxy: Proxy) -> None:
    await proxy.start(("a", refusing()), ("b", refusing()))
    answer = await proxy.ask()
    assert answer.status_code == 502
    assert "a: ConnectError" in answer.json()["error"]["message"]
    assert "b: ConnectError" in answer.json()["error"]["message"]
    await proxy.rests()


async def test_an_answer_that_has_begun_is_cut_off(proxy: Proxy) -> None:
    """Its client must not take it for complete."""
    a, b = Engine("a", "break"), Engine("b", "break")
    await proxy.start(a, b)
    with pytest.raises(httpx.RemoteProtocolError):
        await proxy.ask()
    assert len(a.asked) + len(b.asked) == 1
    await proxy.rests()


async def test_a_replica_that_the_tracker_loses_is_replaced(proxy: Proxy) -> None:
    engines = {name: Engine(name, "hang") for name in ("a", "b")}
    await proxy.start(*engines.values())
    proxy.cluster.tell(proxy.cluster.load("a"), proxy.cluster.load("b", 9.0))
    asking = proxy.begin()
    await engines["a"].arrived.wait()
    engines["b"].does = "answer"
    proxy.cluster.tell(gone=["a"])
    assert (await asking).text == "b"
    await engines["a"].left.wait()
    await proxy.rests()


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_server_that_is_full_is_replaced(proxy: Proxy, status: int, path: str) -> None:
    await proxy.start(Engine("a", status=status), Engine("b", status=status), Engine("c"))
    loads = [proxy.cluster.load(name, backlog) for name, backlog in (("a", 0), ("b", 5), ("c", 9))]
    proxy.cluster.tell(*loads)
    answer = await proxy.ask(path)
    assert (answer.status_code, answer.text) == (200, "c")
    await proxy.rests()


async def test_if_all_servers_refuse_the_client_gets_their_refusal(proxy: Proxy) -> None:
    await proxy.start(Engine("a", status=429), Engine("b", status=429))
    answer = await proxy.ask("/v1/embeddings")
    assert (answer.status_code, answer.text) == (429, "b")
    await proxy.rests()


async def test_a_full_queue_is_a_429_with_retry_after(proxy: Proxy) -> None:
    a = Engine("a")
    await proxy.start(a, request_limit=0, queue=0)
    answer = await proxy.ask()
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "all replicas are at their request limit" in answer.json()["error"]["message"]
    assert a.asked == []


async def test_a_long_request_does_not_move(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xinference_xavier.frontend.request_body.MAX_BODY", 1000)
    b = Engine("b")
    await proxy.start(Engine("a", "begin"), b)
    proxy.cluster.tell(proxy.cluster.load("a"), proxy.cluster.load("b", 9.0))
    assert (await proxy.ask(json=None, content=b"x" * 2000)).status_code == 502
    assert b.asked == []


# -- the proxy's own pages -----------------------------------------------------------------------


async def test_it_is_healthy_while_a_server_is(proxy: Proxy) -> None:
    a, b = Engine("a"), Engine("b")
    await proxy.start(a, b, ("c", refusing()))
    for sick in ((False, False), (True, False), (False, True), (True, True)):
        a.sick, b.sick = sick
        answer = await proxy.client.get("/health")
        assert answer.status_code == (503 if all(sick) else 200)


async def test_it_reports_what_it_did(proxy: Proxy) -> None:
    await proxy.start(Engine("a"), Engine("b"))
    for _ in range(2):
        await proxy.ask()
    await proxy.rests()
    report = (await proxy.client.get("/xavier")).json()
    assert report == json.loads(json.dumps(proxy.cluster.router.report()))
    assert report["replicas"] == {"a": 1, "b": 1}
    proxy.router = None
    assert (await proxy.client.get("/xavier")).json()["replicas"] == {}
