"""docs/architecture.md has a map of all folders, and correct, short walks: a remote hit, a request
to its replica, a divided request, a named prefix, a launch and a removal."""

import ast
import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MAX_MODULES = 14
ROW = re.compile(r"^\| `((?:engine|replica|transfer|pool)/\S+\.py)` \| `(\w+)\.(\w+)` \| ", re.M)
ROUTE = re.compile(r"^\| `(\S+\.py)` \| `(?:(\w+)\.)?(\w+)` \| ", re.M)
SHARED = "pool"
"""Counts as part of the room that calls it."""


class Stop(NamedTuple):
    file: str
    class_name: str
    function: str

    @property
    def room(self) -> str:
        return self.file.split("/")[0]


PAGE = (ROOT / "docs/architecture.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


WALK = [Stop(*row) for row in ROW.findall(section("One remote hit"))]
ROUTED, DIVIDED, NAMED, LAUNCH, REMOVAL = (
    [Stop(*row) for row in ROUTE.findall(section(title))]
    for title in (
        "One request",
        "One divided request",
        "One named prefix",
        "One launch",
        "One removal",
    )
)
OTHERS = [*ROUTED, *DIVIDED, *NAMED, *LAUNCH, *REMOVAL]


def test_the_map_has_every_folder() -> None:
    named = set(re.findall(r"^\| `(\w+)/` \|", section("The house"), re.M))
    folders = {found.parent.name for found in (ROOT / "xinference_xavier").glob("*/__init__.py")}
    assert named == folders


def test_each_room_is_entered_once_on_the_way_out_and_once_on_the_way_back() -> None:
    rooms = [
        room for room, _ in itertools.groupby(stop.room for stop in WALK if stop.room != SHARED)
    ]
    assert rooms == ["engine", "replica", "transfer", "replica", "engine"]


def test_it_leads_through_few_modules() -> None:
    assert len({stop.file for stop in WALK}) <= MAX_MODULES


def test_every_row_of_a_walk_is_checked() -> None:
    """A stop that the patterns do not match would go unnoticed."""
    rows = re.findall(r"^\| file \| function \| .*\n\|.*\n((?:\|.*\n)+)", PAGE, re.M)
    assert sum(table.count("\n") for table in rows) == len(WALK) + len(OTHERS)


@pytest.mark.parametrize(
    "stop", [*WALK, *OTHERS], ids=lambda stop: f"{stop.class_name}.{stop.function}"
)
def test_each_stop_exists(stop: Stop) -> None:
    """A class, a function, or a method of a class."""
    within: ast.AST = ast.parse((ROOT / "xinference_xavier" / stop.file).read_text())
    for name in filter(None, (stop.class_name, stop.function)):
        (within,) = (
            node for node in ast.iter_child_nodes(within) if getattr(node, "name", "") == name
        )


def test_the_way_to_a_replica_begins_at_xinference_and_ends_there() -> None:
    rooms = [room for room, _ in itertools.groupby(stop.room for stop in ROUTED)]
    assert rooms == ["serving", "frontend", "routing", "serving"]
