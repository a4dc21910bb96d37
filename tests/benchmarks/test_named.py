"""What is named is what most requests of a root share, and a full pool keeps it."""

from __future__ import annotations

from benchmarks import named
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
    part = named.summary([named.Unnamed(2.0, 0.1, 0.08)] * 5, [named.Named(0.02, 0.04)] * 5)
    part["traces"] = [named._replay("synthetic")]
    text = shown(named, part)
    assert "| nobody holds it | 2000 (2000–2000) | |" in text
    assert "| a peer holds it | 100 (100–100) | 20.0 (20.0–20.0) |" in text
    assert "| it is named | 20 (20–20) | 100.0 (100.0–100.0) |" in text
    assert "A remote hit takes 1.25 (1.25–1.25) times a local one." in text
    (row,) = part["traces"]
    assert row["without"] < row["with"] <= row["endless"]
