"""What is named is what most requests of a root share, and a full pool keeps it."""

from __future__ import annotations

from benchmarks import named
from benchmarks.figures import figure
from benchmarks.traces import Request
from tests.benchmarks.parts import shown


def request(keys: bytes) -> Request:
    return Request(0.0, 512 * len(keys), [bytes([key]) for key in keys])


def test_the_prefix_that_half_of_the_requests_share_is_named() -> None:
    requests = [request(keys) for keys in (b"abcd", b"abce", b"abx", b"a")]
    assert b"".join(named._shared(requests)) == b"abc"


def test_a_named_prefix_is_a_hit_although_the_pool_is_full() -> None:
    trace = [request(b"ab"), request(b"123"), request(b"456"), request(b"ab")]
    names = [b"a", b"b"]
    assert named._hit_ratio(trace, slots=5) == 0.0
    assert named._hit_ratio(trace, slots=5, named=names) == 2 / 10
    assert named._hit_ratio(trace, slots=8) == 2 / 10


def test_the_page_shows_times_and_hits() -> None:
    part = {
        "cold_ms": figure([2000.0] * 5),
        "named_ms": figure([20.0] * 5),
        "again_ms": figure([40.0] * 5),
        "cold/named": figure([100.0] * 5),
        "cold/again": figure([50.0] * 5),
        "traces": [named._replay("synthetic")],
    }
    text = shown(named, part)
    assert "| is named | 20 (20–20) | 100.0 (100.0–100.0) |" in text
    (row,) = part["traces"]
    assert row["without"] < row["with"] <= row["endless"]
