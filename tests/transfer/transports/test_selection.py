"""Donors on this host are linked by shared memory; others, and those with which that failed, by
another transport. Processes on different hosts must never count as being on one host."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.logged import messages
from tests.transfer.no_transport import NoTransport
from xinference_xavier.errors import LinkError, TransportError
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import Startup
from xinference_xavier.transfer.__main__ import usable
from xinference_xavier.transfer.transports import selection
from xinference_xavier.transfer.transports.base import Transport
from xinference_xavier.transfer.transports.selection import (
    DIFFERENCES,
    MEMORY_NOT_SHARED,
    TransportSelector,
    difference,
)

HERE, THERE = "boot 1 0", "boot 2 0"
ADDRESS = "host:1"


class Near(NoTransport):
    name = "near"
    host = HERE


class Between(NoTransport):
    name = "between"


class Far(NoTransport):
    name = "far"


class Unfit(NoTransport):
    name = "unfit"

    @classmethod
    def unfit(cls) -> str | None:
        return "no such device"


class Broken(NoTransport):
    name = "broken"

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        raise TransportError("it burns")


@pytest.fixture(scope="module")
def region() -> Region:
    return Region.create(1, 4096)


def choice(region: Region, *transports: type[NoTransport], **more: Any) -> TransportSelector:
    return TransportSelector([transport(region, "", None) for transport in transports], **more)


def names(
    choice: TransportSelector, host: str | None, donor: str = "donor", at: str = ADDRESS
) -> list[str]:
    return [transport.name for transport in choice.candidates(donor, at, host)]


def test_a_transport_that_failed_is_tried_again_after_ever_longer_pauses(region: Region) -> None:
    now = 0.0
    both = choice(region, Near, Far, clock=lambda: now)
    for pause in (60, 120, 240, 480, 960, 960):
        both.record_fallback("donor", ADDRESS, both.named("near"), LinkError("no such socket"))
        now += pause - 1.0
        assert names(both, HERE) == ["far"]
        now += 1.0
        assert names(both, HERE) == ["near", "far"]


def test_a_transport_that_failed_is_tried_at_once_with_another_transfer_process(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    both = choice(region, Near, Far)
    with caplog.at_level(logging.WARNING):
        both.record_fallback("donor", ADDRESS, both.named("near"), LinkError("no such socket"))
    (message,) = messages(caplog)
    assert both.fallbacks == 1
    assert "near failed with donor donor; falling back" in message
    assert "no such socket" in message
    assert names(both, HERE) == ["far"]
    assert names(both, HERE, donor="another") == ["near", "far"]
    assert names(both, HERE, at="host:2") == ["near", "far"], "it is a new process"
    both.forget_except(frozenset({"another"}))
    assert names(both, HERE) == ["near", "far"]


def test_each_transport_fails_for_itself(region: Region) -> None:
    """What is reported is why a better one is not used."""
    selector = choice(region, Near, Between, Far, left_out={"best": "no such device"})
    assert names(selector, HERE) == ["near", "between", "far"]
    assert selector.obstacles("donor", ADDRESS, HERE) == {"best": "no such device"}
    selector.record_fallback("donor", ADDRESS, selector.named("between"), TimeoutError())
    assert names(selector, HERE) == ["near", "far"]
    assert names(selector, THERE) == ["far"]
    assert selector.obstacles("donor", ADDRESS, THERE) == {
        "best": "no such device",
        "near": "other network namespace",
        "between": "TimeoutError",
    }


def startup(*transports: type[Transport]) -> Startup:
    paths = tuple(f"{kind.__module__}:{kind.__name__}" for kind in transports)
    return Startup("a", 3, 1, 4096, "", None, paths)


def test_a_better_transport_that_this_host_cannot_use_is_left_out(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        selector = TransportSelector(*usable(startup(Unfit, Broken, Far), region))
    assert selector.names == ["far"]
    assert selector.obstacles("donor", ADDRESS, HERE) == {
        "unfit": "no such device",
        "broken": "it burns",
    }
    assert ["broken" in message for message in messages(caplog)] == [True]


def test_the_last_transport_must_work(region: Region) -> None:
    (unfit,), left_out = usable(startup(Unfit), region)
    assert (unfit.name, left_out) == ("unfit", {}), "nobody asked for another one"
    with pytest.raises(TransportError, match="it burns"):
        usable(startup(Far, Broken), region)


SAY = (
    "from xinference_xavier.transfer.transports.selection import host_identity; "
    "print(host_identity())"
)


def test_processes_of_one_host_and_user_have_one_identity() -> None:
    child = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == selection.host_identity()
    assert difference(selection.host_identity(), child.stdout.strip()) is None


def test_another_machine_network_namespace_or_user_has_another_identity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = selection.host_identity()
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    for patched, value, reason in (
        ("_BOOT_ID", boot, "other machine"),
        ("_NETWORK", Path("/proc/self/ns/uts"), "other network namespace"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(selection, patched, value)
            assert difference(own, selection.host_identity()) == reason
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert difference(own, selection.host_identity()) == "other user"


@pytest.mark.parametrize("theirs", ["", "x", "{own} more", "{own} ", " {own}"])
def test_a_malformed_identity_is_not_our_host(theirs: str) -> None:
    own = selection.host_identity()
    assert difference(own, theirs.format(own=own)) in DIFFERENCES
    assert difference(own, None) == MEMORY_NOT_SHARED


def test_a_host_without_an_identity_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_BOOT_ID", Path("/nowhere/boot_id"))
    with pytest.raises(TransportError, match="cannot identify this host"):
        selection.host_identity()
