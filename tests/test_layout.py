"""Modules are small, and each has tests under its name: `pool/test_region.py` for
`pool/region.py`."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "xinference_xavier"
MAX_MODULE_LINES = 350
MAX_CLASS_LINES = 250
MAX_ROOT_MODULES = 8

ELSEWHERE = {
    "tiers/base.py": "abstract",
    "stats/warm_join.py": "replica/test_warm_join.py",
    "tracker/fanout.py": "the tracker's: tracker/test_actor.py",
    "engine/view.py": "engine/test_probes.py and engine/test_connector.py",
    "replica/departures.py": "replica/test_replica.py",
    "replica/engine.py": "abstract",
    "transfer/__main__.py": "run as a process: replica/test_transfer_process.py",
    "transfer/links.py": "transfer/test_receiver.py and transfer/test_sender.py",
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


def test_no_module_and_no_class_is_large() -> None:
    large = set()
    for file in PACKAGE.rglob("*.py"):
        text, name = file.read_text(), file.relative_to(PACKAGE)
        if text.count("\n") > MAX_MODULE_LINES:
            large.add(str(name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_CLASS_LINES:
                    large.add(f"{name}: {node.name}")
    assert large == set()


def test_few_modules_are_outside_the_folders() -> None:
    modules = {file.stem for file in PACKAGE.glob("*.py")}
    assert len(modules) <= MAX_ROOT_MODULES
