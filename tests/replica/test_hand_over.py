"""Before a replica is removed, its peers have what only it held and others used lately."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from tests.faults import ROWS_BEFORE_STALL
from tests.harness.replicas import (
    ReplicaProcess,
    TrackerProcess,
    fresh_keys,
    is_free,
    replicas,
    wait_until,
    wait_until_known,
)
from tests.replica.test_warm_join import Scene, key, prompt
from xinference_xavier.protocol.load import Load, Serving

DRAIN = 60.0


def prefixes(scene: Scene, elsewhere: str = "") -> list[str]:
    held = set(prompt(elsewhere))
    found = scene.recent.prefixes(lambda each: each in held)
    return ["".join(chr(each[0]) for each in keys) for keys in found]


def test_what_prompts_share_stays_with_what_follows_it() -> None:
    scene = Scene()
    scene.ask("abc", "abd", "abc", "abd", "xy", "xy")
    assert prefixes(scene) == ["abdc", "xy"]


def test_behind_what_peers_hold_each_prompt_is_on_its_own() -> None:
    scene = Scene()
    scene.ask("sab", "sab", "scd", "scd", "scd", "se")
    assert prefixes(scene, elsewhere="s") == ["cd", "ab"]
    assert prefixes(scene, elsewhere="sabcd") == []


def test_what_one_request_used_stays_but_named_ones_go() -> None:
    scene = Scene()
    scene.ask("ab", "xy", "xy")
    scene.hold(prompt("n"))
    scene.named = [prompt("n")]
    assert prefixes(scene) == ["n", "xy"]


def test_the_chunks_of_all_groups_go_together() -> None:
    scene = Scene()
    keys = [key("a"), key("b"), key("a", 1), key("b", 1)]
    scene.hold(keys)
    scene.finished = [keys] * 2
    (found,) = scene.recent.prefixes(lambda each: False)
    assert found == keys


@pytest.fixture
def tracker() -> Iterator[TrackerProcess]:
    process = TrackerProcess()
    yield process
    process.kill()


def started(
    tracker: TrackerProcess, rows: int = 64, **transports: str
) -> AbstractContextManager[list[ReplicaProcess]]:
    """Replicas by name, which have nothing from a warm join."""
    return replicas(tracker.address, transports, rows=rows, warm_join=0.0)


def offer(donor: ReplicaProcess, peer: ReplicaProcess, keys: list[bytes], uses: int = 2) -> None:
    donor.store(keys)
    donor.use([keys] * uses)
    wait_until_known(peer, donor, keys)


def begin(tracker: TrackerProcess, replica: ReplicaProcess, seconds: float = DRAIN) -> None:
    replica.report_load(Load(Serving(128, 1 << 20, drain=seconds), 0, None, 0))
    wait_until(lambda: replica.name in tracker.loads(), "it takes requests")
    assert tracker.call("drain", replica.name).handing_over


def drain(tracker: TrackerProcess, replica: ReplicaProcess, seconds: float = DRAIN) -> int:
    """Return when it has handed over what it could; the chunks that peers got."""
    begin(tracker, replica, seconds)
    wait_until(lambda: not tracker.call("drain", replica.name).handing_over, "it handed over")
    return int(tracker.call("drain", replica.name).chunks)


@pytest.mark.process
class TestReplicas:
    def test_peers_have_what_only_it_held(self, tracker: TrackerProcess) -> None:
        with started(tracker, donor="auto", one="auto", two="auto") as (donor, *peers):
            prefixes = [fresh_keys(8), fresh_keys(8)]
            once, everywhere = fresh_keys(4), fresh_keys(4)
            for keys in prefixes:
                offer(donor, peers[0], keys)
            offer(donor, peers[0], once, uses=1)
            for holder in (donor, peers[1]):
                offer(holder, peers[0], everywhere)
            wait_until_known(donor, peers[1], everywhere)
            assert drain(tracker, donor) == 16
            assert sorted(peers[0].held()) in [sorted(keys) for keys in prefixes]
            assert sorted(peers[1].held()) in [sorted([*keys, *everywhere]) for keys in prefixes]
            assert {*peers[0].held(), *peers[1].held()} == {*prefixes[0], *prefixes[1], *everywhere}
            for peer in peers:
                assert (peer.wrong_rows(), peer.counts().pinned) == ([], 0)

    def test_what_a_peer_holds_is_not_evicted_for_it(self, tracker: TrackerProcess) -> None:
        with (
            started(tracker, donor="auto") as (donor,),
            started(tracker, 16, small="auto") as (small,),
        ):
            own = fresh_keys(10)
            small.store(own)
            keys = fresh_keys(12)
            offer(donor, small, keys)
            assert drain(tracker, donor) == 6
            assert sorted(small.held()) == sorted([*own, *keys[:6]])

    def test_a_peer_that_hangs_keeps_no_other_from_it(self, tracker: TrackerProcess) -> None:
        with started(tracker, donor="auto", hangs="auto", peer="auto") as (donor, hangs, peer):
            for keys in (prefixes := [fresh_keys(4), fresh_keys(4)]):
                offer(donor, peer, keys)
            hangs.send_signal(signal.SIGSTOP)
            try:
                assert drain(tracker, donor, seconds=2.0) == 4
            finally:
                hangs.send_signal(signal.SIGCONT)
            assert sorted(peer.held()) in [sorted(keys) for keys in prefixes]

    def test_one_that_is_killed_meanwhile_is_not_waited_for(self, tracker: TrackerProcess) -> None:
        """Its rows get stuck on their way, and then it dies."""
        stalling = "tests.faults:StallingGloo"
        with started(tracker, donor=stalling, peer="gloo") as (donor, peer):
            keys = fresh_keys(10)
            offer(donor, peer, keys)
            begin(tracker, donor)
            wait_until(lambda: peer.filled() == ROWS_BEFORE_STALL, "some have arrived")
            donor.kill()
            wait_until(lambda: not tracker.call("drain", "donor").handing_over, "it is given up")
            wait_until(lambda: is_free(peer), "its rows are free")
            assert peer.wrong_rows() == []
