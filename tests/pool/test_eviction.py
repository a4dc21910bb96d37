"""The oldest row is evicted, or first the redundant ones in the older half."""

from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from xinference_xavier.pool.eviction import MAX_SCAN, Protection, SegmentedLRU

SLOTS = 8


class Row(NamedTuple):
    key: bytes


def policy_with(keys: bytes) -> SegmentedLRU[Row]:
    policy: SegmentedLRU[Row] = SegmentedLRU(SLOTS)
    for key in keys:
        policy.add(Row(bytes([key])))
    return policy


def take(
    policy: SegmentedLRU[Row], count: int = 1, redundant: bytes = b"", keep: bytes = b""
) -> bytes:
    """The keys in order of eviction."""
    victims = policy.take(count, lambda row: row.key in redundant, [bytes([key]) for key in keep])
    return b"".join(row.key for row in victims)


def test_redundant_rows_go_before_older_ones() -> None:
    assert take(policy_with(b"abcdefgh"), 8, redundant=b"bc") == b"bcadefgh"


def test_the_recent_half_is_not_examined() -> None:
    """Otherwise a copy in constant use would be evicted and fetched again and again."""
    policy = policy_with(b"abcdefgh")
    assert take(policy, redundant=b"gh") == b"a"
    for key in b"ijklmn":
        policy.add(Row(bytes([key])))
        assert take(policy, redundant=b"gh") != bytes([key])
    policy = policy_with(b"abcdefgh")
    for number in range(100):
        policy.touch([b"h"])
        policy.add(Row(b"n%d" % number))
        assert take(policy, redundant=b"h") != b"h", "it is always in use"


def test_using_an_older_row_makes_it_recent_again() -> None:
    policy = policy_with(b"abcdefgh")
    assert take(policy) == b"a"
    policy.touch([b"b"])
    assert take(policy, 7) == b"cdefghb"


def test_rows_of_the_prefix_that_needs_room_stay() -> None:
    policy = policy_with(b"abcd")
    assert take(policy, redundant=b"cd", keep=b"cd") == b"a"
    assert take(policy, redundant=b"cd", keep=b"cd") == b"b"
    assert take(policy, redundant=b"cd", keep=b"cd") == b""
    assert take(policy) == b"c"


def test_protected_rows_go_last() -> None:
    policy = policy_with(b"abcd")
    policy.protect(b"a", Protection.SOFT)
    policy.protect(b"x", Protection.SOFT)
    policy.add(Row(b"x"))
    assert take(policy, 3, redundant=b"a") == b"bcd"
    assert take(policy, keep=b"a") == b"", "it belongs to the prefix that needs room"
    assert policy.take(1, lambda row: False, protected=False) == []
    assert take(policy, 3) == b"ax"


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_an_eviction_examines_few_rows_and_each_of_them_once(count: int) -> None:
    examined: list[bytes] = []

    def is_redundant(row: Row) -> bool:
        examined.append(row.key)
        return False

    policy: SegmentedLRU[Row] = SegmentedLRU(1000)
    keys = [b"%d" % number for number in range(1000)]
    for key in keys:
        policy.add(Row(key))
    for number in range(1, 400 // count):
        policy.take(count, is_redundant)
        assert len(examined) == len(set(examined)) <= number * count * MAX_SCAN
    before = len(examined)
    policy.touch(keys)
    policy.take(count, is_redundant)
    assert len(examined) <= before + count * MAX_SCAN


@settings(max_examples=200, derandomize=True)
@given(st.binary(max_size=4), st.binary(max_size=6), st.integers(0, 8))
def test_victims_taken_together_are_those_taken_one_by_one(
    redundant: bytes, used: bytes, count: int
) -> None:
    """Only their order differs: redundant ones come first."""
    rows = bytes(range(SLOTS))
    redundant, used = (bytes(key % SLOTS for key in keys) for keys in (redundant, used))
    together, one_by_one = policy_with(rows), policy_with(rows)
    for policy in (together, one_by_one):
        for key in (100, 101, 102):  # so that the older half fills up
            assert take(policy)
            policy.add(Row(bytes([key])))
        policy.touch(bytes([key]) for key in used)
    singles = b"".join(take(one_by_one, redundant=redundant) for _ in range(count))
    assert sorted(take(together, count, redundant)) == sorted(singles)
    assert take(together, SLOTS) == take(one_by_one, SLOTS)


ADDS = ["add", "add on probation"]
VERBS = [*3 * ADDS, *3 * ["touch"], "remove", "take", "clear", *Protection]


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 7)), min_size=30, max_size=60))
def test_rows_go_in_the_order_of_use_those_on_probation_first_and_protected_ones_last_if_at_all(
    steps: list[tuple[str | Protection, int]],
) -> None:
    """Without redundant rows. A key may be protected before its row is here, and stays protected
    when that has gone. Whatever changes a row's protection uses it, and ends its probation."""
    policy: SegmentedLRU[Row] = SegmentedLRU(SLOTS)
    protection: dict[bytes, Protection] = {}
    probation: set[bytes] = set()
    model: list[bytes] = []
    for verb, number in steps:
        key = bytes([number])
        if isinstance(verb, Protection):
            policy.protect(key, verb)
            before, protection[key] = protection.get(key, Protection.NONE), verb
            if key in model and (before, verb) != (Protection.NONE, Protection.NONE):
                model.remove(key)
                model.append(key)
                probation.discard(key)
        elif verb in ADDS and key not in model:
            policy.add(Row(key), probation=verb != "add")
            model.append(key)
            probation.discard(key)
            if verb != "add" and protection.get(key, Protection.NONE) is Protection.NONE:
                probation.add(key)
        elif verb == "touch":
            policy.touch([key])
            if key in model:
                model.remove(key)
                model.append(key)
        elif verb == "remove" and key in model:
            policy.remove(key)
            model.remove(key)
        elif verb == "clear":
            policy.clear()
            model.clear()
        elif verb == "take":
            victims = in_order(model, protection, probation)[:number]
            assert take(policy, number) == b"".join(victims)
            model = [key for key in model if key not in victims]
    assert take(policy, 12) == b"".join(in_order(model, protection, probation))


def in_order(
    model: list[bytes], protection: dict[bytes, Protection], probation: set[bytes]
) -> list[bytes]:
    """In which the rows are evicted."""
    evictable = [key for key in model if protection.get(key) is not Protection.FIRM]
    return sorted(
        evictable,
        key=lambda key: (protection.get(key) is Protection.SOFT, key not in probation),
    )
