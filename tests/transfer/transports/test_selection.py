"""Shared memory for donors of this host, something else for the others, and for those with which
it failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from tests.transfer.no_transport import NoTransport
from xinference_xavier.errors import LinkError
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports.selection import OutOfReachError, TransportSelector

HERE, THERE = "boot 1 0", "boot 2 0"
ADDRESS = "host:1"


class Near(NoTransport):
    name = "near"
    host = HERE


class Far(NoTransport):
    name = "far"


@pytest.fixture(scope="module")
def region() -> Region:
    return Region.create(1, 4096)


def choice(region: Region, *transports: type[NoTransport]) -> TransportSelector:
    return TransportSelector([transport(region, "", None) for transport in transports])


def names(
    choice: TransportSelector, host: str | None, donor: str = "donor", at: str = ADDRESS
) -> list[str]:
    found: Sequence[NoTransport] = choice.candidates(donor, at, host)  # type: ignore[assignment]
    return [transport.name for transport in found]


def test_a_donor_of_this_host_is_linked_within_it_and_others_by_what_goes_further(
    region: Region,
) -> None:
    both = choice(region, Near, Far)
    assert names(both, HERE) == ["near", "far"]
    assert names(both, THERE) == names(both, None) == ["far"]
    assert names(choice(region, Far), HERE) == ["far"]


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (None, "memory not shared"),
        (THERE, "other network namespace"),
        ("boot 1 7", "other user"),
        ("another 1 0", "other machine"),
    ],
)
def test_who_demands_this_host_is_told_why_not(
    region: Region, host: str | None, reason: str
) -> None:
    demanding = choice(region, Near)
    assert names(demanding, HERE) == ["near"]
    with pytest.raises(OutOfReachError, match=f"no link by near: {reason}") as caught:
        demanding.candidates("donor", ADDRESS, host)
    assert caught.value.reason == reason


def test_what_failed_with_a_donor_is_not_tried_with_that_process_of_it_again(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    both = choice(region, Near, Far)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            both.record_fallback("donor", ADDRESS, LinkError("no such socket"))
    assert (both.fallbacks, len(caplog.messages)) == (1, 1)
    assert "near failed with donor donor on this host; falling back" in caplog.messages[0]
    assert "no such socket" in caplog.messages[0]
    assert names(both, HERE) == ["far"]
    assert names(both, HERE, donor="another") == ["near", "far"]
    assert names(both, HERE, at="host:2") == ["near", "far"], "it was started again"
    both.forget_except(frozenset({"another"}))
    assert names(both, HERE) == ["near", "far"]


def test_a_consumer_asks_for_a_transport_by_its_name(region: Region) -> None:
    both = choice(region, Near, Far)
    assert (both.names, both.host) == (["near", "far"], HERE)
    assert both.named("far").name == "far"
    with pytest.raises(LinkError, match="offers near or far, not 'gloo'"):
        both.named("gloo")
    assert choice(region, Far).host is None
