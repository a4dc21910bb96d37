"""What happens in a namespace, and how watchers follow it, without a network or a clock."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.tracker_pools import of
from xinference_xavier import index as index_module
from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.protocol.tracker import (
    SHORT_KEY,
    Change,
    Left,
    Member,
    News,
    Outcome,
    Settings,
    Update,
    pack,
)
from xinference_xavier.tracker import journal as journal_module
from xinference_xavier.tracker.journal import Journal

A, B = Member("a", "10.0.0.1:1"), Member("b", "10.0.0.2:1")


def key(number: int) -> bytes:
    return number.to_bytes(SHORT_KEY)


def keys(*numbers: int) -> bytes:
    return pack(map(key, numbers))


def journal_of(*members: Member, **arguments: int) -> Journal:
    journal = Journal(lease=10.0, **arguments)
    for member in members:
        journal.join(member, now=0.0)
    return journal


def seen_by(watcher: str, journal: Journal) -> Update:
    return journal.changes_since("", 0, watcher)


def test_a_clock_that_goes_back_makes_no_lease_longer() -> None:
    journal = journal_of(A, B)
    assert journal.expire(-60.0) == []
    journal.renew("b", -51.0)
    assert journal.expire(-50.0) == ["a"]


def test_a_watcher_gets_the_news_of_others_and_only_those() -> None:
    """There may be hundreds of members, and each of them watches."""
    journal = journal_of(A, B)
    seen = seen_by("b", journal)

    def news() -> tuple[News, ...]:
        nonlocal seen
        assert journal.has_update("b", seen.epoch, seen.revision)
        seen = journal.changes_since(seen.epoch, seen.revision, "b")
        assert not seen.snapshot
        return seen.news

    journal.publish("b", 1, keys(9), b"")
    journal.set_serving("a", True)
    journal.set_serving("nobody", True)
    journal.publish("a", 0, keys(1), b"")
    assert not journal.has_update("b", seen.epoch, seen.revision)
    assert journal.has_update("a", seen.epoch, seen.revision)
    journal.publish("a", 1, keys(2), b"")
    journal.publish("b", 2, keys(3), b"")
    journal.publish("a", 2, b"", keys(1))
    assert news() == (Change("a", 1, keys(2)), Change("a", 2, b"", keys(1)))
    moved = Member("a", "10.0.0.9:1")
    journal.join(moved, 2.0)
    assert news() == (moved,)
    journal.configure(Settings(1, enabled=False))
    assert news() == (Settings(1, enabled=False),)
    journal.leave("a")
    journal.join(A, 3.0)
    assert news() == (Left("a"), A)


def test_a_watcher_that_is_too_far_behind_gets_a_snapshot() -> None:
    journal = journal_of(A, B, log_bytes=2000)
    seen = seen_by("b", journal)
    journal.publish("a", 1, keys(1), b"")
    late = journal.changes_since(seen.epoch, seen.revision, "b")
    for sequence in range(2, 12):
        journal.publish("a", sequence, keys(sequence), b"")
    assert not late.snapshot
    assert journal.changes_since(seen.epoch, seen.revision, "b").snapshot
    assert not journal.changes_since(seen.epoch, journal.index.revision - 1, "b").snapshot


def test_the_log_is_bounded_in_bytes_even_by_one_large_publication() -> None:
    journal = journal_of(A, B, log_bytes=2000)
    seen = seen_by("b", journal)
    journal.publish("a", 1, keys(*range(5000)), b"")
    update = journal.changes_since(seen.epoch, seen.revision, "b")
    assert update.snapshot
    assert len(of(Change, update)[0].added) == 5000 * SHORT_KEY
    assert journal._log_size == 0


def test_a_revision_of_another_index_yields_a_snapshot() -> None:
    journal = journal_of(A, B)
    epoch, revision = journal.index.epoch, journal.index.revision
    assert journal.changes_since("another life", revision, "b").snapshot
    assert journal.changes_since(epoch, revision + 1, "b").snapshot
    assert journal.has_update("b", "another life", revision)
    assert journal.has_update("b", epoch, revision + 1)


@pytest.mark.parametrize(
    ("added", "removed", "replaces", "held", "dropped"),
    [
        ((9,), (), False, {1, 2, 9}, 0),
        ((2, 3, 4, 5), (), False, {1, 2, 3}, 2),
        ((3, 4, 9), (1, 5), False, {2, 3, 4, 9}, 0),
        ((1, 3, 4), (1,), False, {1, 2, 3}, 1),
        ((3, 4, 5), (), True, {3, 4, 5}, 0),
        ((1, 3, 4, 5), (), True, {1, 3, 4}, 1),
    ],
    ids=["no new one", "two too many", "room is made", "back at once", "others", "too many others"],
)
def test_chunks_beyond_the_bound_are_dropped_and_counted(
    added: tuple[int, ...],
    removed: tuple[int, ...],
    replaces: bool,
    held: set[int],
    dropped: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is room for four. A chunk takes as much however many hold it."""
    monkeypatch.setattr(journal_module, "MAX_KEYS", 4)
    journal = journal_of(A, B)
    journal.publish("b", 1, keys(9), b"")
    journal.publish("a", 1, keys(1, 2), b"")
    journal.publish("a", 2, keys(*added), keys(*removed), replaces)
    assert journal.leases["a"].keys == set(map(key, held))
    assert journal.dropped == dropped


REPLICAS = ("a", "b", "c")
WATCHERS = ("a", "b", "onlooker")
UNIVERSE = [key(number) for number in range(8)]
some_keys = st.sets(st.sampled_from(UNIVERSE), max_size=5)
replica = st.sampled_from(REPLICAS)
watcher = st.sampled_from(WATCHERS)


class Sharing(RuleBasedStateMachine):
    """Replicas publish over a network that loses and repeats, and watchers look when they like, and
    may be interrupted after each two keys.

    Whatever happens, a watcher that looked knows exactly what the tracker knows, and the tracker
    knows exactly what a replica holds whose last publication was not lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.piece, index_module.PIECE = index_module.PIECE, 2
        self.now = 0.0
        self.journal = Journal(lease=10.0, log_bytes=1000)
        self.held: dict[str, set[bytes]] = {name: set() for name in REPLICAS}
        self.known: dict[str, set[bytes]] = {}
        self.in_step: set[str] = set()
        self.sequence = dict.fromkeys(REPLICAS, 0)
        self.sent: list[tuple[str, int, bytes, bytes]] = []
        self.indexes = {name: Index(Peers(name)) for name in WATCHERS}

    def teardown(self) -> None:
        index_module.PIECE = self.piece

    def snapshot(self, name: str) -> None:
        self.sequence[name] += 1
        held = pack(self.held[name])
        outcome = self.journal.publish(name, self.sequence[name], held, b"", replaces=True)
        assert outcome is Outcome.APPLIED
        self.known[name] = set(self.held[name])
        self.in_step.add(name)

    @rule(name=replica)
    def joins(self, name: str) -> None:
        self.journal.join(Member(name, f"{name}:1"), self.now)
        self.known.setdefault(name, set())
        self.snapshot(name)

    @rule(name=replica, added=some_keys, removed=some_keys, lost=st.booleans())
    def publishes(self, name: str, added: set[bytes], removed: set[bytes], lost: bool) -> None:
        self.held[name] = self.held[name] - removed | added
        self.sequence[name] += 1
        batch = (name, self.sequence[name], pack(added), pack(removed))
        self.sent.append(batch)
        if lost:
            self.in_step.discard(name)
            return
        outcome = self.journal.publish(*batch)
        if name not in self.known:
            assert outcome is Outcome.UNKNOWN
        elif name in self.in_step:
            assert outcome is Outcome.APPLIED
            self.known[name] = set(self.held[name])
        else:
            assert outcome is Outcome.GAP
            self.snapshot(name)

    @rule(data=st.data(), replaces=st.booleans())
    def an_old_batch_comes_again(self, data: st.DataObject, replaces: bool) -> None:
        if self.sent:
            batch = data.draw(st.sampled_from(self.sent))
            fresh = batch[0] in self.known and batch[1] > self.journal.leases[batch[0]].sequence
            if not fresh:
                revision = self.journal.index.revision
                again = self.journal.publish(*batch, replaces)
                assert again in (Outcome.STALE, Outcome.UNKNOWN)
                assert self.journal.index.revision == revision

    @rule(name=replica, serves=st.booleans())
    def can_or_cannot_serve(self, name: str, serves: bool) -> None:
        self.journal.set_serving(name, serves)

    @rule(enabled=st.booleans())
    def is_switched(self, enabled: bool) -> None:
        version = self.journal.leases.settings.version + 1
        self.journal.configure(Settings(version, enabled))

    @rule(name=replica)
    def leaves(self, name: str) -> None:
        self.journal.leave(name)
        self.known.pop(name, None)
        self.in_step.discard(name)

    @rule(seconds=st.sampled_from([1.0, 6.0]), alive=st.sets(replica))
    def time_passes(self, seconds: float, alive: set[str]) -> None:
        self.now += seconds
        for name in alive:
            assert self.journal.renew(name, self.now) == (name in self.known)
        for name in self.journal.expire(self.now):
            assert name not in alive
            del self.known[name]
            self.in_step.discard(name)

    @rule(name=watcher, steps=st.integers(0, 6))
    def is_interrupted(self, name: str, steps: int) -> None:
        index = self.indexes[name]
        update = self.journal.changes_since(index.epoch, index.revision, name)
        for _ in zip(range(steps), index.apply_in_pieces(update), strict=False):
            pass

    @rule(name=watcher)
    def looks(self, name: str) -> None:
        index = self.indexes[name]
        index.apply(self.journal.changes_since(index.epoch, index.revision, name))
        others = {each: held for each, held in self.known.items() if each != name}
        assert {peer.name: peer.keys for peer in index.members.values()} == others
        assert index.members.settings == self.journal.leases.settings
        leases = self.journal.leases.values()
        assert index.members.serving == {each.name for each in leases if each.member.serves} - {
            name
        }

    @rule(name=watcher)
    def forgets(self, name: str) -> None:
        self.indexes[name].clear()

    @invariant()
    def the_tracker_has_what_was_published(self) -> None:
        assert {each.name: each.keys for each in self.journal.leases.values()} == self.known
        for name in self.in_step:
            assert self.known[name] == self.held[name]

    @invariant()
    def chunks_and_members_agree(self) -> None:
        for index in (self.journal.index, *self.indexes.values()):
            index.check_integrity()


TestSharing = Sharing.TestCase
TestSharing.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
