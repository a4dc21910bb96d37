"""The replica with the earliest finish is chosen: backlog + min(compute, fetch)."""

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.routing.holdings import Held
from xinference_xavier.routing.choice import (
    Choice,
    Chunks,
    Prompt,
    choose,
    forecast,
    held_runs,
)
from xinference_xavier.routing.load import Loads, Rates, Report

SIZE = Chunks(tokens=100, bytes=1000)
KEYS = [b"%d" % number for number in range(10)]
PROMPT = Prompt(1000, KEYS)
RATES = Rates(token_s=0.001, fetch_s=0.01, byte_s=1e-5)
"""A chunk takes 0.1 s to compute and 0.01 s to fetch, after 0.01 s for the fetch itself."""


def chosen(
    held: Held,
    backlogs: dict[str, float],
    prompt: Prompt = PROMPT,
    *,
    rates: Rates = RATES,
    rates_of: dict[str, Rates] | None = None,
    weight: float = 1.0,
    requests: dict[str, int] | None = None,
    free: dict[str, int] | None = None,
    preferred: str = "",
    seed: int = 0,
) -> Choice | None:
    loads = Loads(held)
    for name, seconds in backlogs.items():
        room = (free or {}).get(name, 10**6)
        count = (requests or {}).get(name, 0)
        own = (rates_of or {}).get(name, rates)
        loads.report(name, Report(0.0, 0, seconds, count, own, room))
    loads.renumber()
    runs, fetchable = held_runs(held, lambda _: 0, prompt.keys, len(loads.names))
    found = forecast(loads, prompt, runs, fetchable, SIZE, 0.0)
    return choose(loads, found, random.Random(seed), preferred, weight=weight)


def test_between_idle_replicas_the_one_that_holds_the_prefix() -> None:
    choice = chosen(Held({"a": [], "b": KEYS[:5]}), {"a": 0.0, "b": 0.0})
    assert (choice.replica, choice.reason) == ("b", "local")
    assert choice.terms == pytest.approx((0.0, 0.0, 0.5))
    other = choice.explained({"a": "A", "b": "B"})["A"]
    assert other == pytest.approx({"backlog": 0.0, "fetch": 0.06, "compute": 0.5})


def test_a_busy_owner_is_copied_from() -> None:
    choice = chosen(Held({"a": [], "b": KEYS[:5]}), {"a": 0.0, "b": 0.2})
    assert (choice.replica, choice.reason) == ("a", "fetch")


def test_what_is_computed_sooner_is_not_fetched() -> None:
    slow = RATES._replace(fetch_s=10.0)
    choice = chosen(Held({"a": [], "b": KEYS[:5]}), {"a": 0.0, "b": 1.0}, rates=slow)
    assert (choice.replica, choice.reason) == ("a", "compute")
    assert choice.terms == pytest.approx((0.0, 0.0, 1.0))


def test_a_peer_that_cannot_send_helps_nobody() -> None:
    held = Held({"a": [], "b": KEYS[:5]}, mute="b")
    assert chosen(held, {"a": 0.0, "b": 1.0}).terms == pytest.approx((0.0, 0.0, 1.0))


def test_only_what_one_peer_holds_from_the_start_can_be_fetched() -> None:
    held = Held({"a": [], "b": KEYS[:3], "c": [*KEYS[:2], *KEYS[4:]]})
    assert chosen(held, {"a": 0.0, "b": 9.0, "c": 9.0}).terms.compute == pytest.approx(0.7)


def test_without_keys_only_backlogs_count() -> None:
    held = Held({"a": KEYS, "b": []})
    choice = chosen(held, {"a": 0.2, "b": 0.1}, Prompt(1000))
    assert (choice.replica, choice.reason) == ("b", "backlog")


def test_deep_tokens_take_longer() -> None:
    deep = Rates(0.001, depth_s=1e-6)
    assert chosen(Held({"a": KEYS[:5]}), {"a": 0.0}, rates=deep).terms.compute == pytest.approx(
        500 * (0.001 + 1e-6 * 750)
    )


def test_the_last_token_is_always_computed() -> None:
    assert chosen(Held({"a": KEYS}), {"a": 0.0}).terms.compute == pytest.approx(0.001)


def test_weighed_work_keeps_a_prompt_where_its_prefix_is() -> None:
    """And not where a replica seems to be faster: what that saves counts once."""
    slow = RATES._replace(byte_s=5e-5)  # half as fast as computing
    held = {"a": KEYS[:5], "b": []}
    assert chosen(Held(held), {"a": 0.3, "b": 0.0}, rates=slow).replica == "b"
    assert chosen(Held(held), {"a": 0.3, "b": 0.0}, rates=slow, weight=4.0).replica == "a"
    fast = {"a": RATES._replace(token_s=0.0008)}
    for weight in (1.0, 4.0):
        choice = chosen(
            Held({"a": [], "b": []}), {"a": 0.3, "b": 0.0}, rates_of=fast, weight=weight
        )
        assert choice.replica == "b"


def test_among_equals_the_fewest_requests() -> None:
    held = Held({"a": [], "b": [], "c": []})
    backlogs = dict.fromkeys("abc", 0.0)
    for seed in range(5):
        choice = chosen(held, backlogs, requests={"a": 1, "c": 2}, seed=seed)
        assert choice.replica == "b"


def test_then_at_random() -> None:
    held = Held({"a": [], "b": [], "c": []})
    choices = [chosen(held, dict.fromkeys("abc", 0.0), seed=seed) for seed in range(20)]
    assert {choice.replica for choice in choices if choice} == set("abc")


def test_a_session_only_breaks_ties() -> None:
    held = Held({"a": [], "b": []})
    equal = chosen(held, {"a": 0.0, "b": 0.0}, requests={"b": 1}, preferred="b")
    busier = chosen(held, {"a": 0.0, "b": 1.0}, preferred="b")
    assert (equal.replica, busier.replica) == ("b", "a")


def test_a_replica_without_room_for_the_prompt_comes_last() -> None:
    held = Held({"a": KEYS, "b": []})
    roomy = chosen(held, {"a": 0.0, "b": 1.0}, free={"a": 999})
    full = chosen(held, {"a": 0.0, "b": 1.0}, free={"a": 999, "b": 0})
    assert (roomy.replica, full.replica) == ("b", "a")


def test_nobody_is_chosen_where_nobody_accepts() -> None:
    assert chosen(Held({}), {}) is None
    assert chosen(Held({"silent": KEYS}), {}) is None
    assert chosen(Held({"a": KEYS}), {"a": math.inf}) is None


NAMES = [f"r{number}" for number in range(20)]


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(st.sets(st.integers(0, 9)), min_size=20, max_size=20),
    st.lists(st.sets(st.integers(0, 9)), min_size=20, max_size=20),
    st.integers(1, 20),
)
def test_runs_are_those_of_a_count_one_by_one(
    held: list[set[int]], soon: list[set[int]], count: int
) -> None:
    index = Held({name: [KEYS[i] for i in keys] for name, keys in zip(NAMES, held, strict=True)})
    expected = {
        key: sum(1 << number for number in range(20) if i in soon[number])
        for i, key in enumerate(KEYS)
    }
    runs, fetchable = held_runs(index, lambda key: expected.get(key, 0), KEYS, count)
    assert runs.tolist() == [_run(held[number] | soon[number]) for number in range(count)]
    assert fetchable == max(map(_run, held))


def _run(held: set[int]) -> int:
    return next(number for number in range(11) if number not in held)


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 10), st.floats(0, 2)),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 1500),
)
def test_no_replica_would_finish_earlier(replicas: list[tuple[int, float]], tokens: int) -> None:
    held = Held({name: KEYS[:run] for name, (run, _) in zip(NAMES, replicas, strict=False)})
    backlogs = {name: seconds for name, (_, seconds) in zip(NAMES, replicas, strict=False)}
    prompt = Prompt(tokens, KEYS[: tokens // SIZE.tokens])
    best = min(len(prompt.keys), max(run for run, _ in replicas))

    def finish(run: int, backlog: float) -> float:
        run = min(run, len(prompt.keys))
        alone = (tokens - min(run * 100, tokens - 1)) * 0.001
        rest = (tokens - min(best * 100, tokens - 1)) * 0.001
        fetched = 0.01 + (best - run) * 0.01 + rest if run < best else math.inf
        return backlog + min(alone, fetched)

    earliest = min(finish(*replica) for replica in replicas)
    assert (
        sum(chosen(held, backlogs, prompt).terms) <= max(earliest * 1.01, earliest + 0.001) + 1e-9
    )
