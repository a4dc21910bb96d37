"""A hit's overhead is compared, sample by sample, with the least time for moving its bytes."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import hit
from tests.harness.engines import Asked, whole_chunks

SAMPLES = [hit.Sample(2.0, 0.050, 0.040, 0.045, 0.005 * n) for n in range(1, 6)]
ALONE = [hit.Rush((2.0,), 1000)] * 5
TOGETHER = [hit.Rush((1.0, 3.0), 1100)] * 5
ROUNDS = [hit.Round(2.0, {name: [sample] for name in hit.REFERENCES}) for sample in SAMPLES]


def test_overhead_is_compared_with_the_floor_and_five_milliseconds() -> None:
    found = hit.of_transport(SAMPLES)
    assert found["overhead_ms"]["median"] == pytest.approx(10)
    assert found["ratio"]["samples"] == pytest.approx([10 / (5 * n + 5) for n in range(1, 6)])
    assert found["remote/local"]["median"] == pytest.approx(1.25)
    assert found["cold/remote"]["median"] == pytest.approx(40)


def test_bytes_count_whole_chunks_without_the_last_token() -> None:
    found = hit.summary(8000, 1 << 20, ROUNDS)
    assert (found["rows"], found["bytes"]) == (62, 62 << 20)
    assert [whole_chunks(tokens) for tokens in (128, 129, 256, 257)] == [0, 1, 1, 2]


def test_missing_samples_count_as_discarded() -> None:
    all_of_them = SAMPLES[:1] * hit.REPEATS
    samples = {"gloo": all_of_them[1:], "shared_memory": all_of_them}
    assert hit.Round(2.0, samples).discarded == 1


def test_tokens_that_are_not_reused_count_as_computed() -> None:
    rush = hit.Rush.from_answers([Asked(1.0, (1.0,), 0), Asked(3.0, (3.0,), 896)], 1000)
    assert rush == hit.Rush((1.0, 3.0), 1104)


def test_the_slowest_of_several_is_compared_with_a_request_that_is_alone() -> None:
    found = hit.of_rushes(1000, ALONE, TOGETHER)
    assert found["computed"]["median"] == pytest.approx(1.1)
    assert (found["first_ms"]["median"], found["slowest_ms"]["median"]) == (1000, 3000)
    assert found["slowest/alone"]["median"] == pytest.approx(1.5)


def test_samples_of_another_transport_are_refused() -> None:
    """A fetch that ends before a transport is chosen counts for none; its sample is left out."""

    def stats(*transports: str) -> dict[str, Any]:
        return {"fetches": {"by_transport": dict.fromkeys(transports)}}

    def check(**used: dict[str, Any]) -> None:
        fleet: Any = SimpleNamespace(stats=used.__getitem__)
        no_pair: Any = None
        hit.Cycle(fleet, no_pair, 1 << 20).check_transports()

    check(shared_memory=stats("in_place", "none"), gloo=stats("gloo"))
    with pytest.raises(RuntimeError, match="shared_memory was to be measured"):
        check(shared_memory=stats("in_place", "shared_memory"), gloo=stats("gloo"))
