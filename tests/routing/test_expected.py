"""A chunk is expected where it was sent last, until its time is over."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from xinference_xavier.routing.router import Expected


def test_chunks_are_expected_for_a_while() -> None:
    expected = Expected()
    expected.add(0b01, [b"a", b"b"], until=2.0)
    expected.add(0b10, [b"b"], until=3.0)
    assert expected.sets == {b"a": 0b01, b"b": 0b11}
    expected.expire(2.0)
    assert expected.sets == {b"b": 0b10}
    expected.expire(3.0)
    assert expected.sets == {}


def test_all_can_be_forgotten() -> None:
    expected = Expected()
    expected.add(1, [b"a"], until=2.0)
    expected.clear()
    expected.expire(5.0)
    assert expected.sets == {}


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 4]), st.lists(st.sampled_from([b"a", b"b"])), st.integers(1, 9)
        )
    ),
    st.integers(0, 10),
)
def test_the_longest_expectation_counts(
    added: list[tuple[int, list[bytes], int]], now: int
) -> None:
    expected = Expected()
    for bit, keys, until in added:
        expected.add(bit, keys, until)
    expected.expire(now)
    sets: dict[bytes, int] = {}
    for bit, keys, until in added:
        for key in keys if until > now else ():
            sets[key] = sets.get(key, 0) | bit
    assert expected.sets == sets
    expected.expire(10)
    assert not expected._until
    assert not expected._ends
