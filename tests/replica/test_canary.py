"""Replicas compare what they have computed before they share it."""

import asyncio
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.replicas import (
    DEADLINE,
    ReplicaProcess,
    TrackerProcess,
    fresh_keys,
    replicas,
    wait_until,
)
from xinference_xavier.mirror import Mirror
from xinference_xavier.pool.pool import Pool, flush
from xinference_xavier.protocol.tracker import Member, Settings, Update
from xinference_xavier.protocol.transfer import PROTOCOL_VERSION
from xinference_xavier.replica import canary as module
from xinference_xavier.replica.canary import (
    Canary,
    Difference,
    ProbeResult,
    Sketch,
    difference,
)
from xinference_xavier.replica.disk import NoDisk
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.replica import Replica
from xinference_xavier.stats.schema import ComparisonStats

KEY = b"a canary"
SAMPLES = [1.0, -2.0, 3.0]
SKETCH = {"layer 0": ("float32", SAMPLES), "layer 1": ("bfloat16", SAMPLES)}


def scaled(factor: float, layer: str = "layer 1") -> dict[str, tuple[str, list[float]]]:
    dtype, samples = SKETCH[layer]
    return {**SKETCH, layer: (dtype, [factor * sample for sample in samples])}


FIRST_LAYER = {"layer 0": SKETCH["layer 0"]}
BACKWARDS = {layer: (dtype, SAMPLES[::-1]) for layer, (dtype, _) in SKETCH.items()}
ZEROS = {"layer 0": ("float32", [0.0, 0.0])}
FOUND = Difference("layer", 0.5)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (SKETCH, SKETCH, None),
        (SKETCH, scaled(1.05), None),
        (SKETCH, scaled(1.005, "layer 0"), None),
        (ZEROS, ZEROS, None),
        (FIRST_LAYER, SKETCH, None),
        (SKETCH, FIRST_LAYER, None),
        (SKETCH, scaled(1.5), ("layer 1", 1 / 3)),
        (SKETCH, scaled(1.02, "layer 0"), ("layer 0", 0.02 / 1.02)),
        (SKETCH, scaled(-1.0), ("layer 1", 2.0)),
        (SKETCH, BACKWARDS, ("layer 0", math.sqrt(4 / 7))),
        (SKETCH, {**SKETCH, "layer 1": ("float16", SAMPLES)}, ("layer 1", math.inf)),
        (SKETCH, {**SKETCH, "layer 1": ("bfloat16", SAMPLES[:2])}, ("layer 1", math.inf)),
    ],
    ids=[
        "none",
        "rounding to bfloat16",
        "rounding to float32",
        "zeros",
        "a layer that ours lacks: its rows may be evicted",
        "a layer that the other lacks: its rows may not be stored yet",
        "half as much again",
        "more than rounding to float32",
        "another sign",
        "of several layers the first is named",
        "another type",
        "another number of samples",
    ],
)
def test_a_difference_is_relative_to_the_size_of_the_samples(
    one: Sketch, other: Sketch, expected: tuple[str, float] | None
) -> None:
    found = difference(one, other)
    assert found == (expected and (expected[0], pytest.approx(expected[1])))


LONG = b"a long canary"


class Scene:
    """A replica in a namespace with an elder and a younger peer. While `answering` is set, peers
    answer with our own sketches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moves: list[str] = []
        self.told: list[tuple[str, bool]] = []
        self.asked, self.answering = asyncio.Event(), asyncio.Event()
        self.answering.set()
        self.mirror = Mirror("own", trusted=False)
        self.join("eldest", "own", "peer")
        namespace = SharedNamespace("namespace", self._move)
        self.canary = Canary("own", lambda _: None, self.mirror, namespace, self._differs)
        self.canary.probed(KEY, SKETCH)
        monkeypatch.setattr(module, "ask", self._ask)

    def join(self, *names: str) -> None:
        members = tuple(Member(name, "host:1") for name in names)
        self.mirror.apply(Update(1, "epoch", True, Settings(1, True), 1, members, ()))

    def answers(self, peer: str, sketch: Sketch, namespace: str = "namespace") -> Sketch | None:
        """What it answers the peer. It judges the peer's sketch when the loop runs."""
        return self.canary.answer(PROTOCOL_VERSION, namespace, peer, KEY, sketch)

    async def compares(self) -> bytes | None:
        """Compare the next chunk, if any, with the younger peer."""
        key = self.canary._common_chunk("peer")
        if key is not None:
            await self.canary._compare("peer", key)
        return key

    async def _move(self, namespace: str) -> None:
        self.moves.append(namespace)

    def _differs(self, peer: str, found: Difference, parts: bool) -> None:
        self.told.append((peer, parts))

    async def _ask(self, seconds: float, address: str, *question: Any) -> Sketch:
        self.asked.set()
        await self.answering.wait()
        sketch: Sketch = question[-1]
        return sketch


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


class TestWhatDiffers:
    """Peers in our namespace compute other rows than we do."""

    async def test_from_the_eldest_member_leaves_the_namespace(self, scene: Scene) -> None:
        assert scene.answers("peer", scaled(2.0)) == SKETCH
        await asyncio.sleep(0)
        assert (scene.told, scene.moves) == ([("peer", False)], [])
        assert scene.answers("eldest", scaled(2.0)) == SKETCH
        await asyncio.sleep(0)
        assert scene.told[1:] == [("eldest", True)], "what other members gave may be wrong, too"
        assert scene.moves == ["namespace~1"]

    async def test_is_told_although_the_peer_was_faster_and_has_left(self, scene: Scene) -> None:
        scene.answers("peer", scaled(2.0))
        scene.join("eldest", "own")
        await asyncio.sleep(0)
        assert scene.told == [("peer", False)]

    @pytest.mark.parametrize(("parts", "left"), [(False, [b"own", b"other's"]), (True, [b"own"])])
    def test_is_forgotten_and_what_came_from_others_too_if_we_leave_them(
        self, parts: bool, left: list[bytes]
    ) -> None:
        pool = Pool(3)
        for key, origin in ((b"own", None), (b"peer's", "peer"), (b"other's", "other")):
            (row,) = pool.reserve([key]).rows
            row.origin = origin
            pool.commit(row)
        events = SimpleNamespace(differs=lambda *_: None)
        client = SimpleNamespace(events=events)
        replica: Any = SimpleNamespace(_client=client, _forget=partial(flush, pool))
        Replica._differs(replica, "peer", FOUND, parts)
        assert [key for key in (b"own", b"peer's", b"other's") if pool.lookup(key)] == left


class TestTrust:
    """It comes from a comparison with what the engine computes now, in our namespace."""

    async def test_begins_with_a_comparison_in_our_namespace(self, scene: Scene) -> None:
        assert scene.answers("peer", SKETCH, namespace="another") is None
        await asyncio.sleep(0)
        assert not scene.canary.trusts("peer")
        assert scene.answers("peer", SKETCH) == SKETCH
        await asyncio.sleep(0)
        assert scene.canary.trusts("peer")
        assert scene.mirror.is_usable("peer")

    async def test_ends_when_the_peer_leaves(self, scene: Scene) -> None:
        """It may come back with other weights."""
        await scene.compares()
        scene.canary.members_changed(frozenset(["eldest"]))
        assert not scene.canary.trusts("peer")
        scene.answers("peer", SKETCH)
        scene.join("eldest", "own")
        await asyncio.sleep(0)
        assert not scene.canary.trusts("peer"), "what it asked before it left says nothing"

    async def test_ends_with_a_row_that_differs(self, scene: Scene) -> None:
        await scene.compares()
        scene.canary.distrust("peer", FOUND)
        assert not scene.canary.trusts("peer")
        assert not scene.mirror.is_usable("peer")

    async def test_ends_with_a_reset_after_which_all_is_compared_again(self, scene: Scene) -> None:
        for _ in range(2):
            scene.canary.probed(KEY, SKETCH)
            scene.canary.probed(LONG, SKETCH)
            assert [await scene.compares() for _ in range(3)] == [KEY, LONG, None]
            scene.canary.distrust("eldest", FOUND)
            scene.canary.reset()
            assert not scene.canary.trusts("peer")
            assert not scene.canary.differing
            assert scene.answers("peer", SKETCH) is None, "it has computed nothing since"

    async def test_does_not_come_from_what_was_asked_before_a_reset(self, scene: Scene) -> None:
        scene.answering.clear()
        comparing = asyncio.ensure_future(scene.compares())
        await scene.asked.wait()
        scene.canary.reset()
        scene.answering.set()
        await comparing
        assert not scene.canary.trusts("peer")


class Recorder:
    """Canary, events and pool that only record their calls."""

    def __init__(self) -> None:
        self.stats = ComparisonStats()
        self.told: list[tuple[Any, ...]] = []

    def probed(self, *arguments: Any) -> None:
        self.told.append(("probed", *arguments))

    def distrust(self, *arguments: Any) -> None:
        self.told.append(("distrust", *arguments))

    def audit_failed(self, *arguments: Any) -> None:
        self.told.append(("audit failed", *arguments))

    def flush(self, donor: str | None) -> int:
        self.told.append(("flush", donor))
        return 0


@pytest.mark.parametrize(
    ("result", "told", "counts"),
    [
        (ProbeResult(b"key", SKETCH), [("probed", b"key", SKETCH)], ComparisonStats()),
        (ProbeResult(None, SKETCH, "peer"), [], ComparisonStats(audits=1)),
        (ProbeResult(None, {}, lost=True), [], ComparisonStats(lost_probes=1)),
        (
            ProbeResult(None, SKETCH, "peer", FOUND),
            [("audit failed", "peer", FOUND), ("distrust", "peer", FOUND), ("flush", "peer")],
            ComparisonStats(audits=1, failed_audits=1),
        ),
        (
            ProbeResult(None, SKETCH, None, FOUND),
            [("audit failed", None, FOUND), ("flush", None)],
            ComparisonStats(audits=1, failed_audits=1),
        ),
    ],
    ids=[
        "a canary is compared with peers",
        "an audit without a difference is counted",
        "a probe that the engine did not compute is counted",
        "after a difference all rows from that donor are dropped",
        "and from any donor if it is not known",
    ],
)
def test_what_follows_from_a_probe(
    result: ProbeResult, told: list[Any], counts: ComparisonStats
) -> None:
    recorder = Recorder()
    parts = {
        "canary": recorder,
        "_disk": NoDisk(),
        "_client": SimpleNamespace(events=recorder),
        "flush": recorder.flush,
    }
    replica: Any = SimpleNamespace(**parts)
    Replica._take_result(replica, result)
    assert recorder.told == told
    assert recorder.stats == counts


@contextmanager
def computing(tracker: TrackerProcess, **factors: float) -> Iterator[list[ReplicaProcess]]:
    """Replicas by name; the numbers of their second layers are multiplied by their factors."""
    started: list[ReplicaProcess] = []
    try:
        for name, factor in factors.items():
            started.append(
                ReplicaProcess(name, tracker.address, transport="shared_memory", factor=factor)
            )
        for replica in started:
            wait_until(replica.is_up, f"{replica.name} is up")
        yield started
    finally:
        for replica in started:
            replica.stop()
            replica.kill()


def compared(replica: ReplicaProcess) -> int:
    return int(replica.stats()["comparison"]["compared"])


def are_parted(*groups: tuple[ReplicaProcess, ...]) -> bool:
    """Whether the replicas of each group trust each other, in a namespace of their own."""
    namespaces = [{replica.namespace() for replica in group} for group in groups]
    return (
        all(len(names) == 1 and "" not in names for names in namespaces)
        and len(set.union(*namespaces)) == len(groups)
        and all(compared(one) == len(group) - 1 for group in groups for one in group)
    )


@pytest.mark.process
class TestReplicas:
    def test_share_nothing_before_they_have_compared_a_chunk(
        self, tracker_process: TrackerProcess
    ) -> None:
        one, two, common = fresh_keys(3)
        with computing(tracker_process, a=1.0, b=1.0) as (a, b):
            a.store([one])
            wait_until(lambda: b.all_holders(one) == ("a",), "b knows of the chunk")
            assert b.holders(one) == ()
            assert b.stats()["not_sharing"] == "not compared with a peer yet"
            assert b.fetch("a", [one], DEADLINE).reason == "not compared"
            b.store([two])
            a.store([common])
            b.store([common])
            wait_until(lambda: b.holders(one) == ("a",), "b trusts a")
            wait_until(lambda: a.holders(two) == ("b",), "a trusts b")
            assert b.fetch("a", [one], DEADLINE).state == "COMMITTED"
            assert b.stats()["not_sharing"] is None
            assert (compared(a), compared(b)) == (1, 1)

    def test_that_compute_other_rows_share_only_with_their_like(
        self, tracker_process: TrackerProcess
    ) -> None:
        common, own = fresh_keys(2)
        with computing(tracker_process, a=1.0, b=1.0, c=1.5, d=1.5) as (a, b, c, d):
            for replica in (a, b, c, d):
                replica.store([common])
            wait_until(lambda: are_parted((a, b), (c, d)), "each trusts its like, and no other")
            a.store([own])
            wait_until(lambda: b.holders(own) == ("a",), "b knows of the chunk")
            assert c.all_holders(own) == ()
            assert b.fetch("a", [own], DEADLINE).state == "COMMITTED"
            told = [replica.stats()["comparison"] for replica in (a, b, c, d)]
            assert all(each["layer"] == "layer 1" for each in told if each["differing"])
            assert sum(each["differing"] for each in told) >= 2
            assert any(
                "peer computes different rows" in text
                for replica in (a, b, c, d)
                for _, text in replica.logged()
            )

    def test_that_differ_only_deep_in_a_prompt_part_when_they_know_it(
        self, tracker_process: TrackerProcess
    ) -> None:
        common, other = fresh_keys(2)
        with computing(tracker_process, a=1.0, b=1.0, c=1.0) as (a, b, c):
            for replica in (a, b, c):
                replica.probed(b"short", 1.0)
            wait_until(lambda: compared(c) == 2, "they trust each other")
            a.store([common])
            wait_until(lambda: c.holders(common) == ("a",), "c knows of the chunk")
            assert c.fetch("a", [common], DEADLINE).state == "COMMITTED"
            for replica, factor in ((a, 1.0), (b, 1.0), (c, 2.0)):
                replica.probed(b"long", factor)
            wait_until(lambda: are_parted((a, b), (c,)), "c is alone")
            wait_until(lambda: c.counts().ready == 0, "what it had fetched may be wrong")
            a.store([other])
            wait_until(lambda: b.holders(other) == ("a",), "the others still share")

    def test_of_which_only_one_has_computed_the_long_canary_go_on_sharing(
        self, tracker_process: TrackerProcess
    ) -> None:
        (key,) = fresh_keys(1)
        with computing(tracker_process, a=1.0, b=1.0) as (a, b):
            for replica in (a, b):
                replica.probed(b"short", 1.0)
            wait_until(lambda: compared(a) == compared(b) == 1, "they trust each other")
            a.probed(b"long", 1.0)
            wait_until(lambda: a.stats()["comparison"]["canaries"] == 2, "a has both")
            a.store([key])
            wait_until(lambda: b.holders(key) == ("a",), "b knows of the chunk")
            b.probed(b"long", 2.0)
            wait_until(lambda: are_parted((a,), (b,)), "b asks, as it comes later")

    def test_do_not_compare_what_they_have_copied(self, tracker_process: TrackerProcess) -> None:
        """A copy's rows are the donor's, and would say nothing about this replica."""
        common, copied = fresh_keys(2)
        with computing(tracker_process, a=1.0, b=1.0, c=1.0) as (a, b, c):
            for replica in (a, b):
                replica.store([common])
            a.store([copied])
            wait_until(lambda: b.holders(copied) == ("a",), "b trusts a")
            assert b.fetch("a", [copied], DEADLINE).state == "COMMITTED"
            c.store([copied])
            wait_until(lambda: compared(c) == 1, "c trusts a")
            assert c.holders(common) == ("a",)
            assert b.holders(copied) == ("a",)


@pytest.mark.process
def test_replicas_that_cannot_sketch_trust_each_other(tracker_process: TrackerProcess) -> None:
    (key,) = fresh_keys(1)
    transports = dict.fromkeys("ab", "shared_memory")
    with replicas(tracker_process.address, transports) as (a, b):
        a.store([key])
        wait_until(lambda: b.holders(key) == ("a",), "b knows of the chunk")


@pytest.mark.process
def test_after_a_reset_a_replica_is_compared_again(tracker_process: TrackerProcess) -> None:
    """Its weights may have changed since it was compared."""
    before, after = fresh_keys(2)
    with computing(tracker_process, a=1.0, b=1.0) as (a, b):
        for replica in (a, b):
            replica.store([before])
        wait_until(lambda: compared(a) == compared(b) == 1, "they have compared their rows")
        for replica in (a, b):
            replica.reset()
        wait_until(
            lambda: "+" in a.namespace() and "+" in b.namespace(),
            "each is in a namespace of its own",
        )
        tracker_process.set_weights_version("v2")
        wait_until(lambda: a.namespace() == b.namespace() != "", "both are in one namespace again")
        a.store([after])
        wait_until(lambda: b.all_holders(after) == ("a",), "b knows of the chunk")
        assert b.holders(after) == ()
        b.store([after])
        wait_until(lambda: compared(a) == compared(b) == 1, "they have compared their rows")


@pytest.fixture
def impatient_tracker() -> Iterator[TrackerProcess]:
    tracker = TrackerProcess(lease=3.0)
    yield tracker
    tracker.kill()


@pytest.mark.process
def test_a_reset_that_a_peer_did_not_see_ends_its_trust(impatient_tracker: TrackerProcess) -> None:
    """It stood still, beyond its lease, while the other one left and came with other weights."""
    common, other = fresh_keys(2)
    with computing(impatient_tracker, a=1.0, b=1.0) as (a, b):
        for replica in (a, b):
            replica.reset()
        wait_until(lambda: "+" in a.namespace() and "+" in b.namespace(), "they are alone")
        impatient_tracker.set_weights_version("v2")
        wait_until(lambda: a.namespace() == b.namespace() != "", "they are together")
        for replica in (a, b):
            replica.store([common])
        wait_until(lambda: compared(a) == compared(b) == 1, "they have compared their rows")
        b.send_signal(signal.SIGSTOP)
        wait_until(lambda: a.address("b") is None, "its lease has ended")
        a.reset()
        wait_until(lambda: "+" in a.namespace(), "it is alone")
        impatient_tracker.set_weights_version("v2")
        wait_until(lambda: "@" in a.namespace() and a.is_up(), "it is back")
        a.store([other])
        b.send_signal(signal.SIGCONT)
        wait_until(lambda: "a" in b.all_holders(other), "b knows of the chunk")
        assert b.fetch("a", [other], DEADLINE).reason == "not compared"
        assert b.holders(other) == (), "and does not ask again"
        for replica in (a, b):
            replica.store([common])
        wait_until(lambda: compared(a) == compared(b) == 1, "they have compared their rows")
        assert b.fetch("a", [other], DEADLINE).state == "COMMITTED"
