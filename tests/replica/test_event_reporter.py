"""An outage of the tracker is reported once, however many sessions fail in it."""

from __future__ import annotations

import pytest

from tests.logged import messages
from xinference_xavier.config import XavierConfig
from xinference_xavier.replica.event_reporter import EventReporter


@pytest.fixture
def reporter() -> EventReporter:
    return EventReporter(XavierConfig("m", "10.0.0.1:9999"), "a")


def pending(reporter: EventReporter) -> list[str]:
    return [event["event"] for event in reporter.pending]


def test_the_first_session_is_no_event(reporter: EventReporter) -> None:
    reporter.tracker_session(None)
    assert pending(reporter) == []


def test_an_outage_has_one_beginning_and_one_end(
    reporter: EventReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for _ in range(2):
        for error in (ConnectionError("refused"), TimeoutError(), None, None):
            reporter.tracker_session(error)
    assert pending(reporter) == ["TrackerLost", "TrackerRegained"] * 2
    assert reporter.pending[0]["reason"] == "ConnectionError('refused')"
    both = [
        "tracker lost, retrying: model=m incarnation=a error=ConnectionError('refused')",
        "tracker joined again: model=m incarnation=a",
    ]
    assert messages(caplog) == both * 2
