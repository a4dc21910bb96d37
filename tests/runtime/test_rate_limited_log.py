"""A condition that repeats is logged once, and its repetitions are counted."""

import logging

import pytest

from tests.logged import messages, records
from xinference_xavier.runtime.rate_limited_log import REMINDER_INTERVAL, RateLimitedLog

LOGGER = logging.getLogger("xinference_xavier.conditions")


@pytest.fixture
def conditions() -> RateLimitedLog:
    return RateLimitedLog(LOGGER)


def test_the_first_occurrence_of_each_is_logged(
    conditions: RateLimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        conditions.warn("a", "a failed: %s", number)
        conditions.warn("b", "b failed: %s", number, level=logging.ERROR)
    assert [(record.levelname, record.getMessage()) for record in records(caplog)] == [
        ("WARNING", "a failed: 0"),
        ("ERROR", "b failed: 0"),
    ]


def test_one_that_lasts_is_logged_again_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    conditions = RateLimitedLog(LOGGER, lambda: now)
    for passed in (0.0, 0.0, 0.0, 0.0, 0.0, REMINDER_INTERVAL, REMINDER_INTERVAL):
        now += passed
        conditions.warn("a", "a failed: %s", "why")
    assert messages(caplog) == ["a failed: why", "a failed: why repeated=4", "a failed: why"]


def test_an_exception_comes_with_its_trace(
    conditions: RateLimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        raise ValueError("this")
    except ValueError:
        conditions.warn("a", "failed", exc_info=True)
    assert "ValueError: this" in caplog.text
