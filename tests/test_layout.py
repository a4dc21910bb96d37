"""A module has tests under its own name: `pool/region.py` in `tests/pool/test_region.py`."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "xinference_xavier"

ELSEWHERE = {
    "replica/actor.py": "forwards to Replica: replica/test_replica.py",
    "tiers/base.py": "abstract",
    "tracker/fanout.py": "the tracker's: tracker/test_actor.py",
    "tracker/threads.py": "the tracker's: tracker/test_actor.py",
    "transfer/__main__.py": "run as a process: replica/test_transfer_process.py",
    "transfer/links.py": "common to transfer/test_receiver.py and transfer/test_sender.py",
    "transfer/transports/base.py": "abstract",
}
"""Modules without a test file of their own, and why."""


def test_every_module_has_its_test_file() -> None:
    modules = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py")]
    untested = {
        str(module)
        for module in modules
        if module.stem not in {"__init__", "_version"}
        and not (TESTS / module.with_name(f"test_{module.name}")).is_file()
    }
    assert untested == ELSEWHERE.keys()
