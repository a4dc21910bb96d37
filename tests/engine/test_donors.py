"""A manager with the adaptive policy fetches only what pays, from the donors that are fastest."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
from vllm.v1.kv_offload.base import OffloadKey

from tests.engine.scheduling import (
    CHUNK,
    ONE_GROUP,
    Request,
    Scheduling,
    chunks,
    layout_of,
    prefix_scan,
    window_scan,
)
from xinference_xavier.engine.keys import Group, Layout
from xinference_xavier.peers import RETRY_AFTER

PREFILL = 1000.0
"""Tokens per second; a chunk takes 0.128 s."""


class Engine(Scheduling):
    """Has a pool of 512 rows and computes a chunk in 0.128 s."""

    def __init__(self, slots: int = 512, layout: Layout = ONE_GROUP) -> None:
        super().__init__(slots=slots, adaptive=True, layout=layout)
        self.manager.prefill_rate.tokens_per_second = PREFILL
        self._prompts = 0

    def request(self, count: int, peers: Iterable[str] = "a") -> Request:
        """A request for `count` new chunks, all of which each of `peers` holds."""
        self._prompts += 1
        keys = chunks(f"prompt {self._prompts}", count)
        self.tier.only_hold(**dict.fromkeys(peers, keys))
        return self.arrive(f"request {self._prompts}", keys)

    def learn(self, overhead: float, per_row: float, peers: Iterable[str] = "a") -> None:
        self.manager.selection.adaptive = False
        for peer in peers:
            for count in (4, 4, 40, 10, 40):
                self.fetch_and_finish(self.request(count, [peer]), overhead + per_row * count)
        self.manager.selection.adaptive = True

    def steps(self, seconds: dict[int, float]) -> None:
        """Compute 1,000 tokens per step; `seconds` is the duration by depth."""
        for depth, took in [*seconds.items()] * 5:
            self.begin_step(1000, {"r": 1000}, depth)
            self.clock.now += took
            self.manager.steps.end(self.clock())

    @property
    def decisions(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.manager.stats()["fetch_decisions"])


def test_chunks_that_are_faster_to_compute_are_computed() -> None:
    vllm = Engine()
    vllm.learn(0.55, 0.028)
    request = vllm.request(5)
    for _ in range(3):
        assert vllm.attempt(request) == 0, "at once"
    assert vllm.decisions["computed"] == 1
    assert vllm.attempt(vllm.request(6)) is None
    assert (vllm.decisions["computed"], vllm.decisions["fetched"]) == (1, 6)


def test_a_slow_disk_is_tried_once() -> None:
    """It has no link to open, so its first reading tells how fast it is."""
    vllm = Engine()
    vllm.fetch_and_finish(vllm.request(10, ["disk"]), 10.0)
    vllm.attempt(vllm.request(10, ["disk"]))
    assert len(vllm.tier.fetches) == 1


@pytest.mark.parametrize("overhead", [0.0, 100.0], ids=["slow", "nothing in time"])
def test_a_slow_disk_that_has_more_does_not_hide_a_peer(overhead: float) -> None:
    vllm = Engine()
    vllm.learn(overhead, 1.0, ["disk"])
    vllm.learn(0.0, 0.001)
    assert vllm.attempt(vllm.ask(40, disk=40, a=39)) is None
    fetch = vllm.tier.fetches[-1]
    assert (fetch.source, len(fetch.rows)) == ("a", 39)


def test_a_fast_disk_is_preferred_to_a_slow_peer() -> None:
    vllm = Engine()
    vllm.learn(0.0, 0.05)
    vllm.learn(0.0, 0.001, ["disk"])
    vllm.attempt(vllm.ask(40, disk=40, a=40))
    assert vllm.tier.fetches[-1].source == "disk"


def test_only_chunks_that_arrive_in_time_are_fetched() -> None:
    vllm = Engine()
    vllm.learn(0.0, 0.1)
    assert vllm.attempt(vllm.request(80)) is None
    assert len(vllm.tier.fetches[-1].rows) == pytest.approx(50, abs=2)


def test_nothing_is_fetched_when_less_time_is_left_than_any_fetch_takes() -> None:
    """A request waits for KV blocks after a fetch, and a peer computes one more of its chunks."""
    vllm = Engine()
    vllm.learn(0.1, 0.001)
    request = vllm.ask(33, a=30)
    assert vllm.attempt(request) is None
    vllm.tier.end(vllm.tier.fetches[-1], seconds=0.13)
    assert vllm.attempt(request) == 30
    vllm.tier.peers_hold(a=request.keys[:31])
    deadline = vllm.manager.requests["r"].deadline
    assert deadline is not None
    vllm.clock.now = deadline - 0.05
    assert vllm.attempt(request) == 30
    assert vllm.manager.stats()["scheduler_errors"] == 0


def test_a_fixed_threshold_replaces_the_cost_model() -> None:
    vllm = Engine()
    vllm.learn(0.0, 1.0)
    vllm.manager.selection.adaptive = False
    assert vllm.attempt(vllm.request(2)) is None
    assert vllm.attempt(vllm.request(1)) == 0
    assert vllm.decisions["computed"] == 0


def test_deep_chunks_are_fetched_where_shallow_ones_are_computed() -> None:
    vllm = Engine()
    vllm.learn(0.55, 0.1)
    vllm.steps({0: 1.0, 10_000: 2.0})
    assert vllm.attempt(vllm.request(10)) == 0
    keys = chunks("long prompt", 60)
    vllm.fill(keys[:50])
    vllm.tier.peers_hold(a=keys)
    assert vllm.attempt(vllm.arrive("deep", keys)) is None
    assert len(vllm.tier.fetches[-1].rows) == 10


def test_a_short_gap_before_chunks_of_the_pool_is_worth_a_fetch() -> None:
    """The head was a copy and evicted first; the tail stayed."""
    vllm = Engine()
    request = vllm.ask(6, a=1)
    vllm.fill(request.keys[1:])
    assert vllm.attempt(request) is None
    vllm.tier.end(vllm.tier.fetches[-1])
    assert vllm.attempt(request) == 6


def rows_by_donor(vllm: Engine, request: Request) -> dict[str, int]:
    """How many rows the request fetches from each donor."""
    before = len(vllm.tier.fetches)
    assert vllm.attempt(request) is None
    return {fetch.source: len(fetch.rows) for fetch in vllm.tier.fetches[before:]}


class TestSeveralDonors:
    def test_divide_a_long_fetch(self) -> None:
        vllm = Engine()
        vllm.learn(0.01, 0.01, "abc")
        vllm.clock.now += RETRY_AFTER + 1
        before = vllm.decisions["fetched"]
        assert rows_by_donor(vllm, vllm.request(40, "ab")) == {"a": 20, "b": 20}
        assert vllm.decisions["fetched"] == before + 1
        for fetch in vllm.tier.fetches[-2:]:
            vllm.tier.end(fetch, seconds=0.21)
        vllm.end_step()
        assert sorted(rows_by_donor(vllm, vllm.request(40, "abc")).values()) == [13, 13, 14]

    def test_do_not_divide_a_fetch_that_is_mostly_overhead(self) -> None:
        vllm = Engine()
        vllm.learn(1.0, 0.01, "ab")
        assert len(rows_by_donor(vllm, vllm.request(40, "ab"))) == 1

    def test_do_without_a_slow_or_busy_one(self) -> None:
        vllm = Engine()
        for peer, per_row in {"a": 0.01, "b": 0.02, "c": 0.01}.items():
            vllm.learn(0.0, per_row, peer)
        assert rows_by_donor(vllm, vllm.request(40, "ab")) == {"a": 40}
        assert rows_by_donor(vllm, vllm.request(40, "ac")) == {"c": 40}, "a is busy"

    def test_are_tried_alone_before_they_divide_a_fetch(self) -> None:
        vllm = Engine()
        vllm.learn(0.0, 0.01, "a")
        assert rows_by_donor(vllm, vllm.request(40, "ab")) == {"b": 40}

    def test_that_are_no_faster_together_seldom_divide_a_fetch(self) -> None:
        """The consumer's own link or memory is the bottleneck."""
        vllm = Engine()
        vllm.learn(0.01, 0.01, "ab")
        divided = []
        for _ in range(50):
            request = vllm.request(40, "ab")
            divided.append(len(rows_by_donor(vllm, request)) > 1)
            for fetch in vllm.tier.fetches[-2:] if divided[-1] else vllm.tier.fetches[-1:]:
                vllm.tier.end(fetch, seconds=0.41)
            assert vllm.attempt(request) == 40
            vllm.finish(request)
            vllm.end_step()
        assert divided[0]
        assert sum(divided[20:]) < 10


WINDOW = 8
FULL, *SLIDING = range(6)


class Hybrid(Engine):
    """One group with full attention and five with windows of eight chunks, like Gemma 3."""

    def __init__(self, groups: Sequence[int] = (FULL, *SLIDING), window: int = WINDOW) -> None:
        sizes = {
            number.to_bytes(4): Group(CHUNK, None if number == FULL else window)
            for number in {FULL, *groups}
        }
        super().__init__(slots=4000, layout=Layout(CHUNK, sizes))
        self.window = window
        self.numbers = groups

    def prompt(self, count: int) -> list[list[OffloadKey]]:
        return [chunks("prompt", count, number) for number in self.numbers]

    def held_prompt(self, count: int) -> list[list[OffloadKey]]:
        """One whose chunks the peer `a` holds."""
        groups = self.prompt(count)
        self.tier.peers_hold(a=[key for keys in groups for key in keys])
        return groups

    def look_up(self, *groups: Sequence[OffloadKey]) -> bool:
        """Whether vLLM defers a request for the prompt: none of its groups may miss."""
        request = self.arrive("r", *groups)
        self.manager.begin_lookups(request.req_id, 0)
        lookup = self.manager.lookup
        deferred = False
        for number, keys in zip(self.numbers, groups, strict=True):
            if number == FULL:
                hits = prefix_scan(lookup, keys, request.context)
            else:
                hits = window_scan(lookup, keys, self.window, request.context)
            if hits == 0:
                self.end_step()
                return False
            deferred |= hits is None
        self.end_step()
        return deferred

    def fetched(self) -> list[list[int]]:
        """The places of the chunks of the latest fetch, by group."""
        keys = {row.key for row in self.tier.fetches[-1].rows}
        return [
            [place for place, key in enumerate(group) if key in keys] for group in self.prompt(200)
        ]


class TestWindows:
    def test_only_what_vllm_loads_is_fetched(self) -> None:
        vllm = Hybrid()
        assert vllm.look_up(*vllm.held_prompt(100))
        full, *sliding = vllm.fetched()
        assert full == list(range(100))
        assert sliding == 5 * [list(range(92, 100))]

    def test_rows_come_in_the_order_of_their_tokens(self) -> None:
        """So that what has arrived of a fetch that is cut short belongs to one prefix."""
        vllm = Hybrid()
        groups = vllm.held_prompt(10)
        assert vllm.look_up(*groups)
        place = {key: number for keys in groups for number, key in enumerate(keys)}
        places = [place[row.key] for row in vllm.tier.fetches[0].rows]  # type: ignore[index]
        assert places == sorted(places)

    def test_few_chunks_can_save_a_whole_prompt(self) -> None:
        """All layers slide, as in Mistral 0.1: four chunks spare eighty."""
        vllm = Hybrid(SLIDING[:1], window=4)
        vllm.learn(3.0, 0.01)
        assert vllm.look_up(*vllm.held_prompt(80))
        assert vllm.fetched() == [[76, 77, 78, 79]]

    def test_a_window_in_the_pool_is_not_fetched(self) -> None:
        vllm = Hybrid()
        groups = vllm.prompt(20)
        for keys in groups[1:]:
            vllm.fill(keys[12:])
        vllm.tier.peers_hold(a=groups[0])
        assert vllm.look_up(*groups)
        full, *sliding = vllm.fetched()
        assert (full, sliding) == (list(range(20)), 5 * [[]])

    def test_a_hit_ends_where_somebody_has_all_windows(self) -> None:
        vllm = Hybrid()
        groups = vllm.prompt(40)
        vllm.tier.peers_hold(a=groups[0] + [key for keys in groups[1:] for key in keys[:30]])
        assert vllm.look_up(*groups)
        full, *sliding = vllm.fetched()
        assert (full, sliding) == (list(range(30)), 5 * [list(range(22, 30))])

    def test_a_recurrent_state_is_stored_here_and_there(self) -> None:
        vllm = Hybrid((FULL, SLIDING[0]), window=1)
        full, recurrent = vllm.prompt(200)
        vllm.tier.peers_hold(a=[*full, recurrent[50], recurrent[120]])
        assert vllm.look_up(full, recurrent)
        assert vllm.fetched() == [list(range(121)), [120]]

    def test_one_donor_has_all_groups(self) -> None:
        vllm = Hybrid((FULL, SLIDING[0]))
        full, sliding = vllm.prompt(20)
        vllm.tier.peers_hold(a=full, b=full[:15] + sliding[:15], c=sliding)
        assert vllm.look_up(full, sliding)
        assert vllm.tier.fetches[-1].source == "b"
        assert vllm.fetched() == [list(range(15)), list(range(7, 15))]

    def test_the_hit_is_shorter_if_not_all_can_arrive_in_time(self) -> None:
        vllm = Hybrid()
        vllm.learn(0.0, 0.05)
        assert vllm.look_up(*vllm.held_prompt(200))
        full, *sliding = vllm.fetched()
        assert len(full) == pytest.approx(60, abs=2)
        assert sliding == 5 * [full[-WINDOW:]]

    def test_nothing_is_fetched_if_no_window_can_arrive_in_time(self) -> None:
        vllm = Hybrid()
        vllm.learn(0.0, 0.14)
        assert not vllm.look_up(*vllm.held_prompt(200))


@pytest.mark.parametrize(
    ("groups", "counts", "main"),
    [
        ([Group(CHUNK)], [3], 0),
        ([Group(CHUNK)], [0], None),
        ([Group(CHUNK, window=8), Group(CHUNK)], [20, 20], 1),
        ([Group(CHUNK // 2), Group(CHUNK), Group(2 * CHUNK, window=1)], [4, 4, 4], 1),
        ([Group(CHUNK), Group(4 * CHUNK)], [3, 0], None),
    ],
    ids=["one group", "no whole chunk", "window", "longest chunks", "only others' are whole"],
)
def test_main_keys_are_those_of_the_group_with_the_longest_chunks_and_no_window(
    groups: list[Group], counts: list[int], main: int | None
) -> None:
    """Routers use them to see how much of a prompt a replica holds."""
    vllm = Scheduling(layout=layout_of(*groups))
    prompt = [chunks("prompt", count, number) for number, count in enumerate(counts)]
    request = vllm.arrive("r", *prompt)
    main_keys = vllm.manager.requests[request.req_id].main_keys()
    assert main_keys == ([] if main is None else prompt[main])
