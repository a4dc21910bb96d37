"""A request that is not routed goes to the server with the fewest, in turn among equals."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.frontend.servers import Engine, mute, refusing, served
from xinference_xavier.frontend.model_router import CLOSED
from xinference_xavier.frontend.upstreams import (
    NotHttpError,
    Upstream,
    UpstreamError,
    Upstreams,
    read,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def abc() -> AsyncIterator[Upstreams]:
    upstreams = Upstreams({name: refusing() for name in ("a", "b", "c")}, Clock())
    yield upstreams
    await upstreams.aclose()


def begin(upstreams: Upstreams) -> Upstream:
    found = upstreams.fewest()
    assert found is not None
    upstreams.begin(found)
    return found


async def test_the_fewest_requests_decide(abc: Upstreams) -> None:
    first = [begin(abc) for _ in range(6)]
    assert [each.name for each in first] == ["a", "b", "c", "a", "b", "c"]
    abc.end(first[1])
    assert begin(abc).name == "b"


async def test_equals_get_requests_in_turn(abc: Upstreams) -> None:
    names = []
    for _ in range(6):
        names.append((found := begin(abc)).name)
        abc.end(found)
    assert names == ["a", "b", "c", "a", "b", "c"]


async def test_a_server_that_failed_is_the_last_choice_for_a_while(abc: Upstreams) -> None:
    clock = abc._clock
    assert isinstance(clock, Clock)
    failed = begin(abc)
    abc.end(failed)
    abc.close(failed)
    assert {begin(abc).name for _ in range(6)} == {"b", "c"}
    others = [each for name in ("b", "c") if (each := abc.named(name)) is not None]
    assert abc.fewest(but=others) is failed
    assert abc.fewest(but=[*others, failed]) is None
    clock.now += CLOSED
    assert abc.fewest() is failed


async def test_engines_of_a_replica_are_reached_through_its_server(abc: Upstreams) -> None:
    assert abc.named("a_dp3") is abc.named("a") is not None
    assert abc.serves("a_dp3")
    assert not abc.serves("d")


async def test_it_says_whether_a_server_may_have_begun_to_answer() -> None:
    async with mute() as url:
        for address, reached in ((url, True), (refusing(), False)):
            upstreams = Upstreams({"a": address})
            with pytest.raises(UpstreamError) as failed:
                await begin(upstreams).send("GET", "/", [], None)
            assert failed.value.reached == reached
            await upstreams.aclose()


async def test_what_is_not_http_is_not_the_servers_fault() -> None:
    async with served(Engine("a")) as url:
        upstreams = Upstreams({"a": url})
        with pytest.raises(NotHttpError):
            await begin(upstreams).send("GET", "/", [(b"x-bad", b"a\x00b")], None)
        await upstreams.aclose()


async def test_a_server_may_be_below_a_path() -> None:
    a = Engine("a")
    async with served(a) as url:
        upstreams = Upstreams({"a": f"{url}/below/"})
        response = await begin(upstreams).send("GET", "/v1/models?x=1", [], None)
        assert b"".join([chunk async for chunk in read(response)]) == b"a"
        await upstreams.aclose()
    assert a.asked[0][0]["raw_path"] == b"/below/v1/models"


async def test_one_healthy_server_is_enough() -> None:
    a, b = Engine("a"), Engine("b")
    async with served(a) as first, served(b) as second:
        upstreams = Upstreams({"a": first, "b": second, "c": refusing()})
        a.sick = True
        assert await upstreams.healthy()
        b.sick = True
        assert not await upstreams.healthy()
        await upstreams.aclose()
