"""Dataclasses are read from anything that a peer sends, and added up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from xinference_xavier.stats.report import MAX_NUMBER, add, read


@dataclass
class Inner:
    count: int = 0
    by_name: dict[str, int] = field(default_factory=dict)


@dataclass
class Outer:
    name: str
    total: float = 0.0
    speed: float | None = None
    enabled: bool = True
    inner: Inner = field(default_factory=Inner)
    parts: dict[str, Inner] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


def test_values_are_read_at_every_depth() -> None:
    sent = {
        "name": "a",
        "total": 1.5,
        "speed": 2,
        "enabled": False,
        "inner": {"count": 3, "by_name": {"x": 4}},
        "parts": {"y": {"count": 5}},
        "numbers": [6, 7],
    }
    inner, part = Inner(3, {"x": 4}), Inner(5)
    assert read(Outer, sent) == Outer("a", 1.5, 2, False, inner, {"y": part}, [6, 7], sent)


def test_missing_fields_have_their_defaults_and_unknown_ones_are_ignored() -> None:
    assert read(Outer, {"name": "a", "moon": 1}).inner == Inner()
    assert read(Outer, {"name": "a"}).enabled


def test_a_missing_required_field_is_an_error() -> None:
    with pytest.raises(KeyError, match="name"):
        read(Outer, {})


@pytest.mark.parametrize("number", ["1", None, True, -1, math.nan, math.inf, MAX_NUMBER, [1], {}])
def test_anything_but_a_number_counts_as_zero(number: Any) -> None:
    sent = {"count": number, "by_name": {"x": number}}
    outer = read(Outer, {"name": "a", "inner": sent, "total": number, "numbers": [number, 1]})
    assert (outer.inner, outer.total, outer.numbers) == (Inner(0, {"x": 0}), 0, [0, 1])


@pytest.mark.parametrize("nonsense", [1, "a", None, [1], [[]]])
def test_anything_but_an_object_counts_as_an_empty_one(nonsense: Any) -> None:
    sent = {"name": "a", "inner": nonsense, "parts": nonsense, "enabled": nonsense}
    outer = read(Outer, sent)
    assert (outer.inner, outer.parts, outer.enabled) == (Inner(), {}, False)
    assert read(Inner, nonsense) == Inner()


def test_sums() -> None:
    total = Inner()
    for count in (1, 2):
        add(total, Inner(count, {"x": count, str(count): 1}))
    assert total == Inner(3, {"x": 3, "1": 1, "2": 1})
