"""The oldest row is evicted, or first the redundant ones in the older half."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis import given, settings

from xinference_xavier.pool.eviction import MAX_SCAN, SegmentedLRU

SLOTS = 8


class Row(NamedTuple):
    key: bytes


def policy_with(keys: bytes) -> SegmentedLRU[Row]:
    policy: SegmentedLRU[Row] = SegmentedLRU(SLOTS)
    for key in keys:
        policy.add(Row(bytes([key])))
    return policy


def take(policy: SegmentedLRU[Row], redundant: bytes = b"", keep: bytes = b"") -> bytes | None:
    row = policy.take(lambda row: row.key in redundant, [bytes([key]) for key in keep])
    return None if row is None else row.key


def take_several(policy: SegmentedLRU[Row], count: int, redundant: bytes = b"") -> bytes:
    """The keys in order of eviction; "-" where nothing is left."""
    return b"".join(take(policy, redundant) or b"-" for _ in range(count))


def test_the_least_recently_used_row_goes_first() -> None:
    policy = policy_with(b"abcdefgh")
    policy.touch(b"b")
    assert take_several(policy, 8) == b"acdefghb"


def test_redundant_rows_go_before_older_ones() -> None:
    assert take_several(policy_with(b"abcdefgh"), 8, redundant=b"bc") == b"bcadefgh"


def test_the_recent_half_is_not_examined() -> None:
    """Otherwise a copy in constant use would be evicted and fetched again and again."""
    policy = policy_with(b"abcdefgh")
    assert take(policy, redundant=b"gh") == b"a"
    for key in b"ijklmn":
        policy.add(Row(bytes([key])))
        assert take(policy, redundant=b"gh") != bytes([key])
    policy = policy_with(b"abcdefgh")
    for number in range(100):
        policy.touch(b"h")
        policy.add(Row(b"n%d" % number))
        assert take(policy, redundant=b"h") != b"h", "it is always in use"


def test_using_a_row_on_probation_makes_it_recent_again() -> None:
    policy = policy_with(b"abcdefgh")
    assert take(policy) == b"a"
    policy.touch(b"b")
    assert take_several(policy, 7) == b"cdefghb"


def test_rows_of_the_prefix_that_needs_room_stay() -> None:
    policy = policy_with(b"abcd")
    assert take(policy, redundant=b"cd", keep=b"cd") == b"a"
    assert take(policy, redundant=b"cd", keep=b"cd") == b"b"
    assert take(policy, redundant=b"cd", keep=b"cd") is None
    assert take(policy) == b"c"


def test_protected_rows_go_last() -> None:
    policy = policy_with(b"abcd")
    policy.protect(b"a")
    policy.protect(b"x")
    policy.add(Row(b"x"))
    assert take_several(policy, 3, redundant=b"a") == b"bcd"
    assert take(policy, keep=b"a") is None, "it belongs to the prefix that needs room"
    assert take_several(policy, 3) == b"ax-"


def test_an_unprotected_row_is_the_most_recent_one() -> None:
    policy = policy_with(b"abc")
    policy.protect(b"a")
    policy.touch(b"a")
    policy.unprotect(b"a")
    assert take_several(policy, 3) == b"bca"


def test_protection_outlives_eviction_and_a_reset() -> None:
    policy = policy_with(b"ab")
    policy.protect(b"a")
    policy.clear()
    assert take(policy) is None
    for key in b"ab":
        policy.add(Row(bytes([key])))
    assert take_several(policy, 2) == b"ba"


def test_one_eviction_examines_few_rows() -> None:
    examined = []
    policy: SegmentedLRU[Row] = SegmentedLRU(1000)
    for number in range(1000):
        policy.add(Row(b"%d" % number))
    for _ in range(400):
        policy.take(lambda row: examined.append(row), ())  # type: ignore[func-returns-value]  # none is redundant
    assert len(examined) == len(set(examined)), "each row is examined once"
    assert len(examined) <= 1000
    before = len(examined)
    for number in range(1000):
        policy.touch(b"%d" % number)
    policy.take(lambda row: examined.append(row), ())  # type: ignore[func-returns-value]
    assert len(examined) <= before + MAX_SCAN


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "touch", "remove", "take"]), st.integers(0, 11)),
        max_size=60,
    )
)
def test_without_redundant_rows_it_is_the_order_of_use(steps: list[tuple[str, int]]) -> None:
    policy: SegmentedLRU[Row] = SegmentedLRU(SLOTS)
    model: list[bytes] = []
    for verb, number in steps:
        key = bytes([number])
        if verb == "add" and key not in model:
            policy.add(Row(key))
            model.append(key)
        elif verb == "touch":
            policy.touch(key)
            if key in model:
                model.remove(key)
                model.append(key)
        elif verb == "remove" and key in model:
            policy.remove(key)
            model.remove(key)
        elif verb == "take":
            assert take(policy) == (model.pop(0) if model else None)
    assert take_several(policy, len(model) + 1) == b"".join(model) + b"-"
