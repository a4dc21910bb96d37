"""With tracing, a fetch is a span in the trace of its request."""

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from xinference_xavier.replica import fetcher
from xinference_xavier.replica.fetcher import FetchSpan

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans that an operator would get."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(fetcher, "_TRACER", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def only(exported: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exported.get_finished_spans()
    return span


def test_a_span_has_the_fetch_s_attributes_and_events(exported: InMemorySpanExporter) -> None:
    span = FetchSpan(None)
    span.add_event("granted", chunks=5)
    span.end(None, donor="a", bytes=100)
    exported_span = only(exported)
    assert (exported_span.name, exported_span.kind) == ("xavier.fetch", trace.SpanKind.CLIENT)
    assert dict(exported_span.attributes or {}) == {"xavier.donor": "a", "xavier.bytes": 100}
    assert [(e.name, dict(e.attributes or {})) for e in exported_span.events] == [
        ("xavier.granted", {"xavier.chunks": 5})
    ]
    assert exported_span.status.is_unset


def test_a_rollback_is_an_error_with_its_reason(
    exported: InMemorySpanExporter,
) -> None:
    span = FetchSpan(None)
    span.end("timeout")
    status = only(exported).status
    assert (status.status_code, status.description) == (trace.StatusCode.ERROR, "timeout")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [(HEADERS, (TRACE, PARENT)), ({"traceparent": "rubbish"}, None), (None, None)],
    ids=["its request's", "a new one after malformed headers", "a new one without headers"],
)
def test_a_span_belongs_to_a_trace(
    exported: InMemorySpanExporter,
    headers: dict[str, str] | None,
    expected: tuple[str, str] | None,
) -> None:
    FetchSpan(headers).end(None)
    parent = only(exported).parent
    found = parent and (f"{parent.trace_id:032x}", f"{parent.span_id:016x}")
    assert found == expected
