"""A new replica has what its peers use most before it takes its first request, and takes it in time
whatever its peers do. They offer whole prefixes, the most important ones first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.faults import ROWS_BEFORE_STALL
from tests.harness.replicas import (
    ReplicaProcess,
    TrackerProcess,
    fresh_keys,
    make_key,
    replicas,
    wait_until,
)
from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.load import Load, Serving
from xinference_xavier.protocol.transfer import HotChunks
from xinference_xavier.replica import warm_join as module
from xinference_xavier.replica.warm_join import Answer, RecentPrompts, chosen

ROWS = 64
SHORT = 1.0
LOAD = Load(Serving(128, 1 << 20), prefill_tokens=0, prefill_s=None, requests=0)


def answer(letters: str, uses: tuple[int, ...], named: int = 0) -> Answer:
    keys = [letter.encode() for letter in letters]
    return Answer(HotChunks(b"".join(keys), uses, named), keys)


def letters(found: dict[str, list[bytes]]) -> dict[str, str]:
    return {donor: b"".join(keys).decode() for donor, keys in found.items()}


def test_uses_at_all_peers_count_together() -> None:
    answers = {"one": answer("abxy", (3, 3, 2, 2)), "two": answer("xy", (2, 2))}
    assert letters(chosen(answers, 2)) == {"one": "xy"}
    assert letters(chosen(answers, 4)) == {"one": "xyab"}


def test_named_prefixes_come_first() -> None:
    answers = {"one": answer("ab", (9, 9)), "two": answer("xy", (0, 0), named=2)}
    assert letters(chosen(answers, 3)) == {"two": "xy", "one": "a"}


OTHER_GROUP = 1


def key(letter: str, group: int = 0) -> bytes:
    return letter.encode() + group.to_bytes(4, "big")


def prompt(letters: str) -> list[bytes]:
    return [key(letter) for letter in letters]


class Scene:
    def __init__(self) -> None:
        self.pool = Pool(ROWS)
        self.finished: list[list[bytes]] = []
        self.named: list[list[bytes]] = []
        self.recent = RecentPrompts(self.pool, self.take, lambda: self.named)

    def take(self) -> list[list[bytes]]:
        finished, self.finished = self.finished, []
        return finished

    def hold(self, keys: list[bytes]) -> None:
        for row in self.pool.reserve(keys).rows:
            self.pool.commit(row, checksum=1)

    def ask(self, *prompts: str) -> None:
        for letters in prompts:
            self.hold(prompt(letters))
            self.finished.append(prompt(letters))

    def hottest(self, most: int = ROWS) -> str:
        keys = self.recent.hottest(most).keys
        return "".join(chr(keys[place]) for place in range(0, len(keys), 5))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_what_most_requests_began_with_comes_first(scene: Scene) -> None:
    scene.ask("abc", "xy", "abd", "xy", "ae")
    assert scene.hottest() == "axyb", "c, d and e have been used once"
    assert scene.recent.hottest(ROWS).uses == (3, 2, 2, 2)


def test_of_equal_ones_the_latest_comes_first(scene: Scene) -> None:
    scene.ask("ab", "ab", "xy", "xy")
    assert scene.hottest() == "xyab"
    scene.ask("ab", "xyz")
    assert scene.hottest() == "xyab"
    scene.ask("ab", "ab")
    assert scene.hottest(most=3) == "abx"


def test_named_prefixes_come_before_all_others(scene: Scene) -> None:
    scene.ask("abc", "abc", "xy")
    scene.hold(prompt("uv"))
    scene.named = [prompt("uv"), prompt("xy")]
    assert scene.hottest() == "xyuvabc"
    assert scene.recent.hottest(ROWS).named == 4
    assert scene.recent.hottest(3).named == 3


def test_what_is_not_in_the_pool_is_not_offered_nor_what_follows_it(scene: Scene) -> None:
    scene.ask("abcd", "abcd")
    row = scene.pool.lookup(key("c"))
    scene.pool.flush([row])
    scene.named = [prompt("qr")]
    assert scene.hottest() == "ab"


def test_a_chunk_without_a_checksum_is_not_offered(scene: Scene) -> None:
    for row in scene.pool.reserve(prompt("a")).rows:
        scene.pool.commit(row)
    scene.finished = [prompt("a")] * 2
    assert scene.hottest() == ""


def test_a_group_that_looks_back_only_so_far_may_lack_its_first_chunks(scene: Scene) -> None:
    full, window = [key(each) for each in "ab"], [key(each, OTHER_GROUP) for each in "ab"]
    scene.hold([*full, window[1]])
    scene.finished = [[*full, *window]] * 2
    assert scene.hottest() == "abb"


def test_only_the_latest_requests_count(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 3)
    scene.ask("ab", "ab", "xy", "xy")
    assert scene.hottest() == "xy"


def test_memory_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 4)
    scene.ask("abcd", "xy", "xy")
    assert scene.hottest() == "xy"
    scene.ask("abcde")
    assert scene.hottest() == "", "a prompt that is too long for it is forgotten, too"


@given(st.lists(st.sampled_from(["a", "ab", "abc", "abd", "xy", "xyz", "q"]), max_size=12))
def test_however_it_is_cut_each_chunk_is_behind_the_one_before_it(prompts: list[str]) -> None:
    scene = Scene()
    scene.ask(*prompts)
    before = {"b": "a", "c": "b", "d": "b", "y": "x", "z": "y"}
    found = scene.hottest()
    for place, letter in enumerate(found):
        assert letter in "axq" or before[letter] in found[:place]
    for most in range(len(found)):
        assert scene.hottest(most) == found[:most]


@contextmanager
def started(
    tracker: TrackerProcess, name: str, transport: str = "auto", **options: object
) -> Iterator[ReplicaProcess]:
    with replicas(tracker.address, {name: transport}, rows=ROWS, **options) as (replica,):
        yield replica


@contextmanager
def launched(tracker: TrackerProcess, name: str, **options: object) -> Iterator[ReplicaProcess]:
    """A replica that may not take requests yet."""
    replica = ReplicaProcess(name, tracker.address, **{"rows": ROWS, **options})
    try:
        yield replica
    finally:
        if replica.process.is_alive():
            replica.stop()
        replica.kill()


@contextmanager
def new_replica(tracker: TrackerProcess, name: str, **options: object) -> Iterator[ReplicaProcess]:
    with launched(tracker, name, **options) as replica:
        wait_until(replica.is_warm, f"{name} takes requests")
        yield replica


def offer(tracker: TrackerProcess, donor: ReplicaProcess, keys: list[bytes], uses: int = 2) -> None:
    """Return when peers can know of it."""
    before = tracker.holdings()
    donor.store(keys)
    donor.use([keys] * uses)
    wait_until(lambda: tracker.holdings() >= before + len(keys), "it is published")


@pytest.fixture
def tracker() -> Iterator[TrackerProcess]:
    process = TrackerProcess()
    yield process
    process.kill()


@pytest.mark.process
class TestReplicas:
    def test_a_new_replica_has_the_hottest_prefixes(self, tracker: TrackerProcess) -> None:
        with started(tracker, "donor") as donor:
            hot, cold = fresh_keys(20), fresh_keys(10)
            offer(tracker, donor, hot, uses=2)
            offer(tracker, donor, cold, uses=1)
            with new_replica(tracker, "new") as new:
                assert sorted(new.held()) == sorted(hot)
                assert new.wrong_rows() == []
                assert new.counts().pinned == 0
                assert new.stats()["warm_join"]["chunks"] == len(hot)
                (line,) = (text for _, text in new.logged() if text.startswith("warm join:"))
                assert "chunks=20" in line
                wait_until(lambda: donor.holders(hot[-1]) == ("new",), "peers can fetch them")

    def test_only_free_rows_are_filled_and_with_whole_prefixes(
        self, tracker: TrackerProcess
    ) -> None:
        with started(tracker, "donor") as donor:
            prefixes = [fresh_keys(15) for _ in range(4)]
            for uses, prefix in enumerate(prefixes):
                offer(tracker, donor, prefix, uses=2 + uses)
            with new_replica(tracker, "small", rows=20) as small:
                hottest = [*prefixes[3], *prefixes[2]]
                assert sorted(small.held()) == sorted(hottest[:20])

    def test_without_anything_to_fetch_it_does_not_wait(self, tracker: TrackerProcess) -> None:
        with started(tracker, "first") as first:
            assert first.stats()["warm_join"]["seconds"] < SHORT
            with new_replica(tracker, "second") as second:
                assert second.stats()["warm_join"] == {
                    "chunks": 0,
                    "seconds": pytest.approx(0.0, abs=SHORT),
                    "failures": 0,
                }

    def test_it_can_be_switched_off(self, tracker: TrackerProcess) -> None:
        with started(tracker, "donor") as donor:
            keys = fresh_keys(5)
            offer(tracker, donor, keys)
            with new_replica(tracker, "new", warm_join=0.0) as new:
                wait_until(lambda: new.holders(keys[0]) == ("donor",), "it knows what is held")
                assert new.held() == []

    def test_it_takes_no_request_before(self, tracker: TrackerProcess) -> None:
        """A router sends requests to replicas that report their load. Here the donor hangs."""
        with started(tracker, "donor", "tests.faults:StallingGloo") as donor:
            keys = fresh_keys(10)
            offer(tracker, donor, keys)
            with launched(tracker, "new", transport="gloo", warm_join=SHORT) as new:
                new.report_load(LOAD)
                wait_until(lambda: new.filled() == ROWS_BEFORE_STALL, "some have arrived")
                assert not new.is_warm()
                assert tracker.loads() == []
                wait_until(new.is_warm, "it takes requests, in time")
                wait_until(lambda: tracker.loads() == ["new"], "routers know it")
                wait_until(
                    lambda: new.counts().filling + new.counts().quarantined == 0, "rows are free"
                )
                assert new.wrong_rows() == []

    def test_a_peer_that_cannot_be_trusted_is_not_waited_for(self, tracker: TrackerProcess) -> None:
        """Their weights differ, which they find out by a chunk that both have computed."""
        canary = make_key(-1)
        with started(tracker, "donor", factor=1.0) as donor:
            keys = fresh_keys(5)
            donor.store([canary])
            offer(tracker, donor, keys)
            with launched(tracker, "new", factor=2.0, warm_join=60.0) as new:
                wait_until(lambda: new.all_holders(keys[0]) == ("donor",), "it knows what is held")
                assert not new.is_warm()
                new.store([canary])
                wait_until(new.is_warm, "it takes requests")
                assert new.held() == [canary]

    def test_a_peer_that_hangs_costs_no_more_than_the_limit(self, tracker: TrackerProcess) -> None:
        with started(tracker, "donor") as donor:
            keys = fresh_keys(5)
            offer(tracker, donor, keys)
            donor.send_signal(signal.SIGSTOP)
            try:
                with new_replica(tracker, "new", warm_join=SHORT) as new:
                    assert new.held() == []
                    assert new.stats()["warm_join"]["failures"] == 1
            finally:
                donor.send_signal(signal.SIGCONT)
