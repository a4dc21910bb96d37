"""Simulated replicas take as long as their rates allow and keep what they have computed."""

import pytest

from benchmarks.replica_model import ENGINE, Engine
from benchmarks.rivals import InTurn
from benchmarks.simulator import EarliestFinish, Maker, Result, Simulator
from benchmarks.traces import CHUNK, GROUP, Request

TOKENS = 10 * CHUNK + 1
FETCH = ENGINE.fetch_s + 10 * CHUNK / ENGINE.fetch
COMPUTE = TOKENS / ENGINE.prefill
TRANSIT = ENGINE.transit


def request(at: float, name: str, answer: int = 1) -> Request:
    keys = [f"{name} {number}".ljust(32).encode() + GROUP for number in range(10)]
    return Request(at, TOKENS, keys, answer)


def run(
    replicas: int,
    maker: Maker,
    *requests: Request,
    engine: Engine = ENGINE,
    shares: bool = True,
) -> Result:
    return Simulator(replicas, maker, engine=engine, shares=shares).run(requests)


def test_prompts_are_computed_one_after_another() -> None:
    result = run(1, InTurn, request(0.0, "a"), request(0.0, "b"))
    assert result.first == pytest.approx([TRANSIT + COMPUTE, TRANSIT + 2 * COMPUTE])
    assert (result.tokens.local, result.tokens.computed) == (0, 2 * TOKENS)


@pytest.mark.parametrize(
    ("replicas", "shares", "expected", "seconds"),
    [
        (1, True, (10 * CHUNK, 0, 1), 1 / ENGINE.prefill),
        (2, True, (0, 10 * CHUNK, 1), FETCH + 1 / ENGINE.prefill),
        (2, False, (0, 0, TOKENS), COMPUTE),
    ],
    ids=["computed here", "computed elsewhere", "not shared"],
)
def test_the_second_request_is_a_hit(
    replicas: int, shares: bool, expected: tuple[int, int, int], seconds: float
) -> None:
    result = run(replicas, InTurn, request(0.0, "a"), request(5.0, "a"), shares=shares)
    assert result.first[1] == pytest.approx(TRANSIT + seconds)
    tokens = result.tokens
    assert (tokens.local, tokens.fetched, tokens.computed - TOKENS) == expected


def test_loading_does_not_delay_the_answers_of_others() -> None:
    slow = Engine(fetch=2 * ENGINE.prefill)
    asked = request(0.0, "a"), request(5.0, "b", answer=1001), request(7.0, "b"), request(8.0, "a")
    result = run(2, InTurn, *asked, engine=slow)
    assert result.tokens.fetched == 2 * 10 * CHUNK
    step = ENGINE.base_s + ENGINE.slope_s
    assert result.last[1] - result.first[1] == pytest.approx(1000 * step + 1 / ENGINE.prefill)


def test_the_router_follows_the_prefix() -> None:
    result = run(4, EarliestFinish, request(0.0, "a"), request(5.0, "a"))
    assert (result.tokens.local, result.tokens.fetched) == (10 * CHUNK, 0)


def test_a_full_pool_forgets_the_oldest_prompt() -> None:
    small = Engine(slots=20)
    asked = [request(5.0 * number, name) for number, name in enumerate("abca")]
    assert run(1, InTurn, *asked, engine=small).tokens.local == 0
    again = [request(5.0 * number, name) for number, name in enumerate("abcc")]
    assert run(1, InTurn, *again, engine=small).tokens.local == 10 * CHUNK


@pytest.mark.parametrize(("saves_all", "read"), [(False, 10), (True, 40)])
def test_a_disk_has_what_was_computed_twice_or_all(saves_all: bool, read: int) -> None:
    disk = Engine(slots=20, disk=50_000, saves_all=saves_all)
    asked = [request(5.0 * number, name) for number, name in enumerate("abcabca")]
    result = run(1, InTurn, *asked, engine=disk)
    assert result.first[-1] == pytest.approx(TRANSIT + 10 * CHUNK / 50_000 + 1 / ENGINE.prefill)
    assert (result.saved, result.tokens.read) == (30 * CHUNK, read * CHUNK)


def test_a_disk_serves_one_replica_at_a_time() -> None:
    disk = Engine(slots=20, disk=50_000, saves_all=True, fetch=1_000)
    asked = [request(5.0 * number, name) for number, name in enumerate("aabbcc")]
    at_once = run(2, InTurn, *asked, request(40.0, "a"), request(40.0, "a"), engine=disk)
    reading = 10 * CHUNK / 50_000
    assert at_once.first[-2:] == pytest.approx(
        [TRANSIT + reading + 1 / ENGINE.prefill, TRANSIT + 2 * reading + 1 / ENGINE.prefill]
    )


def test_the_same_requests_give_the_same_result() -> None:
    asked = [request(0.3 * number, f"{number % 7}", answer=100) for number in range(50)]
    first, second = (run(3, EarliestFinish, *asked) for _ in range(2))
    assert first.last == second.last
