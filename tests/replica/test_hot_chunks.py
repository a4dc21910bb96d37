"""A new replica has what its peers use most before it takes its first request, and takes it in time
whatever its peers do. They offer whole prefixes, the most important ones first. Before a replica is
removed, its peers have what only it held and others used lately."""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.faults import ROWS_BEFORE_STALL
from tests.harness.comparisons import compared, compared_index, snapshot
from tests.harness.replicas import (
    ReplicaProcess,
    TrackerProcess,
    fresh_keys,
    is_free,
    replicas,
    wait_until,
    wait_until_known,
)
from tests.tracker_pools import let_others_run
from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.load import Load, Serving
from xinference_xavier.protocol.tracker import Member
from xinference_xavier.replica import hot_chunks as module
from xinference_xavier.replica.disk import NoDisk
from xinference_xavier.replica.fetcher import Fetch, Fetcher, FetchState
from xinference_xavier.replica.hot_chunks import BATCH, HotChunks, RecentPrompts, copy_rows

ROWS = 64
SHORT = 1.0
DRAIN = 60.0
LOAD = Load(Serving(128, 1 << 20), prefill_tokens=0, prefill_s=None, requests=0)


class Granting:
    """A fetcher whose donors have everything."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def start(self, fetch: Fetch) -> None:
        await asyncio.sleep(0)
        fetch.committed = [row for row in fetch.rows if self.pool.commit(row, pins=1)]
        fetch.state = FetchState.COMMITTED


async def test_a_copy_goes_on_behind_what_the_pool_has_and_fills_free_rows_only() -> None:
    pool, keys = Pool(1000), fresh_keys(2 * BATCH + 10)
    for row in pool.reserve(keys[:BATCH]).rows:
        pool.commit(row)
    fetcher = cast(Fetcher, Granting(pool))
    deadline = time.monotonic() + 60
    assert await copy_rows(fetcher, "donor", keys, deadline) == BATCH + 10
    origins = [row.origin for row in map(pool.lookup, keys) if row is not None]
    assert origins == [None] * BATCH + ["donor"] * (BATCH + 10)
    others = fresh_keys(1000)
    assert await copy_rows(fetcher, "donor", others, deadline, spare=10) == 990 - len(keys)
    assert await copy_rows(fetcher, "donor", others, deadline) == 10
    assert pool.counts() == (1000, 1000, 0, 0, 0)


async def test_nothing_is_evicted_where_the_free_rows_are_taken_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, keys = Pool(4), fresh_keys(6)
    for row in pool.reserve(keys[:4]).rows:
        pool.commit(row)
    monkeypatch.setattr(module, "_free", lambda *_: BATCH)
    fetcher, deadline = cast(Fetcher, Granting(pool)), time.monotonic() + 60
    assert await copy_rows(fetcher, "donor", keys[4:], deadline) == 0
    assert all(map(pool.lookup, keys[:4]))


async def test_copies_from_several_donors_share_the_work() -> None:
    """What one is bringing, the others leave to it."""
    fetcher, keys = Granting(Pool(4 * BATCH)), fresh_keys(2 * BATCH)
    deadline = time.monotonic() + 60
    copies = (copy_rows(cast(Fetcher, fetcher), each, keys, deadline) for each in ("one", "two"))
    assert await asyncio.gather(*copies) == [BATCH, BATCH]


OTHER_GROUP = 1


def key(letter: str, group: int = 0) -> bytes:
    return letter.encode() + group.to_bytes(4, "big")


def prompt(letters: str) -> list[bytes]:
    return [key(letter) for letter in letters]


class Scene:
    def __init__(self) -> None:
        self.pool = Pool(ROWS)
        self.finished: deque[Sequence[bytes]] = deque()
        self.named: list[list[bytes]] = []
        kept: Any = SimpleNamespace(prompts=lambda: self.named)
        self.recent = RecentPrompts(self.pool, self.finished, kept, NoDisk())

    def hold(self, keys: list[bytes]) -> None:
        for row in self.pool.reserve(keys).rows:
            self.pool.commit(row, checksum=1)

    def ask(self, *prompts: str) -> None:
        for letters in prompts:
            self.hold(prompt(letters))
            self.finished.append(prompt(letters))

    def hottest(self) -> str:
        return "".join(chr(each[0]) for each in self.recent.hottest())


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_what_most_requests_began_with_comes_first(scene: Scene) -> None:
    scene.ask("abc", "xy", "abd", "xy", "ae")
    assert scene.hottest() == "axyb", "c, d and e have been used once"


def test_of_equal_ones_the_latest_comes_first(scene: Scene) -> None:
    scene.ask("ab", "ab", "xy", "xy")
    assert scene.hottest() == "xyab"
    scene.ask("ab", "xyz")
    assert scene.hottest() == "xyab"
    scene.ask("ab", "ab")
    assert scene.hottest() == "abxy"


def test_named_prefixes_come_before_all_others(scene: Scene) -> None:
    scene.ask("abc", "abc", "xy")
    scene.hold(prompt("uv"))
    scene.named = [prompt("uv"), prompt("xy")]
    assert scene.hottest() == "xyuvabc"


def test_what_is_not_in_the_pool_is_not_offered_nor_what_follows_it(scene: Scene) -> None:
    scene.ask("abcd", "abcd")
    row = scene.pool.lookup(key("c"))
    scene.pool.flush([row])
    scene.named = [prompt("qr")]
    assert scene.hottest() == "ab"


def test_a_chunk_without_a_checksum_is_not_offered(scene: Scene) -> None:
    for row in scene.pool.reserve(prompt("a")).rows:
        scene.pool.commit(row)
    scene.finished += [prompt("a")] * 2
    assert scene.hottest() == ""


def test_a_group_that_looks_back_only_so_far_may_lack_its_first_chunks(scene: Scene) -> None:
    full, window = [key(each) for each in "ab"], [key(each, OTHER_GROUP) for each in "ab"]
    scene.hold([*full, window[1]])
    scene.finished += [[*full, *window]] * 2
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


def prefixes(scene: Scene, elsewhere: str = "") -> list[str]:
    found: dict[bytes, str] = {}
    for each, first in scene.recent.hottest(set(prompt(elsewhere)).__contains__).items():
        found[first] = found.get(first, "") + chr(each[0])
    return [*found.values()]


def test_what_prompts_share_stays_with_what_follows_it(scene: Scene) -> None:
    scene.ask("abc", "abd", "abc", "abd", "xy", "xy")
    assert prefixes(scene) == ["abdc", "xy"]


def test_behind_what_peers_hold_each_prompt_is_on_its_own(scene: Scene) -> None:
    scene.ask("sab", "sab", "scd", "scd", "scd", "se")
    assert prefixes(scene, elsewhere="s") == ["cd", "ab"]
    assert prefixes(scene, elsewhere="sabcd") == []


def test_what_one_request_used_stays_but_named_ones_go(scene: Scene) -> None:
    scene.ask("ab", "xy", "xy")
    scene.hold(prompt("n"))
    scene.named = [prompt("n")]
    assert prefixes(scene) == ["n", "xy"]


def test_the_chunks_of_all_groups_go_together(scene: Scene) -> None:
    keys = [key("a"), key("b"), key("a", 1), key("b", 1)]
    scene.hold(keys)
    scene.finished += [keys] * 2
    assert scene.recent.hottest() == dict.fromkeys(keys, keys[0])


def old_replica(
    tracker: TrackerProcess, transport: str = "auto"
) -> AbstractContextManager[list[ReplicaProcess]]:
    return replicas(tracker.address, {"donor": transport}, rows=ROWS)


def launched(tracker: TrackerProcess, name: str, **options: object) -> ReplicaProcess:
    """A replica that may not take requests yet."""
    return ReplicaProcess(name, tracker.address, **{"rows": ROWS, **options})


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
    with TrackerProcess() as tracker:
        yield tracker


async def test_a_new_replica_asks_its_like_where_the_tracker_sends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two namespaces its index knows nobody."""
    index, (key,), asked = compared_index("new"), fresh_keys(1), list[str]()

    async def fetch_hottest(_: HotChunks, peer: str, deadline: float) -> int:
        asked.append(peer)
        return 1

    monkeypatch.setattr(module, "_LOOK", 0.0)
    monkeypatch.setattr(HotChunks, "_fetch_hottest", fetch_hottest)
    hot = HotChunks(
        incarnation="new",
        key_bytes=len(key),
        index=index,
        fetcher=Mock(),
        neighbours=Mock(is_settled=lambda _: True, lends=lambda _: False),
        process=Mock(ready=True),
        recent=Mock(),
    )
    index.apply(snapshot(Member("other", "host:1"), other=[key]))
    joining = asyncio.create_task(hot.join(60.0))
    await let_others_run()
    index.clear()
    await let_others_run()
    index.members.set_compared(True)
    index.apply(snapshot(compared("like"), like=[key]))
    await joining
    assert asked == ["like"]


@pytest.mark.process
class TestWarmJoin:
    def test_a_new_replica_has_the_hottest_prefixes(self, tracker: TrackerProcess) -> None:
        with old_replica(tracker) as (donor,):
            hot, cold = fresh_keys(20), fresh_keys(10)
            offer(tracker, donor, hot, uses=2)
            offer(tracker, donor, cold, uses=1)
            with new_replica(tracker, "new") as new:
                assert sorted(new.held()) == sorted(hot)
                assert new.wrong_rows() == []
                assert new.counts().pinned == 0
                (line,) = (text for _, text in new.logged() if text.startswith("warm join:"))
                assert "chunks=20" in line
                wait_until(lambda: donor.holders(hot[-1]) == ("new",), "peers can fetch them")

    def test_only_free_rows_are_filled_and_with_whole_prefixes(
        self, tracker: TrackerProcess
    ) -> None:
        with old_replica(tracker) as (donor,):
            prefixes = [fresh_keys(15) for _ in range(4)]
            for uses, prefix in enumerate(prefixes):
                offer(tracker, donor, prefix, uses=2 + uses)
            with new_replica(tracker, "small", rows=20) as small:
                hottest = [*prefixes[3], *prefixes[2]]
                assert sorted(small.held()) == sorted(hottest[:20])

    def test_without_anything_to_fetch_it_does_not_wait(self, tracker: TrackerProcess) -> None:
        """Neither the first replica nor the next, for which we wait for less than they may."""
        first = new_replica(tracker, "first", warm_join=600.0)
        with first, new_replica(tracker, "second", warm_join=600.0):
            pass

    def test_it_can_be_switched_off(self, tracker: TrackerProcess) -> None:
        with old_replica(tracker) as (donor,):
            keys = fresh_keys(5)
            offer(tracker, donor, keys)
            with new_replica(tracker, "new", warm_join=0.0) as new:
                wait_until(lambda: new.holders(keys[0]) == ("donor",), "it knows what is held")
                assert new.held() == []

    def test_it_takes_no_request_before(self, tracker: TrackerProcess) -> None:
        """A router sends requests to replicas that report their load. Here the donor hangs."""
        with old_replica(tracker, "tests.faults:StallingGloo") as (donor,):
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
        """Their weights differ."""
        with old_replica(tracker) as (donor,):
            keys = fresh_keys(5)
            offer(tracker, donor, keys)
            with launched(tracker, "new", factor=None, warm_join=60.0) as new:
                wait_until(lambda: new.all_holders(keys[0]) == ("donor",), "it knows what is held")
                assert not new.is_warm(), "it may still turn out to be like the donor"
                new.computed("short", 2.0)
                wait_until(new.is_warm, "it takes requests")
                assert new.held() == []

    def test_a_peer_that_hangs_costs_no_more_than_the_limit(self, tracker: TrackerProcess) -> None:
        with old_replica(tracker) as (donor,):
            keys = fresh_keys(5)
            offer(tracker, donor, keys)
            donor.send_signal(signal.SIGSTOP)
            try:
                with new_replica(tracker, "new", warm_join=SHORT) as new:
                    assert new.held() == []
            finally:
                donor.send_signal(signal.SIGCONT)


def together(
    tracker: TrackerProcess, rows: int = 64, **transports: str
) -> AbstractContextManager[list[ReplicaProcess]]:
    """Replicas by name, which have nothing from a warm join."""
    return replicas(tracker.address, transports, rows=rows, warm_join=0.0)


def offer_to(donor: ReplicaProcess, peer: ReplicaProcess, keys: list[bytes], uses: int = 2) -> None:
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
class TestHandOver:
    def test_peers_have_what_only_it_held(self, tracker: TrackerProcess) -> None:
        with together(tracker, donor="auto", one="auto", two="auto") as (donor, *peers):
            prefixes = [fresh_keys(8), fresh_keys(8)]
            once, everywhere = fresh_keys(4), fresh_keys(4)
            for keys in prefixes:
                offer_to(donor, peers[0], keys)
            offer_to(donor, peers[0], once, uses=1)
            for holder in (donor, peers[1]):
                offer_to(holder, peers[0], everywhere)
            wait_until_known(donor, peers[1], everywhere)
            assert drain(tracker, donor) == 16
            assert sorted(peers[0].held()) in [sorted(keys) for keys in prefixes]
            assert sorted(peers[1].held()) in [sorted([*keys, *everywhere]) for keys in prefixes]
            assert {*peers[0].held(), *peers[1].held()} == {*prefixes[0], *prefixes[1], *everywhere}
            for peer in peers:
                assert (peer.wrong_rows(), peer.counts().pinned) == ([], 0)

    def test_what_a_peer_holds_is_not_evicted_for_it(self, tracker: TrackerProcess) -> None:
        with (
            together(tracker, donor="auto") as (donor,),
            together(tracker, 16, small="auto") as (small,),
        ):
            own = fresh_keys(10)
            small.store(own)
            keys = fresh_keys(12)
            offer_to(donor, small, keys)
            assert drain(tracker, donor) == 6
            assert sorted(small.held()) == sorted([*own, *keys[:6]])

    def test_a_peer_that_hangs_keeps_no_other_from_it(self, tracker: TrackerProcess) -> None:
        with together(tracker, donor="auto", hangs="auto", peer="auto") as (donor, hangs, peer):
            for keys in (prefixes := [fresh_keys(4), fresh_keys(4)]):
                offer_to(donor, peer, keys)
            hangs.send_signal(signal.SIGSTOP)
            try:
                assert drain(tracker, donor, seconds=2.0) == 4
            finally:
                hangs.send_signal(signal.SIGCONT)
            assert sorted(peer.held()) in [sorted(keys) for keys in prefixes]

    def test_one_that_is_killed_meanwhile_is_not_waited_for(self, tracker: TrackerProcess) -> None:
        """Its rows get stuck on their way, and then it dies."""
        stalling = "tests.faults:StallingGloo"
        with together(tracker, donor=stalling, peer="gloo") as (donor, peer):
            keys = fresh_keys(10)
            offer_to(donor, peer, keys)
            begin(tracker, donor)
            wait_until(lambda: peer.filled() == ROWS_BEFORE_STALL, "some have arrived")
            donor.kill()
            wait_until(lambda: not tracker.call("drain", "donor").handing_over, "it is given up")
            wait_until(lambda: is_free(peer), "its rows are free")
            assert peer.wrong_rows() == []
