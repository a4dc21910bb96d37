"""What a replica's scheduler may rely on when it asks its mirror."""

import os
import random
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.harness.comparisons import compared, compared_mirror
from tests.logged import messages
from xinference_xavier import mirror as module
from xinference_xavier.limits import LIMIT
from xinference_xavier.mirror import PIECE, Mirror
from xinference_xavier.protocol.tracker import Change, Member, Settings, Update, pack

KEY = b"key1"
OTHER = b"key2"
MEMBERS = (compared("own", "h:0"), compared("a", "h:1"), compared("b", "h:2"))


def update(*changes: Change, revision: int = 1, **fields: object) -> Update:
    known = Update(revision, "epoch", False, Settings(), len(KEY), MEMBERS, changes)
    return known._replace(**fields)


def adds(incarnation: str, sequence: int, *keys: bytes) -> Change:
    return Change(incarnation, sequence, pack(keys), b"", False)


def removes(incarnation: str, sequence: int, *keys: bytes) -> Change:
    return Change(incarnation, sequence, b"", pack(keys), False)


def replaces(incarnation: str, sequence: int, *keys: bytes) -> Change:
    return Change(incarnation, sequence, pack(keys), b"", True)


@pytest.fixture
def mirror() -> Mirror:
    return compared_mirror("own")


def test_holders_are_the_others(mirror: Mirror) -> None:
    mirror.apply(update(adds("b", 1, KEY), adds("a", 1, KEY), adds("own", 1, KEY, OTHER)))
    assert mirror.holders(KEY) == ("a", "b")
    assert mirror.holders(OTHER) == ()
    assert mirror.peers.address("a") == "h:1"
    assert "own" not in mirror.peers
    assert len(mirror) == 1


def test_a_run_ends_where_no_peer_has_all_of_it(mirror: Mirror) -> None:
    keys = [b"key%d" % number for number in range(4)]
    mirror.apply(update(adds("a", 1, *keys[:3]), adds("b", 1, *keys[:2], keys[3])))
    a, b = mirror.peers["a"].bit, mirror.peers["b"].bit
    assert mirror.usable_run(keys, -1) == (3, a)
    assert mirror.usable_run(keys, b) == (2, b)
    assert mirror.usable_run(keys[:2], -1) == (2, a | b)
    assert mirror.usable_run(keys[3:], ~b) == (0, ~b), "nothing is known yet of who is chosen"
    assert mirror.usable_run([], -1) == (0, -1)


def test_only_trusted_peers_can_be_fetched_from(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, KEY), adds("b", 1, KEY)))
    assert mirror.holders(KEY) == ("a", "b")
    mirror.distrust("a")
    assert mirror.holders(KEY) == ("b",)
    assert sorted(mirror.peers.names(mirror.full_set(KEY))) == ["a", "b"]
    mirror.apply(update(members=(Member("b", "h:2"),)))
    assert mirror.holders(KEY) == ()
    mirror.apply(update(members=(compared("b", "h:2"),)))
    mirror.set_compared(False)
    assert mirror.holders(KEY) == ()


def test_a_peer_is_usable_while_its_chunks_could_be_fetched(mirror: Mirror) -> None:
    """Even if it holds none."""
    mirror.apply(update())
    assert mirror.is_usable("a")
    assert not mirror.is_usable("nobody")
    mirror.distrust("a")
    assert not mirror.is_usable("a")


def test_a_withdrawn_key_has_one_holder_fewer(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, KEY), adds("b", 1, KEY)))
    mirror.apply(update(removes("a", 2, KEY, OTHER)))
    assert mirror.holders(KEY) == ("b",)
    mirror.apply(update(removes("b", 2, KEY)))
    assert (mirror.holders(KEY), len(mirror)) == ((), 0)


def test_a_replacement_leaves_nothing_from_before(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, KEY), adds("b", 1, KEY)))
    mirror.apply(update(replaces("a", 2, OTHER)))
    assert (mirror.holders(KEY), mirror.holders(OTHER)) == (("b",), ("a",))


def test_a_snapshot_leaves_nothing_from_before(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, KEY), adds("b", 1, KEY)))
    mirror.apply(update(replaces("b", 7, OTHER), snapshot=True))
    assert (mirror.holders(KEY), mirror.holders(OTHER)) == ((), ("b",))


def test_only_members_hold_keys(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, KEY, OTHER), adds("b", 1, KEY)))
    mirror.apply(update(members=(), left=("a",)))
    assert (mirror.holders(KEY), mirror.holders(OTHER)) == (("b",), ())
    assert mirror.peers.keys() == {"b"}


def test_a_new_member_holds_nothing_of_one_that_left(mirror: Mirror) -> None:
    """It gets that one's number."""
    mirror.apply(update(adds("a", 1, KEY)))
    mirror.apply(update(members=(), left=("a",)))
    mirror.apply(update(adds("c", 1, OTHER), members=(compared("c", "h:3"),)))
    assert (mirror.holders(KEY), mirror.holders(OTHER)) == ((), ("c",))


def test_members_stay_until_they_leave(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, KEY)))
    mirror.apply(update(members=()))
    assert (mirror.holders(KEY), mirror.peers.members) == (("a",), {"a", "b"})
    mirror.apply(update(members=(compared("a", "h:9"),)))
    assert (mirror.peers.address("a"), mirror.peers.members) == ("h:9", {"a", "b"})


def test_a_snapshot_has_all_members(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, KEY)))
    mirror.apply(update(members=MEMBERS[2:], snapshot=True))
    assert (mirror.peers.members, mirror.peers.serving) == ({"b"}, {"b"})


def test_a_peer_that_cannot_serve_keeps_its_keys(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, KEY)))
    mirror.apply(update(members=(MEMBERS[1]._replace(serves=False),)))
    assert (mirror.holders(KEY), mirror.peers.serving) == ((), {"b"})
    assert mirror.peers.names(mirror.full_set(KEY)) == ["a"]
    mirror.apply(update(members=(MEMBERS[1],)))
    assert (mirror.holders(KEY), mirror.peers.serving) == (("a",), {"a", "b"})
    mirror.clear()
    assert mirror.peers.serving == frozenset()


def test_a_mirror_has_no_holders_while_sharing_is_switched_off(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, KEY)))
    mirror.apply(update(settings=Settings(1, False)))
    assert (mirror.enabled, mirror.holders(KEY)) == (False, ())
    mirror.apply(update(settings=Settings(2, True)))
    assert mirror.holders(KEY) == ("a",)


def test_an_older_switch_position_does_not_win(mirror: Mirror) -> None:
    mirror.apply(update(settings=Settings(5, False)))
    mirror.apply(update(settings=Settings(4, True)))
    assert not mirror.enabled


def test_clearing_keeps_the_switch(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, KEY), settings=Settings(5, False)))
    mirror.clear()
    assert (len(mirror), mirror.epoch, mirror.revision, mirror.enabled) == (0, "", 0, False)
    assert not mirror.peers


class TestStaleEntries:
    """A donor answered that it does not hold the key, having published up to a sequence."""

    @pytest.fixture(autouse=True)
    def _listed(self, mirror: Mirror) -> None:
        mirror.apply(update(adds("a", 3, KEY), adds("b", 1, KEY)))

    def test_the_entry_goes_for_this_donor_only(self, mirror: Mirror) -> None:
        mirror.record_stale(KEY, "a", 5)
        assert mirror.holders(KEY) == ("b",)

    @pytest.mark.parametrize(
        ("publications", "holders"),
        [
            ([adds("a", 4, KEY), adds("a", 5, KEY)], ("b",)),
            ([adds("a", 6, KEY)], ("a", "b")),
            ([adds("a", 6, OTHER)], ("b",)),
        ],
        ids=["on their way before the answer", "later", "later, but unrelated"],
    )
    def test_only_a_later_publication_revives_it(
        self, mirror: Mirror, publications: list[Change], holders: tuple[str, ...]
    ) -> None:
        mirror.record_stale(KEY, "a", 5)
        for publication in publications:
            mirror.apply(update(publication))
        assert mirror.holders(KEY) == holders

    def test_a_snapshot_that_was_on_its_way_does_not_revive_it(self, mirror: Mirror) -> None:
        mirror.record_stale(KEY, "a", 5)
        mirror.apply(update(replaces("a", 5, KEY), snapshot=True))
        assert mirror.holders(KEY) == ()

    def test_an_answer_older_than_the_mirror_is_not_believed(self, mirror: Mirror) -> None:
        """The entry may be from the later publication, which will not be repeated."""
        mirror.apply(update(adds("a", 6, KEY)))
        mirror.record_stale(KEY, "a", 5)
        assert "a" in mirror.holders(KEY)

    def test_stale_entries_are_forgotten_once_they_cannot_matter(self, mirror: Mirror) -> None:
        mirror.record_stale(KEY, "a", 5)
        mirror.apply(update(adds("a", 6, OTHER)))
        assert not mirror.peers["a"].stale

    def test_stale_entries_are_bounded(self, mirror: Mirror) -> None:
        for number in range(LIMIT + 10):
            mirror.record_stale(number.to_bytes(4, "big"), "a", 5)
        assert len(mirror.peers["a"].stale) == LIMIT


class TestFullMirror:
    """Holds two keys of one shard."""

    KEYS = tuple(b"k" + bytes([number] * 3) for number in range(4))

    @pytest.fixture
    def mirror(self) -> Mirror:
        mirror = Mirror("own", max_keys=2)
        mirror.set_compared(True)
        mirror.apply(update(adds("a", 1, *self.KEYS[:2])))
        return mirror

    def held(self, mirror: Mirror) -> list[bool]:
        return [bool(mirror.usable_set(key)) for key in self.KEYS]

    def test_forgets_what_was_published_first_and_says_so(
        self, mirror: Mirror, caplog: pytest.LogCaptureFixture
    ) -> None:
        mirror.apply(update(adds("a", 2, self.KEYS[2])))
        assert self.held(mirror) == [False, True, True, False]
        assert len(mirror) == 2
        assert messages(caplog) == ["no room for the chunks of peers: max_keys=2"]

    def test_keeps_what_others_published_again(self, mirror: Mirror) -> None:
        """A peer has fetched it."""
        mirror.apply(update(adds("b", 1, self.KEYS[0])))
        mirror.apply(update(adds("a", 2, self.KEYS[2])))
        assert self.held(mirror) == [True, False, True, False]

    def test_keeps_what_was_used(self, mirror: Mirror) -> None:
        mirror.used([self.KEYS[0], b"none"])
        mirror.apply(update(adds("a", 2, self.KEYS[2])))
        assert self.held(mirror) == [True, False, True, False]

    def test_makes_room_among_other_keys_if_its_own_shard_is_empty(self, mirror: Mirror) -> None:
        mirror.apply(update(adds("a", 2, OTHER[::-1])))
        assert (len(mirror), mirror.holders(OTHER[::-1])) == (2, ("a",))


def test_a_small_update_is_applied_at_once(mirror: Mirror) -> None:
    """Nobody waits for a pause, and nobody sees half of it."""
    steps = mirror.apply_in_pieces(update(adds("a", 1, KEY), adds("b", 1, OTHER)))
    assert list(steps) == []
    assert (mirror.holders(KEY), mirror.holders(OTHER)) == (("a",), ("b",))


def test_an_update_is_applied_in_pieces(mirror: Mirror) -> None:
    """Between them, the scheduler gets Python's lock."""
    keys = [number.to_bytes(4) for number in range(3 * PIECE + 1)]
    steps = mirror.apply_in_pieces(update(adds("a", 1, *keys), adds("b", 1, keys[0])))
    sizes = []
    for _ in steps:
        sizes.append(len(mirror))
    assert sizes == [PIECE, 2 * PIECE, 3 * PIECE]
    assert len(mirror) == 3 * PIECE + 1
    assert mirror.revision == 1
    assert mirror.holders(keys[0]) == ("a", "b")


def test_a_snapshot_frees_the_old_keys_in_pieces(mirror: Mirror) -> None:
    mirror.apply(update(adds("a", 1, *(os.urandom(4) for _ in range(20 * PIECE)))))
    shards = mirror._shards
    steps = mirror.apply_in_pieces(update(replaces("b", 7, OTHER), snapshot=True))
    counts = []
    for _ in steps:
        counts.append(sum(map(len, shards)))
    assert len(set(counts)) >= 9
    assert not any(shards)
    assert mirror.holders(OTHER) == ("b",)


def test_who_reads_while_a_snapshot_frees_the_old_keys_finds_fewer(mirror: Mirror) -> None:
    every = [number.to_bytes(4) for number in range(10)]

    class Interrupted(list[bytes]):
        """Keys between which another thread applies a snapshot."""

        def __iter__(self) -> Iterator[bytes]:
            yield every[0]
            mirror.apply(update(replaces("a", 2, *every), snapshot=True))
            yield from every[1:]

    mirror.apply(update(adds("a", 1, *every)))
    assert mirror.usable_run(Interrupted(every), ~0) == (1, mirror.usable_set(every[0]))


def test_a_snapshot_of_known_peers_takes_as_long_as_the_first(mirror: Mirror) -> None:
    """It is built aside, so nothing of a peer has to be looked for in it."""
    members = tuple(compared(f"peer {number}", "h:1") for number in range(20))
    changes = [replaces(peer, 1, *(os.urandom(4) for _ in range(PIECE))) for peer, *_ in members]
    snapshot = update(*changes, snapshot=True, members=members)
    first = sum(1 for _ in mirror.apply_in_pieces(snapshot))
    to_free = len(mirror) // PIECE + 1
    assert sum(1 for _ in mirror.apply_in_pieces(snapshot)) <= first + to_free
    assert len(mirror) == len(members) * PIECE


def test_of_two_holdings_of_a_peer_in_a_snapshot_the_last_counts(mirror: Mirror) -> None:
    mirror.apply(update(replaces("a", 1, KEY), replaces("a", 2, OTHER), snapshot=True))
    assert (mirror.holders(KEY), mirror.holders(OTHER)) == ((), ("a",))


def test_an_update_that_was_interrupted_is_applied_again(mirror: Mirror) -> None:
    keys = [number.to_bytes(4) for number in range(2 * PIECE)]
    whole = update(adds("a", 1, *keys), removes("b", 2, keys[0]))
    mirror.apply(update(adds("b", 1, keys[0]), revision=0))
    next(mirror.apply_in_pieces(whole))
    assert mirror.revision == 0, "the watcher asks for the same changes again"
    mirror.apply(whole)
    assert (len(mirror), mirror.holders(keys[0])) == (len(keys), ("a",))


def test_a_key_takes_less_than_120_bytes() -> None:
    """In a full mirror, in which keys have come and gone. It has the share of a shard's table in
    use that two million keys have."""
    length, count = 36, 125_000
    source = random.Random(0)
    mirror = Mirror("own", max_keys=count)
    mirror.set_compared(True)
    tracemalloc.start()
    try:
        for number in range(8):
            packed = source.randbytes(count // 5 * length)
            mirror.apply(update(Change("a", number, packed, b"", False), key_bytes=length))
            again = packed[: len(packed) // 2 // length * length]
            mirror.apply(update(Change("b", number, again, b"", False), key_bytes=length))
        del packed, again
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(mirror) > 0.9 * count
    assert used / len(mirror) < 120


def test_equal_sets_are_one_object_within_limits(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SHARED", 2)
    members = tuple(compared(f"peer {number}", "h:1") for number in range(100))
    changes = (adds(name, 1, KEY, OTHER) for name, *_ in members)
    mirror.apply(update(*changes, members=members))
    assert mirror.full_set(KEY) is mirror.full_set(OTHER)
    assert len(mirror.holders(KEY)) == 100
    assert len(mirror._shared) <= 2
