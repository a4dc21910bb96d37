"""A fetch is a span of the trace that its request belongs to, where there is tracing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from xinference_xavier.replica import tracing
from xinference_xavier.replica.tracing import FetchSpan

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What an operator's tracing would get."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def only(exported: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exported.get_finished_spans()
    return span


def test_it_tells_what_became_of_the_fetch(exported: InMemorySpanExporter) -> None:
    span = FetchSpan(None)
    span.start()
    span.add_event("granted", chunks=5)
    span.end(None, donor="a", bytes=100)
    told = only(exported)
    assert (told.name, told.kind) == ("xavier.fetch", trace.SpanKind.CLIENT)
    assert dict(told.attributes or {}) == {"xavier.donor": "a", "xavier.bytes": 100}
    assert [(e.name, dict(e.attributes or {})) for e in told.events] == [
        ("xavier.granted", {"xavier.chunks": 5})
    ]
    assert told.parent is None
    assert told.status.is_unset


def test_one_that_was_rolled_back_is_an_error_with_its_reason(
    exported: InMemorySpanExporter,
) -> None:
    span = FetchSpan(None)
    span.start()
    span.end("timeout")
    status = only(exported).status
    assert (status.status_code, status.description) == (trace.StatusCode.ERROR, "timeout")


def test_it_belongs_to_its_requests_trace(exported: InMemorySpanExporter) -> None:
    span = FetchSpan(HEADERS)
    span.start()
    span.end(None)
    parent = only(exported).parent
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE, PARENT)


def test_headers_that_are_none_begin_a_trace_of_their_own(
    exported: InMemorySpanExporter,
) -> None:
    span = FetchSpan({"traceparent": "rubbish"})
    span.start()
    span.end(None)
    assert only(exported).parent is None


def test_without_tracing_nothing_is_recorded_and_no_attribute_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As everywhere where nobody has set up a provider."""
    monkeypatch.setattr(tracing, "_prefixed", lambda attributes: pytest.fail("made"))
    monkeypatch.setattr(tracing, "_TRACER", trace.NoOpTracer())
    span = FetchSpan(HEADERS)
    span.start()
    span.add_event("granted", chunks=5)
    span.end("timeout", donor="a")
    assert not span._span.is_recording()
