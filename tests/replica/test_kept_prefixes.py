"""A replica keeps the chunks that its engine made of a prefix, as firmly as it is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.prefixes import KeptPrefix
from xinference_xavier.replica.kept_prefixes import ComputedPrefix, KeptPrefixes

A, B, C = ("a" * 16, "b" * 16, "c" * 16)
SLOTS = 8


class Replica:
    """Half of its pool may be kept firmly."""

    def __init__(self) -> None:
        self.pool = Pool(SLOTS)
        self.computed: list[ComputedPrefix] = []
        self.kept = KeptPrefixes(self.pool, 0.5, self.take)

    def take(self) -> Sequence[ComputedPrefix]:
        taken, self.computed = self.computed, []
        return taken

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
    assert kept == ({A: KeptPrefix(100, 3, 3, False)}, SLOTS, 4, 0)
    for others in (b"01234", b"56789"):
        replica.store(others)
        assert replica.holds() == others + b"abc"
    replica.store(b"ABCDEFG")
    assert replica.kept.keep(None).prefixes[A].held == 1, "what is computed needs the rest"


def test_a_firm_prefix_is_never_evicted(replica: Replica) -> None:
    replica.compute(A, b"abc")
    assert replica.kept.keep({A: True}).firm_chunks == 3
    assert len(replica.pool.reserve(split(b"01234567")).rows) == 5
    assert replica.holds() == b"abc"


def test_what_nobody_wants_is_not_kept(replica: Replica) -> None:
    replica.compute(A, b"abc")
    assert replica.kept.keep({B: True}).prefixes == {}
    assert replica.kept.keep({A: True}).prefixes == {}, "it has to be computed again"
    replica.compute(A, b"abc")
    replica.kept.keep({A: True})
    assert replica.kept.keep({}).prefixes == {}
    assert len(replica.pool.reserve(split(b"01234567")).rows) == SLOTS


def test_chunks_stay_as_long_as_any_prefix_needs_them(replica: Replica) -> None:
    replica.compute(A, b"ab")
    replica.compute(B, b"abc")
    assert replica.kept.keep({A: True, B: True}).firm_chunks == 3
    assert replica.kept.keep({A: False, B: True}).firm_chunks == 3
    assert replica.kept.keep({A: True}).firm_chunks == 2
    assert len(replica.pool.reserve(split(b"01234567")).rows) == 6
    assert replica.holds() == b"ab"


def test_the_firm_part_is_bounded(replica: Replica) -> None:
    replica.compute(A, b"abc")
    replica.compute(B, b"de")
    kept = replica.kept.keep({A: True, B: True})
    assert (kept.firm_chunks, kept.prefixes[A].firm, kept.prefixes[B].firm) == (3, True, False)
    kept = replica.kept.keep({B: True})
    assert (kept.firm_chunks, kept.prefixes[B].firm) == (2, True), "now there is room"


def test_another_chat_template_makes_other_chunks(replica: Replica) -> None:
    replica.compute(A, b"abc")
    replica.kept.keep({A: True})
    replica.compute(A, b"xyz")
    assert replica.kept.keep({A: True}).firm_chunks == 3
    assert len(replica.pool.reserve(split(b"01234567")).rows) == 5
    assert replica.holds() == b"xyz"


def test_chunks_that_are_not_stored_yet_are_kept_when_they_come(replica: Replica) -> None:
    replica.computed.append(ComputedPrefix(A, 100, split(b"abc")))
    assert replica.kept.keep({A: True}).prefixes[A].held == 0
    replica.store(b"abc")
    replica.pool.reserve(split(b"01234567"))
    assert replica.kept.keep(None).prefixes[A].held == 3


def test_malformed_wishes_change_nothing(replica: Replica) -> None:
    replica.compute(A, b"abc")
    replica.kept.keep({A: True})
    for wrong in ({"name": True}, {A: 1}, [A], {A: None}):
        with pytest.raises(ValueError, match="malformed prefixes"):
            replica.kept.keep(wrong)  # type: ignore[arg-type]
    assert replica.kept.keep(None).firm_chunks == 3
