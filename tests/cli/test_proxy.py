"""The proxy as people start it: its arguments, what it says at the start, and its tracker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from tests.frontend.cluster import RATES, SERVING
from tests.frontend.servers import HOST, Engine, refusing, served, until
from tests.logged import messages
from tests.tracker_pools import MODEL, NAMESPACE
from xinference_xavier.cli import proxy as module
from xinference_xavier.cli.commands import main
from xinference_xavier.errors import ConfigError
from xinference_xavier.protocol.load import Load
from xinference_xavier.protocol.tracker import Member, Settings

GOOD = ["--tracker", "10.0.0.1:9920", "--model-uid", "m"]
A = "a=http://10.0.0.1:8000"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*GOOD], "Missing option '--replica'"),
        (["--replica", A, *GOOD[2:]], "Missing option '--tracker'"),
        (["--replica", A, *GOOD[:2]], "Missing option '--model-uid'"),
        ([*GOOD, "--replica", A, "--replica", A], "replica='a' is given twice"),
        ([*GOOD, "--replica", "=http://h:1"], "replica='' is not a name; use letters"),
        ([*GOOD, "--replica", "a b=http://h:1"], "replica='a b' is not a name; use letters"),
        *(
            ([*GOOD, "--replica", word], f"replica='{word}' is not a name and a URL")
            for word in (
                "a",
                "http://10.0.0.1:8000",
                "a=10.0.0.1:8000",
                "a=ftp://h",
                "a=http://",
                "a=http://h:port",
                "a=http://user@h",
                "a=http://h?q=1",
            )
        ),
        (["--tracker", "10.0.0.1", *GOOD[2:], "--replica", A], "is not of the form host:port"),
        (["--tracker", "0.0.0.0:99", *GOOD[2:], "--replica", A], "address that replicas can reach"),
        ([*GOOD, "--replica", A, "--queue", "-1"], "-1 is not in the range"),
        ([*GOOD, "--replica", A, "--port", "70000"], "70000 is not in the range"),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], sentence: str) -> None:
    result = CliRunner().invoke(main, ["proxy", *words])
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


def test_replicas_have_names() -> None:
    urls = module.parse_replicas([A, "b.2=https://[fd00::7]:1/base"])
    assert urls == {"a": "http://10.0.0.1:8000", "b.2": "https://[fd00::7]:1/base"}


class Served:
    """A proxy that is stopped in the end."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.until = asyncio.Event()

    async def start(self, tracker: str, urls: dict[str, str], queue: int | None = None) -> Served:
        url = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(
            module.serve(
                MODEL,
                tracker,
                urls,
                at=(HOST, 0),
                queue=queue,
                listening=url.set_result,
                until=self.until,
            )
        )
        self._stack.push_async_callback(self.stop)
        self.client = await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=await url, timeout=None)
        )
        return self

    async def stop(self) -> None:
        self.until.set()
        await self.task

    async def ask(self) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "text"})


@pytest.fixture
async def proxy() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        yield Served(stack)


async def report(tracker: Any, name: str, incarnation: str, requests_: int = 0) -> None:
    await tracker.join(NAMESPACE, Member(incarnation, "127.0.0.1:1"), 32, Settings(), name)
    load = Load(SERVING, 0, 0.0, requests_, rates=RATES)
    await tracker.report_load(NAMESPACE, incarnation, load)


async def test_it_asks_the_tracker_and_sends_requests_to_those_it_was_given(
    tracker: Any, proxy: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """The third server shares, but is not the proxy's."""
    for number, name in enumerate(("a", "b_dp0", "c")):
        await report(tracker, name, f"engine {number}")
    async with served(Engine("a")) as a, served(Engine("b")) as b:
        await proxy.start(tracker.address, {"a": a, "b": b})
        while not (await proxy.client.get("/xavier")).json()["mode"]:
            pass
        answers = [await proxy.ask() for _ in range(40)]  # ties are decided at random
        assert {answer.headers["x-xavier-replica"] for answer in answers} == {"a", "b_dp0"}
        assert {answer.headers["x-xavier-route"].split(";")[0] for answer in answers} == {"backlog"}
        assert {answer.text for answer in answers} == {"a", "b"}
        assert messages(caplog) == []
        await proxy.stop()


async def test_the_queue_is_its_own(tracker: Any, proxy: Served) -> None:
    load = Load(SERVING._replace(request_limit=0), 0, 0.0, 0, rates=RATES)
    await report(tracker, "a", "engine")
    await tracker.report_load(NAMESPACE, "engine", load)
    async with served(Engine("a")) as a:
        await proxy.start(tracker.address, {"a": a}, queue=0)
        while not (await proxy.client.get("/xavier")).json()["mode"]:
            pass
        asking = asyncio.create_task(proxy.ask())
        waits = 0
        while not asking.done() and not waits:
            waits = (await proxy.client.get("/xavier")).json()["waiting"]
        assert not waits
        assert (await asking).status_code == 429
        await proxy.stop()


async def test_it_warns_of_names_that_the_tracker_does_not_know(
    tracker: Any, proxy: Served, caplog: pytest.LogCaptureFixture
) -> None:
    await report(tracker, "right", "engine 1")
    await report(tracker, "", "2f6a")
    await proxy.start(tracker.address, {"right": refusing(), "wrong": refusing()})
    await until(lambda: messages(caplog))
    assert messages(caplog) == ["the tracker does not know wrong yet; it knows 2f6a, right"]


@pytest.mark.parametrize("there", [True, False])
async def test_without_a_tracker_it_warns_and_serves(
    pool: Any, proxy: Served, caplog: pytest.LogCaptureFixture, there: bool
) -> None:
    address = pool.external_address if there else refusing().removeprefix("http://")
    async with served(Engine("a")) as a:
        await proxy.start(address, {"a": a})
        assert (await proxy.ask()).text == "a"
        await until(lambda: "requests go in turn" in caplog.text)
        said = f"serves no model {MODEL};" if there else "the tracker does not answer ("
        assert said in caplog.text
        await proxy.stop()


async def test_a_port_that_is_taken_is_refused(proxy: Served) -> None:
    async with served(Engine("a")) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=r"address='127.0.0.1:\d+' cannot be used"):
            await module.serve(
                MODEL,
                "127.0.0.1:1",
                {"a": url},
                at=(HOST, port),
                queue=None,
                listening=print,
                until=asyncio.Event(),
            )


async def test_answers_under_way_are_completed_when_it_stops(proxy: Served) -> None:
    a = Engine("a", "stream")
    async with served(a) as url:
        await proxy.start(refusing().removeprefix("http://"), {"a": url})
        a.words.put_nowait(b"one")
        async with proxy.client.stream("POST", "/v1/completions", json={}) as answer:
            words = answer.aiter_raw()
            assert await anext(words) == b"one"
            proxy.until.set()
            ended, _ = await asyncio.wait({proxy.task}, timeout=0.5)  # uvicorn may need 0.2 s
            assert not ended
            a.words.put_nowait(b"two")
            a.words.put_nowait(None)
            assert [word async for word in words] == [b"two"]
        await proxy.task
