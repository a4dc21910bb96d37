"""The house of `docs/architecture.md` stands: arrows between our parts point one way only, and
what is heavy stays where it belongs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import xinference_xavier

PACKAGE = "xinference_xavier"
ROOT = Path(xinference_xavier.__file__).parent

MAY_IMPORT = {
    "ground": set(),
    "cancels": set(),
    "pool": {"ground"},
    "tracker": {"ground", "cancels"},
    "network": {"ground", "cancels"},
    "transfer": {"ground", "network", "pool"},
    "replica": {"ground", "cancels", "network", "pool", "tracker", "transfer"},
    "engine": {"ground", "pool", "tracker", "transfer", "replica"},
    "serving": {"ground", "cancels", "tracker"},
    "package": {"serving"},
    "client": {"ground"},
    "standalone": {"ground", "serving", "tracker"},
    "cli": {"client", "ground", "standalone"},
}
"""Our parts, and which other parts each of them may import."""

ABOVE_GROUND = {
    "__init__": "package",
    "cancels": "cancels",
    "examination": "replica",
    "explanation": "replica",
    "client": "client",
    "doctor": "client",
    "results": "client",
    "network": "network",
    "replica": "replica",
    "replica_actor": "replica",
    "standalone": "standalone",
}
"""Modules beside the subpackages that are not of the ground floor."""

CONFINED = {
    "vllm": {"engine"},
    "xinference": {"serving"},
    "aioprometheus": {"serving"},
    "fastapi": {"serving"},
    "opentelemetry": {"transfer"},
    "torch": {"engine", "transfer"},
    "xoscar": {"cancels", "network", "tracker", "transfer", "replica", "serving", "standalone"},
}
"""Third parties, and the parts that may import them."""


class Import(NamedTuple):
    """Module `importer` (a path inside the package) imports `name`."""

    importer: Path
    name: str

    def __str__(self) -> str:
        return f"{self.importer} imports {self.name}"


def part_of(module: Path) -> str:
    """The part that the module at this path inside the package belongs to."""
    if len(module.parts) > 1:
        return module.parts[0]
    return ABOVE_GROUND.get(module.stem, "ground")


def part_named(name: str) -> str:
    """The part that a dotted name below the package belongs to."""
    first = name.split(".")[1]
    return first if (ROOT / first).is_dir() else part_of(Path(f"{first}.py"))


def imports() -> Iterator[Import]:
    """Every import anywhere in the package, those inside functions included."""
    for file in sorted(ROOT.rglob("*.py")):
        module = file.relative_to(ROOT)
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            if isinstance(node, ast.Import):
                yield from (Import(module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module} has a relative import: name the module in full"
                assert node.module is not None
                yield from (Import(module, f"{node.module}.{alias.name}") for alias in node.names)


IMPORTS = list(imports())
OURS = [found for found in IMPORTS if found.name.startswith(f"{PACKAGE}.")]
CONSTANTS = [found for found in OURS if found.name == f"{PACKAGE}.__version__"]


def test_every_part_is_known() -> None:
    assert {part_of(file.relative_to(ROOT)) for file in ROOT.rglob("*.py")} <= set(MAY_IMPORT)


def test_arrows_between_parts_point_one_way() -> None:
    wrong = [
        str(found)
        for found in OURS
        if found not in CONSTANTS
        and part_named(found.name) not in MAY_IMPORT[part_of(found.importer)]
        and part_named(found.name) != part_of(found.importer)
    ]
    assert wrong == []


@pytest.mark.parametrize("library", CONFINED)
def test_a_heavy_library_is_imported_only_where_it_belongs(library: str) -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.name.split(".")[0] == library and part_of(found.importer) not in CONFINED[library]
    ]
    assert wrong == []


def test_gloo_alone_brings_torch_to_the_transfers() -> None:
    modules = {
        found.importer.name
        for found in IMPORTS
        if found.name.split(".")[0] == "torch" and part_of(found.importer) == "transfer"
    }
    assert modules == {"gloo.py"}


def test_the_ground_floor_needs_the_standard_library_and_psutil_only() -> None:
    allowed = sys.stdlib_module_names | {"psutil", PACKAGE}
    wrong = [
        str(found)
        for found in IMPORTS
        if part_of(found.importer) == "ground" and found.name.split(".")[0] not in allowed
    ]
    assert wrong == []


def test_tracker_and_serving_load_where_torch_and_vllm_are_absent() -> None:
    """The supervisor's processes may run on a machine that has neither."""
    modules = [
        ".".join((PACKAGE, *file.relative_to(ROOT).with_suffix("").parts))
        for part in ("tracker", "serving")
        for file in sorted((ROOT / part).glob("*.py"))
        if file.stem != "__init__"
    ]
    assert len(modules) > 4
    program = "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n" + "".join(
        f"import {module}\n" for module in modules
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
