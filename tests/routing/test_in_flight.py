"""A request that has not been answered a byte survives the loss of one replica."""

from __future__ import annotations

import pytest

from xinference_xavier.routing.router import InFlight


@pytest.fixture
def requests() -> InFlight:
    requests = InFlight()
    for request, replica in {"1": "a", "2": "b", "3": "a"}.items():
        requests.sent(request, replica)
    return requests


def test_unanswered_requests_of_a_lost_replica_go_elsewhere(requests: InFlight) -> None:
    assert requests.lost("a") == ["1", "3"]
    requests.sent("1", "b")
    requests.sent("3", "b")
    assert requests.ended("3") == "b"
    assert len(requests) == 2


def test_an_answer_that_has_begun_cannot_begin_again(requests: InFlight) -> None:
    requests.answered("1")
    assert requests.lost("a") == ["3"]
    assert len(requests) == 2


def test_no_request_brings_down_a_third_replica(requests: InFlight) -> None:
    requests.lost("a")
    requests.sent("1", "b")
    assert requests.lost("b") == ["2"]


def test_a_request_that_waits_for_another_replica_is_at_none(requests: InFlight) -> None:
    requests.lost("a")
    assert requests.lost("a") == []
    assert requests.ended("1") == ""


def test_requests_end_once(requests: InFlight) -> None:
    assert requests.ended("1") == "a"
    assert requests.ended("1") == ""
    requests.answered("1")
    assert requests.lost("a") == ["3"]


def test_a_request_is_at_one_replica(requests: InFlight) -> None:
    with pytest.raises(AssertionError):
        requests.sent("1", "b")
