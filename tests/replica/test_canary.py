"""Replicas share only with those of which the tracker has found that they compute the same."""

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest.mock import Mock

import pytest

from tests.harness.comparisons import COMPARED, compared, report, sketch
from tests.harness.replicas import (
    DEADLINE,
    ReplicaProcess,
    TrackerProcess,
    all_up,
    fresh_keys,
    wait_until,
)
from tests.tracker_pools import let_others_run
from xinference_xavier.index import Index
from xinference_xavier.peers import DISK, Peers
from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.sketches import Difference
from xinference_xavier.protocol.tracker import Comparison, Left, Member, Update, Verdict
from xinference_xavier.replica.canary import Audited, Canary, Computed, Lost
from xinference_xavier.replica.disk import Disk, NoDisk
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.reports import EventReporter, Identity, Publisher

FOUND = Difference("layer", 0.5)
DIFFERS = Comparison(Verdict.DIFFERS, str(FOUND), "first", FOUND, "namespace~1")
ALL = [b"other's", b"own", b"peer's"]
UNLIKE = Left("unlike", DIFFERS)


class Scene:
    """A replica that has computed a canary, in a namespace with other replicas."""

    def __init__(self) -> None:
        self.index = Index(Peers("own"))
        self.peers = self.index.members
        self.namespace = SharedNamespace("namespace", self.index, NoDisk())
        self.pool = Pool(4)
        for key, origin in ((b"own", None), (b"peer's", "peer"), (b"other's", "other")):
            (row,) = self.pool.reserve([key]).rows
            row.origin = origin
            self.pool.commit(row)
        self.events = EventReporter(Identity("model", "own", ""))
        self.disk = Mock(spec=Disk)
        self.canary = Canary(
            self.peers, self.namespace, self.disk, Publisher("own", self.pool), self.events
        )
        self.canary.computed("short", sketch())
        self.update(compared("peer"))

    def update(self, *news: Member | Left) -> None:
        """A snapshot."""
        self.index.apply(Update(1, "e", True, news))
        self.canary.peers_changed()

    def judged(self, comparison: Comparison = COMPARED) -> None:
        self.canary.judged(self.namespace.current, self.canary.report, comparison)

    def told(self) -> list[tuple[str, str]]:
        """The events so far, with the peer or donor of each."""
        return [
            (event["event"], event["peer" if "peer" in event else "donor"])
            for event in self.events.pending
        ]

    def held(self) -> list[bytes]:
        return sorted(row.key for row in self.pool.rows() if self.pool.lookup(row.key))


@pytest.fixture
async def scene() -> Scene:
    return Scene()


class TestTrust:
    """It takes a verdict on what both have computed since their last resets."""

    @pytest.mark.parametrize("verdict", list(Verdict))
    async def test_takes_a_verdict_on_this_replica(self, scene: Scene, verdict: Verdict) -> None:
        scene.judged(Comparison(verdict))
        assert scene.peers.is_usable("peer") == (verdict is Verdict.COMPARED)
        assert scene.peers.may_fetch("peer") == (verdict is Verdict.COMPARED)

    @pytest.mark.parametrize("verdict", list(Verdict))
    async def test_takes_a_verdict_on_the_peer(self, scene: Scene, verdict: Verdict) -> None:
        scene.update(Member("peer", "host:1", True, Comparison(verdict)))
        scene.judged()
        assert scene.peers.is_usable("peer") == (verdict is Verdict.COMPARED)

    async def test_does_not_come_from_what_was_computed_before_a_reset(self, scene: Scene) -> None:
        before = scene.canary.report
        scene.canary.reset()
        scene.canary.judged("namespace", before, COMPARED)
        assert not scene.peers.is_usable("peer")
        assert scene.canary.report == report()

    async def test_ends_in_another_namespace(self, scene: Scene) -> None:
        scene.judged()
        await scene.namespace.part("namespace", "namespace~1")
        scene.update(compared("peer"))
        assert not scene.peers.is_usable("peer")

    async def test_ends_with_a_row_that_differs(self, scene: Scene) -> None:
        """It is back once the tracker has parted them: other peers may have rows of that donor."""
        scene.update(compared("peer"), compared("other"))
        scene.judged()
        before = scene.canary.report
        scene.canary.take(Audited("peer", FOUND))
        scene.canary.judged("namespace", before, COMPARED)
        for name in ("peer", "other"):
            assert not scene.peers.is_usable(name)
            assert not scene.peers.may_fetch(name)
            assert scene.peers.differs(name), "its rows may still arrive"
        assert scene.canary.report == before._replace(audited=(("peer", FOUND),))
        assert scene.canary.changed.is_set()
        scene.canary.reset()
        assert scene.canary.report == report()

    async def test_is_no_business_of_a_stranger(self, scene: Scene) -> None:
        """It has not learned that this replica was reset, and left it."""
        scene.judged()
        assert not scene.peers.may_fetch("stranger")


class TestWhatDiffers:
    async def test_leaves_the_namespace_once(self, scene: Scene) -> None:
        scene.judged(DIFFERS)
        scene.judged(DIFFERS)
        await let_others_run()
        assert scene.told() == [("ReplicasDiffer", "first")]
        assert scene.namespace.current == "namespace~1"
        assert (scene.canary.stats.differing, scene.canary.stats.peer) == (1, "first")

    async def test_moves_without_a_word_if_its_like_are_elsewhere(self, scene: Scene) -> None:
        scene.judged(Comparison(namespace="namespace~2"))
        await let_others_run()
        assert (scene.told(), scene.held()) == ([], ALL)
        assert scene.namespace.current == "namespace~2"

    async def test_is_counted_once_although_it_has_left(self, scene: Scene) -> None:
        scene.update(compared("peer"), compared("unlike"))
        for _ in range(2):
            scene.update(UNLIKE, compared("peer"))
        assert (scene.told(), scene.canary.stats.differing) == ([], 1)
        assert scene.namespace.current == "namespace"
        assert scene.peers.differs("unlike")

    async def test_is_no_news_to_a_replica_that_never_met_it(self, scene: Scene) -> None:
        """A tracker lists whoever differed as long as the namespace lasts."""
        scene.update(UNLIKE, compared("peer"))
        assert (scene.held(), scene.canary.stats.differing) == (ALL, 0)

    @pytest.mark.parametrize("parts", [False, True])
    async def test_is_forgotten_and_what_came_from_others_too(
        self, scene: Scene, parts: bool
    ) -> None:
        """They may have got it from there, and what is under way from them. What this engine has
        computed stays."""
        (coming,) = scene.pool.reserve([b"coming"]).rows
        coming.origin = "other"
        if parts:
            scene.judged(DIFFERS)
        else:
            scene.update(compared("unlike"))
            scene.update(UNLIKE)
        await let_others_run()
        assert not scene.pool.commit(coming)
        assert scene.held() == [b"own"]


class TestAProbe:
    """What follows from its result."""

    def test_that_computed_a_canary_is_to_be_compared(self, scene: Scene) -> None:
        scene.canary.take(Computed("long", sketch()))
        assert scene.canary.report == report(short=1.0, long=1.0)
        scene.disk.probed.assert_called_once_with(b"long", sketch())

    def test_that_the_engine_did_not_compute_is_counted(self, scene: Scene) -> None:
        scene.canary.take(Lost())
        assert scene.canary.stats.lost_probes == 1

    def test_that_found_no_difference_is_counted(self, scene: Scene) -> None:
        scene.canary.take(Audited("peer", None))
        assert (scene.canary.stats.audits, scene.canary.stats.failed_audits) == (1, 0)
        assert (scene.told(), scene.held()) == ([], ALL)

    @pytest.mark.parametrize(
        ("donor", "held"), [("peer", [b"own"]), (DISK, [b"own"]), (None, [])], ids=str
    )
    def test_that_found_one_drops_what_may_be_wrong(
        self, scene: Scene, donor: str | None, held: list[bytes]
    ) -> None:
        """All is dropped if the rows were our own."""
        scene.judged()
        scene.canary.take(Audited(donor, FOUND))
        assert (scene.canary.stats.audits, scene.canary.stats.failed_audits) == (1, 1)
        assert scene.told() == [("AuditFailed", donor or "")]
        assert scene.held() == held
        assert scene.peers.is_usable("peer") == (donor != "peer")
        assert scene.disk.distrust.called == (donor == DISK)


def computing(
    tracker: TrackerProcess, *, cannot: str = "", **factors: float | None
) -> AbstractContextManager[list[ReplicaProcess]]:
    """Replicas by name, with the factors of the numbers that they compute; those with None compute
    nothing yet."""
    options = {"transport": "shared_memory", "cannot_compare": cannot}
    return all_up(
        ReplicaProcess(name, tracker.address, factor=factor, **options)
        for name, factor in factors.items()
    )


def peers_of(replica: ReplicaProcess) -> int:
    """How many peers it trusts."""
    return int(replica.stats()["comparison"]["compared"])


def are_parted(*groups: tuple[ReplicaProcess, ...]) -> bool:
    """Whether the replicas of each group trust each other, in a namespace of their own."""
    namespaces = [{replica.namespace() for replica in group} for group in groups]
    return (
        all(len(names) == 1 and "" not in names for names in namespaces)
        and len(set.union(*namespaces)) == len(groups)
        and all(peers_of(one) == len(group) - 1 for group in groups for one in group)
    )


@pytest.mark.process
class TestReplicas:
    def test_share_nothing_before_both_have_computed_a_canary(
        self, tracker_process: TrackerProcess
    ) -> None:
        one, two = fresh_keys(2)
        with computing(tracker_process, a=1.0, b=None) as (a, b):
            a.store([one])
            b.store([two])
            wait_until(lambda: b.all_holders(one) == ("a",), "b knows of the chunk")
            wait_until(lambda: a.all_holders(two) == ("b",), "a knows of the chunk")
            assert (a.holders(two), b.holders(one)) == ((), ())
            assert b.stats()["not_sharing"] == "not compared with a peer yet"
            assert b.fetch("a", [one], DEADLINE).reason == "not compared"
            b.computed("short", 1.0)
            wait_until(lambda: b.holders(one) == ("a",), "b trusts a")
            wait_until(lambda: a.holders(two) == ("b",), "a trusts b")
            assert b.fetch("a", [one], DEADLINE).state == "COMMITTED"
            assert b.stats()["not_sharing"] is None
            assert (peers_of(a), peers_of(b)) == (1, 1)

    def test_whose_engines_cannot_compute_one_share_nothing_and_say_why(
        self, tracker_process: TrackerProcess
    ) -> None:
        (key,) = fresh_keys(1)
        with computing(tracker_process, cannot="no queue", a=1.0, b=1.0) as (a, b):
            a.store([key])
            wait_until(lambda: b.all_holders(key) == ("a",), "b knows of the chunk")
            assert b.holders(key) == ()
            assert b.stats()["not_sharing"] == "cannot compare"
            found = tracker_process.replicas()["a"]
            assert (found["verdict"], found["verdict_reason"]) == ("cannot compare", "no queue")

    def test_that_compute_other_rows_share_only_with_their_like(
        self, tracker_process: TrackerProcess
    ) -> None:
        (own,) = fresh_keys(1)
        with computing(tracker_process, a=1.0, b=1.0, c=1.5, d=1.5) as (a, b, c, d):
            wait_until(lambda: are_parted((a, b), (c, d)), "each trusts its like, and no other")
            a.store([own])
            wait_until(lambda: b.holders(own) == ("a",), "b knows of the chunk")
            assert c.all_holders(own) == ()
            assert b.fetch("a", [own], DEADLINE).state == "COMMITTED"
            # Whoever joined first stayed, and its like with it.
            found = [replica.stats()["comparison"] for replica in (a, b, c, d)]
            assert all(each["layer"] == "layer 1" for each in found if each["differing"])
            assert sum(each["differing"] for each in found) >= 2
            assert any(
                "peer computes different rows" in text
                for replica in (a, b, c, d)
                for _, text in replica.logged()
            )

    def test_that_differ_only_deep_in_a_prompt_part_when_they_know_it(
        self, tracker_process: TrackerProcess
    ) -> None:
        common, from_c = fresh_keys(2)
        with computing(tracker_process, a=1.0, b=1.0, c=1.0) as (a, b, c):
            wait_until(lambda: peers_of(c) == 2, "they trust each other")
            a.store([common])
            c.store([from_c])
            wait_until(lambda: c.holders(common) == ("a",), "c knows of the chunk")
            wait_until(lambda: b.holders(from_c) == ("c",), "b knows of the chunk")
            assert c.fetch("a", [common], DEADLINE).state == "COMMITTED"
            assert b.fetch("c", [from_c], DEADLINE).state == "COMMITTED"
            a.computed("long", 1.0)
            wait_until(lambda: a.stats()["comparison"]["canaries"] == 2, "a has both")
            b.computed("long", 1.0)
            c.computed("long", 2.0)
            wait_until(lambda: are_parted((a, b), (c,)), "c is alone")
            wait_until(lambda: common not in c.held(), "what it had fetched may be wrong")
            wait_until(lambda: from_c not in b.held(), "and so may what others have of it")
            assert b.stats()["comparison"]["peer"] == "c"

    def test_whose_audit_failed_get_no_row_of_the_donor_from_others(
        self, tracker_process: TrackerProcess
    ) -> None:
        """Nobody knows which of the two is wrong, until another one finds the same."""
        (own,) = fresh_keys(1)
        with computing(tracker_process, a=1.0, b=1.0, c=1.0) as (a, b, c):
            wait_until(lambda: are_parted((a, b, c)), "they trust each other")
            a.store([own])
            wait_until(lambda: c.holders(own) == ("a",), "c knows of the chunk")
            assert c.fetch("a", [own], DEADLINE).state == "COMMITTED"
            wait_until(lambda: len(b.holders(own)) == 2, "b could fetch it from c, too")
            b.audited("a")
            wait_until(lambda: are_parted((a, c), (b,)), "b has left them")
            assert b.all_holders(own) == ()
            c.audited("a")
            wait_until(lambda: are_parted((a,), (b, c)), "c is with b")
            assert own not in c.held()


@pytest.mark.process
def test_after_a_reset_a_replica_is_compared_again(tracker_process: TrackerProcess) -> None:
    """Its weights may have changed since it was compared."""
    (key,) = fresh_keys(1)
    with computing(tracker_process, a=1.0, b=1.0) as (a, b):
        wait_until(lambda: peers_of(a) == peers_of(b) == 1, "they trust each other")
        for replica in (a, b):
            replica.reset()
        wait_until(lambda: "+" in a.namespace() and "+" in b.namespace(), "each is alone")
        tracker_process.set_weights_version("v2")
        wait_until(lambda: a.namespace() == b.namespace() != "", "both are in one namespace again")
        a.store([key])
        wait_until(lambda: b.all_holders(key) == ("a",), "b knows of the chunk")
        assert b.holders(key) == ()
        for replica in (a, b):
            replica.computed("short", 2.0)
        wait_until(lambda: peers_of(a) == peers_of(b) == 1, "they trust each other")


@pytest.fixture
def impatient_tracker() -> Iterator[TrackerProcess]:
    tracker = TrackerProcess(lease=3.0)
    yield tracker
    tracker.kill()


@pytest.mark.process
def test_a_reset_that_a_peer_did_not_see_ends_its_trust(impatient_tracker: TrackerProcess) -> None:
    """It stood still, beyond its lease, while the other one left and came with other weights."""
    (key,) = fresh_keys(1)
    with computing(impatient_tracker, a=1.0, b=1.0) as (a, b):
        for replica in (a, b):
            replica.reset()
        wait_until(lambda: "+" in a.namespace() and "+" in b.namespace(), "they are alone")
        impatient_tracker.set_weights_version("v2")
        wait_until(lambda: a.namespace() == b.namespace() != "", "they are together")
        for replica in (a, b):
            replica.computed("short", 1.0)
        wait_until(lambda: peers_of(a) == peers_of(b) == 1, "they trust each other")
        b.send_signal(signal.SIGSTOP)
        wait_until(lambda: a.address("b") is None, "its lease has ended")
        a.reset()
        wait_until(lambda: "+" in a.namespace(), "it is alone")
        impatient_tracker.set_weights_version("v2")
        wait_until(lambda: "@" in a.namespace() and a.is_up(), "it is back")
        a.computed("short", 2.0)
        a.store([key])
        b.send_signal(signal.SIGCONT)
        wait_until(lambda: are_parted((a,), (b,)), "they have parted")
        assert b.all_holders(key) == ()
