"""Which row is evicted: the oldest, or of the older half, a redundant one."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis import given, settings

from xinference_xavier.pool.eviction import MAX_SCAN, SegmentedLRU

SLOTS = 8


class Row(NamedTuple):
    key: bytes


def order_of(keys: bytes, slots: int = SLOTS) -> SegmentedLRU[Row]:
    order: SegmentedLRU[Row] = SegmentedLRU(slots)
    for key in keys:
        order.add(Row(bytes([key])))
    return order


def take(order: SegmentedLRU[Row], redundant: bytes = b"", keep: bytes = b"") -> bytes | None:
    row = order.take(lambda row: row.key in redundant, [bytes([key]) for key in keep])
    return None if row is None else row.key


def taken(order: SegmentedLRU[Row], redundant: bytes = b"", count: int = SLOTS) -> bytes:
    return b"".join(take(order, redundant) or b"-" for _ in range(count))


def test_the_least_recently_used_goes_first() -> None:
    order = order_of(b"abcdefgh")
    order.touch(b"b")
    assert taken(order) == b"acdefghb"


def test_redundant_rows_go_before_older_ones() -> None:
    assert taken(order_of(b"abcdefgh"), redundant=b"bc") == b"bcadefgh"


def test_the_recent_half_is_not_examined() -> None:
    """Or what is used again and again would be evicted and copied again and again."""
    order = order_of(b"abcdefgh")
    assert take(order, redundant=b"gh") == b"a"
    for key in b"ijklmn":
        order.add(Row(bytes([key])))
        assert take(order, redundant=b"gh") != bytes([key])
    order = order_of(b"abcdefgh")
    for number in range(100):
        order.touch(b"h")
        order.add(Row(b"n%d" % number))
        assert take(order, redundant=b"h") != b"h", "in use all the time"


def test_what_is_used_after_it_was_passed_is_recent_again() -> None:
    order = order_of(b"abcdefgh")
    assert take(order) == b"a"
    order.touch(b"b")
    assert b"b" in order
    assert taken(order, count=7) == b"cdefghb"


def test_nothing_of_the_prefix_that_needs_room_goes() -> None:
    order = order_of(b"abcd")
    assert take(order, redundant=b"cd", keep=b"cd") == b"a"
    assert take(order, redundant=b"cd", keep=b"cd") == b"b"
    assert take(order, redundant=b"cd", keep=b"cd") is None
    assert take(order) == b"c"


def test_protected_rows_go_last_and_only_if_they_must() -> None:
    order = order_of(b"abcd")
    order.protect(b"a")
    order.protect(b"x")
    order.add(Row(b"x"))
    assert taken(order, redundant=b"a", count=3) == b"bcd"
    assert take(order, keep=b"a") is None, "not even for the prefix's own sake"
    assert taken(order, count=3) == b"ax-"


def test_an_unprotected_row_is_the_most_recent_one() -> None:
    order = order_of(b"abc")
    order.protect(b"a")
    order.touch(b"a")
    order.unprotect(b"a")
    assert taken(order, count=3) == b"bca"


def test_protection_outlives_eviction_and_a_reset() -> None:
    order = order_of(b"ab")
    order.protect(b"a")
    order.clear()
    assert b"a" not in order
    for key in b"ab":
        order.add(Row(bytes([key])))
    assert taken(order, count=2) == b"ba"


def test_one_eviction_examines_few_rows() -> None:
    examined = []
    order: SegmentedLRU[Row] = SegmentedLRU(1000)
    for number in range(1000):
        order.add(Row(b"%d" % number))
    for _ in range(400):
        order.take(lambda row: examined.append(row), ())  # type: ignore[func-returns-value]  # none is redundant
    assert len(examined) == len(set(examined)), "each is examined once"
    assert len(examined) <= 1000
    before = len(examined)
    for number in range(1000):
        order.touch(b"%d" % number)
    order.take(lambda row: examined.append(row), ())  # type: ignore[func-returns-value]
    assert len(examined) <= before + MAX_SCAN


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "touch", "remove", "take"]), st.integers(0, 11)),
        max_size=60,
    )
)
def test_without_redundant_rows_it_is_the_order_of_use(steps: list[tuple[str, int]]) -> None:
    order: SegmentedLRU[Row] = SegmentedLRU(SLOTS)
    model: list[bytes] = []
    for verb, number in steps:
        key = bytes([number])
        if verb == "add" and key not in model:
            order.add(Row(key))
            model.append(key)
        elif verb == "touch":
            order.touch(key)
            if key in model:
                model.remove(key)
                model.append(key)
        elif verb == "remove" and key in model:
            order.remove(key)
            model.remove(key)
        elif verb == "take":
            assert take(order) == (model.pop(0) if model else None)
        assert all((bytes([key]) in order) == (bytes([key]) in model) for key in range(12))
