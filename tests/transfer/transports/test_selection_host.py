"""A guess at whether two processes are on one host: never right where it must be wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xinference_xavier.errors import TransportError
from xinference_xavier.transfer.transports import selection
from xinference_xavier.transfer.transports.selection import (
    DIFFERENCES,
    MEMORY_NOT_SHARED,
    difference,
)

SAY = (
    "from xinference_xavier.transfer.transports.selection import host_identity; "
    "print(host_identity())"
)


def test_processes_of_one_host_and_user_say_the_same() -> None:
    child = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == selection.host_identity()
    assert difference(selection.host_identity(), child.stdout.strip()) is None


def test_another_machine_network_namespace_or_user_is_told_apart(
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
def test_what_is_no_identity_is_not_our_host(theirs: str) -> None:
    own = selection.host_identity()
    assert difference(own, theirs.format(own=own)) in DIFFERENCES


def test_who_says_nothing_does_not_share_its_memory() -> None:
    assert difference(selection.host_identity(), None) == MEMORY_NOT_SHARED


def test_a_system_that_does_not_tell_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_BOOT_ID", Path("/nowhere/boot_id"))
    with pytest.raises(TransportError, match="cannot identify this host"):
        selection.host_identity()
