"""docs/architecture.md has a map of all folders, and walks whose stops exist."""

import ast
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()


class Stop(NamedTuple):
    file: str
    class_name: str
    function: str


STOPS = [
    Stop(*row) for row in re.findall(r"^\| `(\S+\.py)` \| `(?:(\w+)\.)?(\w+)` \| ", PAGE, re.M)
]


def test_the_map_has_every_folder() -> None:
    house = PAGE.split("\n## The house\n")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)/` \|", house, re.M))
    folders = {found.parent.name for found in (ROOT / "xinference_xavier").glob("*/__init__.py")}
    assert named == folders


def test_a_module_s_name_occurs_once() -> None:
    names = Counter(found.stem for found in (ROOT / "xinference_xavier").rglob("*.py"))
    del names["__init__"], names["__main__"]
    assert not [name for name, count in names.items() if count > 1]


def test_every_row_of_a_walk_is_checked() -> None:
    """A stop that the pattern does not match would go unnoticed."""
    rows = re.findall(r"^\| file \| function \| .*\n\|.*\n((?:\|.*\n)+)", PAGE, re.M)
    assert sum(table.count("\n") for table in rows) == len(STOPS)


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: f"{stop.class_name}.{stop.function}")
def test_each_stop_exists(stop: Stop) -> None:
    """A class, a function, or a method of a class."""
    within: ast.AST = ast.parse((ROOT / "xinference_xavier" / stop.file).read_text())
    for name in filter(None, (stop.class_name, stop.function)):
        (within,) = (
            node for node in ast.iter_child_nodes(within) if getattr(node, "name", "") == name
        )


def test_each_way_counts_its_files() -> None:
    ways = [part for part in PAGE.split("\n## ") if part.startswith("One ")]
    assert len(ways) == 5
    for way in ways:
        files = {stop.file for stop in STOPS if f"\n| `{stop.file}` | " in way}
        assert f"{len(files)} files:\n" in way
