"""Each rival follows its own rule."""

import random
from collections import defaultdict
from itertools import count

import pytest

from benchmarks import rivals
from benchmarks.replica_model import ENGINE, Gauges, ReplicaModel
from benchmarks.simulator import Cluster, Maker
from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol.tracker import Change, Member, Settings, Update, pack
from xinference_xavier.routing.forecast import Prompt

KEYS = [b"%012d" % number for number in range(10)]
PROMPT = Prompt(5121, KEYS)
IDLE = Gauges(0, 0, 0.0)


class Stage:
    def __init__(self, maker: Maker, held: dict[str, list[bytes]], seed: int = 0) -> None:
        self.gauges = defaultdict[str, Gauges](lambda: IDLE)
        mirror = Mirror("router")
        members = tuple(Member(name, "127.0.0.1:1") for name in held)
        changes = tuple(Change(name, 1, pack(keys), b"", True) for name, keys in held.items())
        mirror.apply(Update(1, "epoch", True, Settings(), 12, members, changes))
        cluster = Cluster([*held], ENGINE, mirror, self.gauges.__getitem__)
        self.policy = maker(cluster, random.Random(seed))
        self._numbers = count(1)

    def send(self, prompt: Prompt = PROMPT) -> str:
        return self.policy.choose(f"{next(self._numbers)}", prompt, 0.0)


def other(number: int, chunks: int = 10) -> Prompt:
    return Prompt(chunks * 512 + 1, [b"%05d other%d" % (number, n) for n in range(chunks)])


def test_in_turn() -> None:
    stage = Stage(rivals.InTurn, {"a": KEYS, "b": [], "c": []})
    assert [stage.send() for _ in range(4)] == ["a", "b", "c", "a"]


def test_a_request_counts_until_its_last_token() -> None:
    stage = Stage(rivals.FewestRequests, {"a": [], "b": []})
    first, second = stage.send(), stage.send()
    assert first != second
    stage.policy.answered("1", 1.0)
    for number in range(2, 6):
        stage.policy.ended(f"{number}", 1, 1.0)
        assert stage.send() == second


def test_the_shortest_backlog_is_reported_and_shrinks_and_ignores_the_prefix() -> None:
    stage = Stage(rivals.ShortestBacklog, {"a": KEYS, "b": []})
    busy = ReplicaModel("a").report(0.0)._replace(prefill_s=0.5)
    stage.policy.report("a", busy, 0.0)
    assert stage.send() == "b"
    assert stage.policy.choose("later", PROMPT, 0.45) == "b"
    assert stage.policy.choose("latest", PROMPT, 0.55) == "a"


def test_thresholds_follow_a_long_match_only() -> None:
    stage = Stage(rivals.Thresholds, {"a": KEYS[:4], "b": KEYS[:2]})
    assert stage.send() == "a"
    stage = Stage(rivals.Thresholds, {"a": KEYS[:3], "b": KEYS[:2]})
    assert stage.send(Prompt(5632, KEYS)) != stage.send(Prompt(5632, KEYS[:2]))


def test_thresholds_give_up_the_prefix_when_loads_are_far_apart() -> None:
    stage = Stage(rivals.Thresholds, {"a": KEYS, "b": []})
    assert [stage.send() for _ in range(66)] == ["a"] * 65 + ["b"]


@pytest.mark.parametrize(
    ("gauges", "chosen"),
    [
        (IDLE, "a"),
        (Gauges(5, 1, 0.0), "a"),
        (Gauges(0, 9, 0.9), "a"),
        (Gauges(5, 9, 0.9), "b"),
    ],
)
def test_weights_count_most_of_a_match_more_than_a_queue_or_a_full_cache(
    gauges: Gauges, chosen: str
) -> None:
    stage = Stage(rivals.Weights, {"a": KEYS[:9], "b": []})
    stage.gauges["a"] = gauges
    assert stage.send() == chosen


def test_blocks_to_compute_count_until_they_are_answered_and_all_until_the_end() -> None:
    stage = Stage(rivals.Blocks, {"a": [], "b": []})
    first = stage.send(other(1))
    assert stage.send(other(2, chunks=8)) != first
    stage.policy.answered("1", 1.0)
    assert stage.send(other(3, chunks=6)) == first
    stage.policy.ended("1", 1, 2.0)
    assert stage.send(other(4)) == first


def test_blocks_that_requests_share_count_once() -> None:
    """So nine of them are less than one prompt that is computed anew."""
    stage = Stage(rivals.Blocks, {"a": KEYS, "b": []})
    assert [stage.send() for _ in range(9)] == ["a"] * 9


@pytest.mark.parametrize("maker", [rivals.Thresholds, rivals.Weights, rivals.Blocks])
def test_equals_are_chosen_at_random(maker: Maker) -> None:
    assert {Stage(maker, {"a": [], "b": []}, seed).send() for seed in range(20)} == {"a", "b"}
