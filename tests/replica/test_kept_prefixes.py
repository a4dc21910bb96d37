"""A replica keeps the chunks that its engine made of a prefix, as firmly as it is told."""

from collections import deque

import pytest

from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.prefixes import Keeping, KeptPrefix
from xinference_xavier.replica import kept_prefixes as module
from xinference_xavier.replica.kept_prefixes import ComputedPrefix, KeptPrefixes, MarkedPrompt

A, B, C = ("a" * 16, "b" * 16, "c" * 16)
SLOTS = 8


class Replica:
    """Half of its pool may be kept firmly."""

    def __init__(self) -> None:
        self.pool = Pool(SLOTS)
        self.computed: deque[ComputedPrefix] = deque()
        self.marked: deque[MarkedPrompt] = deque()
        self.now = 0.0
        self.near: set[bytes] = set()
        self.kept = KeptPrefixes(
            self.pool,
            0.5,
            self.computed,
            self.marked,
            self.near.__contains__,
            clock=lambda: self.now,
        )

    def mark(self, keys: bytes, seconds: float = 300.0, share: float = 1.0) -> None:
        self.marked.append(MarkedPrompt(Keeping(seconds, share), split(keys)))
        self.store(keys)
        self.kept.collect()

    def survivors(self) -> bytes:
        """What is left when others have filled the rest of the pool."""
        others = bytes(range(200, 200 + SLOTS - len(self.kept._uses)))
        self.store(others)
        return self.holds().translate(None, others)

    def compute(self, prefix: str, keys: bytes) -> None:
        self.computed.append(ComputedPrefix(prefix, 100, split(keys)))
        self.store(keys)

    def store(self, keys: bytes) -> None:
        for row in self.pool.reserve(split(keys)).rows:
            self.pool.commit(row)

    def holds(self) -> bytes:
        return b"".join(key for key in split(bytes(range(256))) if self.pool.lookup(key))


def split(keys: bytes) -> tuple[bytes, ...]:
    return tuple(bytes([key]) for key in keys)


@pytest.fixture
def replica() -> Replica:
    return Replica()


def test_a_prefix_is_kept_while_there_is_room_for_it(replica: Replica) -> None:
    replica.compute(A, b"abc")
    kept = replica.kept.keep({A: False})
    assert kept == ({A: KeptPrefix(100, 3, 3, False)}, 4, 0)
    for others in (b"01234", b"56789"):
        replica.store(others)
        assert replica.holds() == others + b"abc"
    replica.store(b"ABCDEFG")
    assert replica.kept.keep({}).prefixes[A].held == 1, "what is computed needs the rest"


def test_what_a_neighbour_keeps_is_kept(replica: Replica) -> None:
    """It holds the same prefix, which is loaded from there: nobody computes it once more."""
    replica.compute(A, b"abc")
    replica.pool.reset()
    replica.near |= {b"a", b"b"}
    assert replica.kept.keep({A: True}).prefixes[A].held == 2


def test_a_firm_prefix_is_never_evicted(replica: Replica) -> None:
    replica.compute(A, b"abc")
    assert replica.kept.keep({A: True}).firm_chunks == 3
    assert len(replica.pool.reserve(split(b"01234567")).rows) == 5
    assert replica.holds() == b"abc"


def test_what_is_let_go_is_not_kept(replica: Replica) -> None:
    replica.compute(A, b"abc")
    assert replica.kept.keep({B: True}).prefixes == {B: KeptPrefix()}, "it is not computed"
    assert replica.kept.keep({A: True}).prefixes == {A: KeptPrefix()}, "nor is what came too early"
    replica.compute(A, b"abc")
    assert replica.kept.keep({}).firm_chunks == 3
    assert replica.kept.keep({A: None, B: None}).firm_chunks == 0
    assert replica.kept.keep(None).prefixes == {}
    assert len(replica.pool.reserve(split(b"01234567")).rows) == SLOTS


def test_a_marked_prompt_is_kept_until_it_expires(replica: Replica) -> None:
    replica.mark(b"abc", seconds=300.0)
    assert replica.survivors() == b"abc"
    replica.now += 300.0
    replica.kept.collect()
    assert len(replica.pool.reserve(split(b"01234567")).rows) == SLOTS
    assert replica.holds() == b""


def test_each_turn_of_a_conversation_takes_the_place_of_the_last_one(replica: Replica) -> None:
    for turn in (b"ab", b"abc", b"abcd"):
        replica.mark(turn)
    assert [mark.keys for mark in replica.kept._marks] == [split(b"abcd")]
    assert replica.survivors() == b"abcd"


def test_a_mark_that_lives_longer_stays(replica: Replica) -> None:
    replica.mark(b"ab", seconds=3600.0)
    replica.mark(b"abc", seconds=300.0)
    replica.now += 301.0
    replica.kept.collect()
    assert replica.survivors() == b"ab"


def test_only_the_marked_part_of_each_group_is_kept(replica: Replica) -> None:
    first, second = (b"%d\0\0\0\1" % number for number in range(2))
    others = [b"%d\0\0\0\2" % number for number in range(4)]
    replica.marked.append(MarkedPrompt(Keeping(300.0, 0.5), [first, second, *others]))
    replica.kept.collect()
    assert [mark.keys for mark in replica.kept._marks] == [[first, *others[:2]]]


def test_marks_are_bounded_by_their_number_and_by_the_pool(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MARKS", 2)
    for keys in (b"ab", b"cd", b"ef"):
        replica.mark(keys)
    assert [mark.keys for mark in replica.kept._marks] == [split(b"cd"), split(b"ef")]
    replica.mark(b"ghijk")
    assert [mark.keys for mark in replica.kept._marks] == [split(b"ef"), split(b"ghijk")]
    replica.mark(b"0123456789")
    assert len(replica.kept._marks) == 2, "more than the pool holds"


def test_chunks_of_a_name_stay_when_a_mark_of_them_expires(replica: Replica) -> None:
    replica.compute(A, b"abc")
    replica.kept.keep({A: False})
    replica.mark(b"abcd", seconds=1.0)
    replica.now += 2.0
    replica.kept.collect()
    assert replica.survivors() == b"abc"


def test_chunks_stay_as_long_as_any_prefix_needs_them(replica: Replica) -> None:
    replica.compute(A, b"ab")
    replica.compute(B, b"abc")
    assert replica.kept.keep({A: True, B: True}).firm_chunks == 3
    assert replica.kept.keep({A: False}).firm_chunks == 3
    assert replica.kept.keep({A: True, B: None}).firm_chunks == 2
    assert len(replica.pool.reserve(split(b"01234567")).rows) == 6
    assert replica.holds() == b"ab"


def test_the_firm_part_is_bounded(replica: Replica) -> None:
    replica.compute(A, b"abc")
    replica.compute(B, b"de")
    kept = replica.kept.keep({A: True, B: True})
    assert (kept.firm_chunks, kept.prefixes[A].firm, kept.prefixes[B].firm) == (3, True, False)
    kept = replica.kept.keep({A: None})
    assert (kept.firm_chunks, kept.prefixes[B].firm) == (2, True), "now there is room"


def test_another_chat_template_makes_other_chunks(replica: Replica) -> None:
    replica.compute(A, b"abc")
    replica.kept.keep({A: True})
    replica.compute(A, b"xyz")
    assert replica.kept.keep({}).firm_chunks == 3
    assert len(replica.pool.reserve(split(b"01234567")).rows) == 5
    assert replica.holds() == b"xyz"


def test_chunks_that_are_not_stored_yet_are_kept_when_they_come(replica: Replica) -> None:
    replica.computed.append(ComputedPrefix(A, 100, split(b"abc")))
    assert replica.kept.keep({A: True}).prefixes[A].held == 0
    replica.store(b"abc")
    replica.pool.reserve(split(b"01234567"))
    assert replica.kept.keep({}).prefixes[A].held == 3
