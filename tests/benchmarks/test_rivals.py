"""Each rival follows its own rule."""

import random
from collections.abc import Callable

import pytest

from benchmarks import rivals
from benchmarks.simulator import ENGINE, Policy
from tests.routing.holdings import Held
from xinference_xavier.routing.choice import Prompt
from xinference_xavier.routing.load import Report
from xinference_xavier.routing.router import Router

KEYS = [b"%d" % number for number in range(10)]
PROMPT = Prompt(5121, KEYS)


class Stage:
    def __init__(
        self, maker: Callable[[Router, random.Random], Policy], held: dict[str, list[bytes]]
    ) -> None:
        self.router = Router(Held(held), ENGINE.size, random.Random(0))
        self.policy = maker(self.router, random.Random(0))
        self.count = 0
        for name in held:
            self.router.loads.report(name, Report(0.0, 0, 0.0, 0, ENGINE.rates))

    def send(self, prompt: Prompt = PROMPT) -> str:
        self.count += 1
        choice = self.policy.choose(f"{self.count}", prompt, 0.0)
        self.router.sent(f"{self.count}", choice, 0.0)
        return choice.replica


def other(number: int, chunks: int = 10) -> Prompt:
    return Prompt(chunks * 512 + 1, [b"%d other %d" % (number, n) for n in range(chunks)])


def test_in_turn() -> None:
    stage = Stage(rivals.InTurn, {"a": KEYS, "b": [], "c": []})
    assert [stage.send() for _ in range(4)] == ["a", "b", "c", "a"]


def test_the_shortest_backlog_ignores_the_prefix() -> None:
    stage = Stage(rivals.ShortestBacklog, {"a": KEYS, "b": []})
    stage.router.loads.report("a", Report(1.0, 0, 0.1, 0, ENGINE.rates))
    assert stage.send() == "b"


def test_thresholds_follow_a_long_match_only() -> None:
    stage = Stage(rivals.Thresholds, {"a": KEYS[:4], "b": KEYS[:2]})
    assert stage.send() == "a"
    stage = Stage(rivals.Thresholds, {"a": KEYS[:3], "b": KEYS[:2]})
    assert stage.send(Prompt(5632, KEYS)) != stage.send(Prompt(5632, KEYS[:2]))


def test_thresholds_give_up_the_prefix_when_loads_are_far_apart() -> None:
    stage = Stage(rivals.Thresholds, {"a": KEYS, "b": []})
    assert [stage.send() for _ in range(66)] == ["a"] * 65 + ["b"]


def test_weights_count_a_match_twice() -> None:
    stage = Stage(rivals.Weights, {"a": KEYS, "b": []})
    assert {stage.send() for _ in range(20)} == {"a"}
    half = Prompt(10_241, [*KEYS[:4], *(b"new %d" % number for number in range(16))])
    assert stage.send(half) == "b"


def test_tokens_to_compute_count_until_they_are_answered() -> None:
    stage = Stage(rivals.Tokens, {"a": KEYS, "b": []})
    assert stage.send() == "a"
    assert stage.send(Prompt(512, [])) in {"a", "b"}
    stage = Stage(rivals.Tokens, {"a": [], "b": []})
    first = stage.send(other(1))
    assert stage.send(other(2, chunks=2)) != first
    stage.policy.answered("1")
    assert stage.send(other(3)) == first


@pytest.mark.parametrize("maker", [rivals.Thresholds, rivals.Weights, rivals.Tokens])
def test_equals_are_chosen_at_random(maker: Callable[[Router, random.Random], Policy]) -> None:
    found = set()
    for seed in range(20):
        stage = Stage(maker, {"a": [], "b": []})
        stage.policy._source = random.Random(seed)  # type: ignore[attr-defined]
        found.add(stage.send())
    assert found == {"a", "b"}
