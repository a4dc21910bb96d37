"""A span for each fetch, where the engine traces with OpenTelemetry.

Without a tracer provider from vLLM, a span records nothing and its attributes are not computed.
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
    """Belongs to the trace that `headers` names: those of the request that began the fetch."""

    def __init__(self, headers: Mapping[str, str] | None) -> None:
        context = _PROPAGATOR.extract(headers) if headers else None
        self._span = _TRACER.start_span(SPAN_NAME, context=context, kind=trace.SpanKind.CLIENT)

    def add_event(self, name: str, **attributes: str | int) -> None:
        if self._span.is_recording():
            self._span.add_event(f"{_PREFIX}{name}", _prefixed(attributes))

    def end(self, failure: str | None, **attributes: str | int) -> None:
        """`failure` says why the fetch was rolled back; None if it was committed."""
        if self._span.is_recording():
            self._span.set_attributes(_prefixed(attributes))
            if failure is not None:
                self._span.set_status(trace.Status(trace.StatusCode.ERROR, failure))
        self._span.end()


def _prefixed(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"{_PREFIX}{name}": value for name, value in attributes.items()}
