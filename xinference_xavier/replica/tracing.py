"""A span for each fetch, where the engine's process traces with OpenTelemetry.

vLLM sets up a tracer provider in its engine's processes when it is given an OTLP endpoint. Without
one, a span is OpenTelemetry's own that records nothing, and no attribute is made.

Threading: belongs to the replica's background loop, but for its making, which costs nothing;
exporting is OpenTelemetry's business, on its own threads.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

SPAN_NAME = "xavier.fetch"
_TRACER = trace.get_tracer("xinference_xavier")
_PROPAGATOR = TraceContextTextMapPropagator()
_PREFIX = "xavier."


class FetchSpan:
    """`headers` are those of the request for which the fetch was begun, if it is traced: its trace
    becomes that of the fetch."""

    def __init__(self, headers: Mapping[str, str] | None) -> None:
        self._headers = headers
        self._span: trace.Span = trace.INVALID_SPAN

    def start(self) -> None:
        context = _PROPAGATOR.extract(self._headers) if self._headers else None
        self._span = _TRACER.start_span(SPAN_NAME, context=context, kind=trace.SpanKind.CLIENT)

    def note(self, name: str, **attributes: str | int) -> None:
        """Something that happened on the way."""
        if self._span.is_recording():
            self._span.add_event(f"{_PREFIX}{name}", _prefixed(attributes))

    def end(self, failure: str | None, **attributes: str | int) -> None:
        """`failure` is why the fetch was rolled back, None if it was not."""
        if self._span.is_recording():
            self._span.set_attributes(_prefixed(attributes))
            if failure is not None:
                self._span.set_status(trace.Status(trace.StatusCode.ERROR, failure))
        self._span.end()


def _prefixed(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"{_PREFIX}{name}": value for name, value in attributes.items()}
