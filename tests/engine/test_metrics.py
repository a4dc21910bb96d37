"""The manager's totals reach vLLM's metrics as increments."""

from __future__ import annotations

from dataclasses import fields

import pytest
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

from xinference_xavier.engine.metrics import HitReporter, Hits, definitions
from xinference_xavier.engine.spec import XavierSpec


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
    for field in fields(Hits):
        setattr(hits, field.name, 1)
    defined = XavierSpec.build_metric_definitions({})
    assert counters(reporter).keys() == defined.keys() == definitions().keys()
    for metadata in defined.values():
        assert isinstance(metadata, OffloadingCounterMetadata)
        assert metadata.documentation
