"""A request's id says which replica prefills it."""

from __future__ import annotations

import pytest

from xinference_xavier.protocol.load import Elsewhere, mark_of, with_mark

ELSEWHERE = Elsewhere("4c742c4f-37a2-43ce-99f9-01d1bf27af26_dp1", 0.25, 1.5)
KEY = "3a" * 16
MARKED = with_mark("0b9f", ELSEWHERE, KEY)


@pytest.mark.parametrize("name", [MARKED, f"{MARKED}-12ab34cd", f"3_{MARKED}-12ab34cd"])
def test_the_mark_survives_what_vllm_adds(name: str) -> None:
    assert mark_of(name, KEY) == ELSEWHERE


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0b9f",
        "0b9f:prefill",
        "x:prefill::1:2",
        "x:prefill:a:-1:2",
        f"x:prefill:{'a' * 300}:1:2",
    ],
)
def test_other_ids_have_none(name: str) -> None:
    assert mark_of(name, KEY) is None


def test_a_client_cannot_make_one() -> None:
    """It does not know the replica's key, and another replica's does not help."""
    assert mark_of(with_mark("0b9f", ELSEWHERE, "another key"), KEY) is None
    longer = MARKED.replace(":1500:", ":9500:")
    assert longer != MARKED
    assert mark_of(longer, KEY) is None


def test_no_wait_is_longer_than_ten_minutes() -> None:
    forever = with_mark("0b9f", Elsewhere("a", 1e9, float("inf")), KEY)
    assert mark_of(forever, KEY) == Elsewhere("a", 600.0, 600.0)
