"""Values from peers are checked; a ValueError names the wrong one."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from xinference_xavier.errors import shown
from xinference_xavier.runtime.validate import (
    Count,
    Identifier,
    check_count,
    check_json_size,
    first_reason,
)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (
            lambda name, value: check_count(name, value, 1, 3),
            [1, 3],
            [0, 4, True, 2.0, "2", 10**5000],
        ),
        (
            lambda name, value: check_json_size(name, value, 5),
            ["abc", {}, None],
            ["abcd", {1}, float("nan"), object(), b""],
        ),
    ],
    ids=["count", "JSON"],
)
def test_right_values_pass_and_wrong_ones_are_refused_by_name(
    check: Callable[[str, Any], None], good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        check("it", value)
    for value in bad:
        with pytest.raises(ValueError, match="it"):
            check("it", value)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Identifier, ["a", "x" * 256], ["", "x" * 257, b"a", None, 7, "\ud800"]),
        (Count, [0, 7], [-1, True, "1", 1 << 63, 10**5000, None]),
    ],
)
def test_declared_types_are_enforced(kind: Any, good: list[Any], bad: list[Any]) -> None:
    adapter = TypeAdapter(kind)
    for value in good:
        assert adapter.validate_python(value, strict=True) == value
    for value in bad:
        with pytest.raises(ValueError, match="1 validation error"):
            adapter.validate_python(value, strict=True)


def test_the_first_of_several_faults_is_one_line() -> None:
    adapter = TypeAdapter(dict[str, tuple[int, Identifier]])
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python({"a": ("1" * 1000, 2), "b": 3}, strict=True)
    reason = first_reason(caught.value)
    assert reason.startswith("a.0='111")
    assert reason.endswith("': Input should be a valid integer")
    assert first_reason(ValueError("plain")) == "plain"


def test_any_value_can_be_shown_briefly() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10**6, 10**10_000, deep, {"a": deep}):
        assert len(shown(value)) < 200
