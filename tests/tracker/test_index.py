"""The index as replicas and watchers see it, without a network or a clock. If several replicas want
to compute a prefix, the first one does; the others learn how much."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.harness.comparisons import report
from tests.tracker_pools import MODEL, join
from tests.tracker_pools import NAMESPACE as NS
from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol.tracker import (
    Change,
    Member,
    NotMemberError,
    Outcome,
    Update,
    pack,
)
from xinference_xavier.tracker import index as claims_module
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.index import Claims, Index

KEY_BYTES = 4
A, B = Member("a", "10.0.0.1:1"), Member("b", "10.0.0.2:1")


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def keys(*numbers: int) -> bytes:
    return pack(map(key, numbers))


def index_of(*members: Member, **arguments: int) -> Index:
    index = Index(lease=10.0, **arguments)
    for member in members:
        index.join(member, KEY_BYTES, now=0.0)
    return index


def holdings(index: Index, incarnation: str) -> int:
    leases = {lease.member.incarnation: lease for lease in index.leases()}
    return len(leases[incarnation].keys)


def seen_by(watcher: str, index: Index) -> Update:
    return index.changes_since("", 0, watcher)


def test_an_older_snapshot_is_ignored() -> None:
    index = index_of(A)
    index.publish("a", 5, keys(1), b"", replaces=True)
    assert index.publish("a", 5, keys(2), b"", replaces=True) is Outcome.STALE
    assert index.publish("a", 4, keys(2), b"", replaces=True) is Outcome.STALE
    assert seen_by("b", index).changes == (Change("a", 5, keys(1), b"", True),)


def test_joining_again_keeps_holdings_and_moves_the_address() -> None:
    index = index_of(A)
    index.publish("a", 1, keys(1), b"")
    index.join(Member("a", "10.0.0.9:1"), KEY_BYTES, 5.0)
    assert seen_by("b", index).members == (Member("a", "10.0.0.9:1"),)
    assert (holdings(index, "a"), index.sequence("a")) == (1, 1)


def test_a_clock_that_goes_back_makes_no_lease_longer() -> None:
    index = index_of(A, B)
    assert index.expire(-60.0) == []
    index.renew("b", -51.0)
    assert index.expire(-50.0) == ["a"]


def test_a_watcher_learns_that_a_member_left_and_joined_between_two_looks() -> None:
    index = index_of(A, B)
    index.publish("a", 1, keys(1), b"")
    before = seen_by("b", index)
    index.leave("a")
    index.join(A, KEY_BYTES, 1.0)
    mirror = Mirror("b")
    mirror.apply(before)
    mirror.apply(index.changes_since(before.epoch, before.revision, "b"))
    assert mirror.holders(key(1)) == ()


def test_a_watcher_gets_what_it_missed_and_only_that() -> None:
    index = index_of(A, B)
    index.publish("a", 1, keys(1), b"")
    seen = seen_by("b", index)
    index.publish("a", 2, keys(2), b"")
    index.publish("b", 1, keys(9), b"")
    index.publish("a", 3, b"", keys(1))
    missed = index.changes_since(seen.epoch, seen.revision, "b")
    assert not missed.snapshot
    assert missed.changes == (
        Change("a", 2, keys(2), b"", False),
        Change("a", 3, b"", keys(1), False),
    )


def test_an_update_has_only_the_members_that_changed() -> None:
    """There may be a thousand, and each of them watches."""
    index = index_of(A)
    seen = seen_by("b", index)

    def news() -> tuple[tuple[Member, ...], tuple[str, ...]]:
        nonlocal seen
        seen = index.changes_since(seen.epoch, seen.revision)
        assert not seen.snapshot
        return seen.members, seen.left

    index.publish("a", 1, keys(1), b"")
    assert news() == ((), ())
    index.join(B, KEY_BYTES, 1.0)
    assert news() == ((B,), ())
    moved = Member("b", "10.0.0.9:1")
    index.join(moved, KEY_BYTES, 2.0)
    assert news() == ((moved,), ())
    index.set_serving("b", False)
    assert news() == ((moved._replace(serves=False),), ())
    index.set_serving("b", False)
    index.set_serving("nobody", True)
    assert not index.has_update("a", seen.epoch, seen.revision)
    index.leave("b")
    assert news() == ((), ("b",))


def test_only_changes_by_others_are_updates() -> None:
    index = index_of(A, B)
    seen = seen_by("b", index)
    index.publish("b", 1, keys(1), b"")
    assert not index.has_update("b", seen.epoch, seen.revision)
    assert index.has_update("a", seen.epoch, seen.revision)
    index.publish("a", 1, keys(2), b"")
    index.publish("b", 2, keys(3), b"")
    assert index.has_update("b", seen.epoch, seen.revision)
    assert not index.has_update("b", index.epoch, index.revision)


def test_a_watcher_that_is_too_far_behind_gets_a_snapshot() -> None:
    index = index_of(A, B, log_bytes=2000)
    seen = seen_by("b", index)
    index.publish("a", 1, keys(1), b"")
    late = index.changes_since(seen.epoch, seen.revision, "b")
    for sequence in range(2, 12):
        index.publish("a", sequence, keys(sequence), b"")
    assert not late.snapshot
    assert index.changes_since(seen.epoch, seen.revision, "b").snapshot
    assert not index.changes_since(seen.epoch, index.revision - 1, "b").snapshot


def test_the_log_is_bounded_in_bytes_even_by_one_large_publication() -> None:
    index = index_of(A, B, log_bytes=2000)
    seen = seen_by("b", index)
    index.publish("a", 1, keys(*range(5000)), b"")
    update = index.changes_since(seen.epoch, seen.revision, "b")
    assert update.snapshot
    assert len(update.changes[0].added) == 5000 * KEY_BYTES
    assert index._log_size == 0


def test_a_revision_of_another_index_yields_a_snapshot() -> None:
    index = index_of(A, B)
    index.publish("a", 1, keys(1), b"")
    assert index.changes_since("another life", index.revision, "b").snapshot
    assert index.changes_since(index.epoch, index.revision + 1, "b").snapshot
    assert index.has_update("b", "another life", index.revision)


def test_keys_beyond_the_bound_are_dropped_and_counted() -> None:
    index = index_of(A, max_keys=3)
    index.publish("a", 1, keys(1, 2), b"")
    index.publish("a", 2, keys(2, 3, 4, 5), b"")
    assert (holdings(index, "a"), index.dropped) == (3, 2)
    index.publish("a", 3, keys(1, 2, 3, 4, 5), b"", replaces=True)
    assert (holdings(index, "a"), index.dropped) == (3, 4)
    mirror = Mirror("b")
    mirror.apply(seen_by("b", index))
    assert len(mirror) == 3


REPLICAS = ("a", "b", "c")
WATCHERS = ("a", "b", "onlooker")
UNIVERSE = [key(number) for number in range(8)]
some_keys = st.sets(st.sampled_from(UNIVERSE), max_size=5)
replica = st.sampled_from(REPLICAS)


class Sharing(RuleBasedStateMachine):
    """Replicas publish over a network that loses and repeats, and watchers look when they like.

    Whatever happens, a watcher that looked knows exactly what the index knows, and the index knows
    exactly what a replica holds whose last publication was not lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.index = Index(lease=10.0, log_bytes=1500)
        self.held: dict[str, set[bytes]] = {name: set() for name in REPLICAS}
        self.known: dict[str, set[bytes]] = {}
        self.in_step: set[str] = set()
        self.sequence = dict.fromkeys(REPLICAS, 0)
        self.sent: list[tuple[str, int, bytes, bytes]] = []
        self.mirrors = {name: Mirror(name) for name in WATCHERS}

    def snapshot(self, name: str) -> None:
        self.sequence[name] += 1
        held = pack(self.held[name])
        outcome = self.index.publish(name, self.sequence[name], held, b"", replaces=True)
        assert outcome is Outcome.APPLIED
        self.known[name] = set(self.held[name])
        self.in_step.add(name)

    @rule(name=replica)
    def joins(self, name: str) -> None:
        self.index.join(Member(name, f"{name}:1"), KEY_BYTES, self.now)
        self.known.setdefault(name, set())
        self.snapshot(name)

    @rule(name=replica, added=some_keys, removed=some_keys, lost=st.booleans())
    def publishes(self, name: str, added: set[bytes], removed: set[bytes], lost: bool) -> None:
        removed -= added
        self.held[name] = self.held[name] - removed | added
        self.sequence[name] += 1
        batch = (name, self.sequence[name], pack(added), pack(removed))
        self.sent.append(batch)
        if lost:
            self.in_step.discard(name)
            return
        outcome = self.index.publish(*batch)
        if name not in self.known:
            assert outcome is Outcome.UNKNOWN
        elif name in self.in_step:
            assert outcome is Outcome.APPLIED
            self.known[name] = set(self.held[name])
        else:
            assert outcome is Outcome.GAP
            self.snapshot(name)

    @rule(data=st.data())
    def an_old_batch_comes_again(self, data: st.DataObject) -> None:
        if self.sent:
            batch = data.draw(st.sampled_from(self.sent))
            fresh = batch[0] in self.known and batch[1] > self.index.sequence(batch[0])
            if not fresh:
                revision = self.index.revision
                assert self.index.publish(*batch) in (Outcome.STALE, Outcome.UNKNOWN)
                assert self.index.revision == revision

    @rule(name=replica, serves=st.booleans())
    def can_or_cannot_serve(self, name: str, serves: bool) -> None:
        self.index.set_serving(name, serves)

    @rule(name=replica)
    def leaves(self, name: str) -> None:
        self.index.leave(name)
        self.known.pop(name, None)
        self.in_step.discard(name)

    @rule(seconds=st.sampled_from([1.0, 6.0]), alive=st.sets(replica))
    def time_passes(self, seconds: float, alive: set[str]) -> None:
        self.now += seconds
        for name in alive:
            assert self.index.renew(name, self.now) == (name in self.known)
        for name in self.index.expire(self.now):
            assert name not in alive
            del self.known[name]
            self.in_step.discard(name)

    @rule(watcher=st.sampled_from(WATCHERS))
    def looks(self, watcher: str) -> None:
        mirror = self.mirrors[watcher]
        mirror.apply(self.index.changes_since(mirror.epoch, mirror.revision, watcher))
        others = {name: held for name, held in self.known.items() if name != watcher}
        expected = {each: {name for name in others if each in others[name]} for each in UNIVERSE}
        assert {
            each: set(mirror.peers.names(mirror.full_set(each))) for each in UNIVERSE
        } == expected
        assert len(mirror) == sum(map(bool, expected.values()))
        members = self.index.members()
        assert mirror.peers.members == set(others)
        assert mirror.peers.serving == {m.incarnation for m in members if m.serves} - {watcher}

    @rule(watcher=st.sampled_from(WATCHERS))
    def forgets(self, watcher: str) -> None:
        self.mirrors[watcher].clear()

    @invariant()
    def the_index_has_what_was_published(self) -> None:
        assert {name: holdings(self.index, name) for name in self.known} == {
            name: len(held) for name, held in self.known.items()
        }
        assert len(self.index) == len(self.known)

    @invariant()
    def who_is_in_step_is_known_exactly(self) -> None:
        for name in self.in_step:
            assert self.known[name] == self.held[name]


TestSharing = Sharing.TestCase
TestSharing.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)


ONE = [b"a", b"b", b"c"]
LONGER = [*ONE, b"d"]
BRANCH = [b"a", b"b", b"x", b"y"]


@pytest.fixture
def claims() -> Claims:
    claims = Claims()
    assert claims.claim("first", ONE, now=0.0, seconds=10.0) == 0
    return claims


def test_the_first_to_ask_computes_and_may_ask_again(claims: Claims) -> None:
    assert claims.claim("first", ONE, 1.0, 10.0) == 0


def test_others_learn_how_many_chunks_it_computes(claims: Claims) -> None:
    assert claims.claim("second", ONE, 1.0, 10.0) == 3
    assert claims.claim("second", LONGER, 1.0, 10.0) == 3
    assert claims.claim("second", BRANCH, 1.0, 10.0) == 2
    assert claims.claim("second", ONE[:1], 1.0, 10.0) == 1


def test_a_replica_that_may_wait_claims_nothing(claims: Claims) -> None:
    claims.claim("second", LONGER, 1.0, 10.0)
    assert claims.claim("third", [b"d"], 1.0, 10.0) == 0


def test_chunks_before_a_claimed_one_count_as_claimed(claims: Claims) -> None:
    """The first chunks were published a moment ago, and the second replica does not know yet."""
    claims.release("first", ONE[:2])
    assert claims.claim("second", ONE, 1.0, 10.0) == 3


def test_a_replica_releases_only_its_own_claims(claims: Claims) -> None:
    claims.release("second", ONE)
    claims.forget("second")
    assert claims.claim("second", ONE, 1.0, 10.0) == 3


def test_beyond_the_limit_everybody_computes(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "MAX_CLAIMED", 4)
    assert claims.claim("second", [b"x", b"y"], 1.0, 10.0) == 0
    assert claims.claim("third", [b"x", b"y"], 1.0, 10.0) == 0
    assert len(claims) == 3


def test_expired_claims_make_room(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "MAX_CLAIMED", 4)
    claims.claim("second", [b"x", b"y"], 10.0, 10.0)
    assert len(claims) == 2


MEMBERS = [Member(name, "127.0.0.1:1") for name in ("first", "second", "third")]
KEYS = b"key1key2"


@pytest.mark.parametrize("end", ["published", "replaced", "released", "left", "expired"])
async def test_a_claim_ends(end: str) -> None:
    now = 100.0
    tracker = BlockTracker(MODEL, clock=lambda: now)
    await join(tracker, *MEMBERS)
    for member in MEMBERS:
        await tracker.compare(NS, member.incarnation, report(short=1.0))
    assert await tracker.claim(NS, "first", KEYS, 5.0) == 0
    assert await tracker.claim(NS, "second", KEYS, 5.0) == 2
    match end:
        case "published":
            await tracker.publish(NS, "first", 1, KEYS, b"")
        case "replaced":
            await tracker.replace(NS, "first", 1, KEYS)
        case "released":
            await tracker.release(NS, "first", KEYS)
        case "left":
            await tracker.leave(NS, "first")
        case "expired":
            now += 5.0
    assert await tracker.claim(NS, "second", KEYS, 5.0) == 0
    assert await tracker.claim(NS, "third", KEYS, 5.0) == 2


async def test_only_members_claim(tracker: Any) -> None:
    await join(tracker, MEMBERS[0])
    with pytest.raises(NotMemberError, match="'second' is not a member"):
        await tracker.claim(NS, "second", KEYS, 60.0)
    await tracker.release(NS, "second", KEYS)
    await tracker.release("elsewhere", "second", KEYS)
