"""Operators read one line when sharing begins to work, and one when it stops."""

from __future__ import annotations

import pytest

from tests.logged import records
from xinference_xavier.errors import NotSharing
from xinference_xavier.replica.replica import SharingLog


@pytest.fixture
def log() -> SharingLog:
    return SharingLog("a")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.levelname} {record.getMessage()}" for record in records(caplog)]


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")


def test_sharing_that_never_worked_does_not_stop(
    log: SharingLog, caplog: pytest.LogCaptureFixture
) -> None:
    for reason in NotSharing:
        log.update(reason, 0)
    assert lines(caplog) == []


def test_one_line_each_however_often_it_is_looked_at(
    log: SharingLog, caplog: pytest.LogCaptureFixture
) -> None:
    for reason, peers in (
        (NotSharing.NOT_JOINED, 0),
        (None, 1),
        (None, 2),
        (NotSharing.NO_PEERS, 0),
        (None, 3),
    ):
        for _ in range(3):
            log.update(reason, peers)
    assert lines(caplog) == [
        "INFO sharing works: incarnation=a peers=1",
        "WARNING sharing stopped, no other replica in this namespace: incarnation=a",
        "INFO sharing works: incarnation=a peers=3",
    ]


@pytest.mark.parametrize("reason", NotSharing)
def test_every_reason_is_explained(
    reason: NotSharing, log: SharingLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.update(None, 1)
    log.update(reason, 0)
    assert len(lines(caplog)[1]) > len("WARNING sharing stopped, : incarnation=a")


def test_another_reason_is_not_another_stop(
    log: SharingLog, caplog: pytest.LogCaptureFixture
) -> None:
    for reason in (None, *NotSharing):
        log.update(reason, 0)
    assert len(lines(caplog)) == 2
