"""What comes from peers is what it should be, or a ValueError says which value is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from xinference_xavier.errors import shown
from xinference_xavier.runtime.validate import (
    check_address,
    check_count,
    check_counts,
    check_identifier,
    check_keys,
    check_seconds,
    parse_object,
)


@pytest.mark.parametrize(
    ("check", "good"),
    [
        (check_identifier, ["a", "x" * 256]),
        (check_address, ["host:1", "10.0.0.1:65535", "[::1]:80"]),
        (lambda name, value: check_count(name, value, 1, 3), [1, 3]),
        (lambda name, value: check_counts(name, value, 2, 7), [(), (0, 7)]),
        (lambda name, value: check_keys(name, value, 2), [(), (b"k", b"x" * 1024)]),
        (lambda name, value: check_seconds(name, value, 60), [0.001, 59]),
        (lambda name, value: parse_object(name, value, 20), [b"{}", b'{"a": [1]}\n']),
    ],
)
def test_what_is_right_passes(check: Callable[[str, Any], None], good: list[Any]) -> None:
    for value in good:
        check("it", value)


@pytest.mark.parametrize(
    ("check", "bad"),
    [
        (check_identifier, ["", "x" * 257, b"a", None, 7]),
        (check_address, ["host", ":1", "host:", "host:x", "a:b:1", "http://h:1", "h:65536", None]),
        (lambda name, value: check_count(name, value, 1, 3), [0, 4, True, 2.0, "2", 10**5000]),
        (
            lambda name, value: check_counts(name, value, 2, 7),
            [[], (1, 2, 3), (8,), (-1,), (True,), ("1",), None],
        ),
        (
            lambda name, value: check_keys(name, value, 2),
            [[b"k"], (b"k",) * 3, (b"",), (b"x" * 1025,), ("k",), (bytearray(1),), None],
        ),
        (
            lambda name, value: check_seconds(name, value, 60),
            [0, -1, 60, float("nan"), float("inf"), "1", None],
        ),
        (
            lambda name, value: parse_object(name, value, 20),
            [b"", b"[]", b"1", b"{", b"\xff{}", b"{}" + b" " * 20, "{}", None],
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    check: Callable[[str, Any], None], bad: list[Any]
) -> None:
    for value in bad:
        with pytest.raises(ValueError, match="it"):
            check("it", value)


def test_nesting_that_no_parser_survives_is_refused() -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        parse_object("it", b"[" * 60_000, 1 << 16)


def test_anything_can_be_shown_in_few_words() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10**6, 10**10_000, deep, {"a": deep}):
        assert len(shown(value)) < 200
