"""The manager's totals reach vLLM's metrics as increments."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

from xinference_xavier.engine.metrics import HitReporter, definitions
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.stats.schema import HIT_SOURCES, Hits


@pytest.fixture
def hits() -> Hits:
    return Hits()


@pytest.fixture
def reporter(hits: Hits) -> HitReporter:
    return HitReporter(hits)


def counters(reporter: HitReporter) -> dict[str, int | float]:
    stats = reporter.delta()
    return {} if stats is None else stats.reduce()


def test_without_new_tokens_there_are_no_stats(reporter: HitReporter) -> None:
    assert reporter.delta() is None


def test_each_token_is_reported_once(hits: Hits, reporter: HitReporter) -> None:
    hits.remote, hits.computed = 256, 10
    first = counters(reporter)
    hits.remote += 128
    second = counters(reporter)
    assert first == {"vllm:xavier_remote_tokens": 256, "vllm:xavier_computed_tokens": 10}
    assert second == {"vllm:xavier_remote_tokens": 128}
    assert reporter.delta() is None


def test_every_source_has_a_counter_that_vllm_knows(hits: Hits, reporter: HitReporter) -> None:
    for source in HIT_SOURCES:
        setattr(hits, source, 1)
    defined = XavierSpec.build_metric_definitions({})
    assert counters(reporter).keys() == defined.keys() == definitions().keys()
    for metadata in defined.values():
        assert isinstance(metadata, OffloadingCounterMetadata)
        assert metadata.documentation
