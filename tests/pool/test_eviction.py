"""Which row is evicted: the oldest, or of the older half, one that can be spared."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis import given, settings

from xinference_xavier.pool.eviction import LOOKS, EvictionOrder

SLOTS = 8


class Row(NamedTuple):
    key: bytes


def order_of(keys: bytes, slots: int = SLOTS) -> EvictionOrder[Row]:
    order: EvictionOrder[Row] = EvictionOrder(slots)
    for key in keys:
        order.add(Row(bytes([key])))
    return order


def take(order: EvictionOrder[Row], spare: bytes = b"", keep: bytes = b"") -> bytes | None:
    row = order.take(lambda row: row.key in spare, [bytes([key]) for key in keep])
    return None if row is None else row.key


def taken(order: EvictionOrder[Row], spare: bytes = b"", count: int = SLOTS) -> bytes:
    return b"".join(take(order, spare) or b"-" for _ in range(count))


def test_the_least_recently_used_goes_first() -> None:
    order = order_of(b"abcdefgh")
    order.touch(b"b")
    assert taken(order) == b"acdefghb"


def test_what_can_be_spared_goes_before_older_ones() -> None:
    assert taken(order_of(b"abcdefgh"), spare=b"bc") == b"bcadefgh"


def test_the_fresher_half_is_not_judged() -> None:
    """Or what is used again and again would be evicted and copied again and again."""
    order = order_of(b"abcdefgh")
    assert take(order, spare=b"gh") == b"a"
    for key in b"ijklmn":
        order.add(Row(bytes([key])))
        assert take(order, spare=b"gh") != bytes([key])
    order = order_of(b"abcdefgh")
    for number in range(100):
        order.touch(b"h")
        order.add(Row(b"n%d" % number))
        assert take(order, spare=b"h") != b"h", "in use all the time"


def test_what_is_used_after_it_was_passed_is_fresh_again() -> None:
    order = order_of(b"abcdefgh")
    assert take(order) == b"a"
    order.touch(b"b")
    assert b"b" in order
    assert taken(order, count=7) == b"cdefghb"


def test_nothing_of_the_prefix_that_needs_room_goes() -> None:
    order = order_of(b"abcd")
    assert take(order, spare=b"cd", keep=b"cd") == b"a"
    assert take(order, spare=b"cd", keep=b"cd") == b"b"
    assert take(order, spare=b"cd", keep=b"cd") is None
    assert take(order) == b"c"


def test_one_eviction_judges_few_rows() -> None:
    judged = []
    order: EvictionOrder[Row] = EvictionOrder(1000)
    for number in range(1000):
        order.add(Row(b"%d" % number))
    for _ in range(400):
        order.take(lambda row: judged.append(row), ())  # type: ignore[func-returns-value]  # none is spare
    assert len(judged) == len(set(judged)), "each is judged once"
    assert len(judged) <= 1000
    before = len(judged)
    for number in range(1000):
        order.touch(b"%d" % number)
    order.take(lambda row: judged.append(row), ())  # type: ignore[func-returns-value]
    assert len(judged) <= before + LOOKS


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "touch", "remove", "take"]), st.integers(0, 11)),
        max_size=60,
    )
)
def test_where_nothing_can_be_spared_it_is_the_order_of_use(steps: list[tuple[str, int]]) -> None:
    order: EvictionOrder[Row] = EvictionOrder(SLOTS)
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
