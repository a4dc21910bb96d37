"""The documentation agrees with the code, as far as it can be compared. `make docs` checks its
links; other tests check the pages about options, monitoring and support."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from xinference_xavier import errors, events
from xinference_xavier.serving.api import add_routes
from xinference_xavier.serving.prefixes import add_prefix_routes
from xinference_xavier.stats.schema import HIT_SOURCES

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
INDEX = TESTS / "README.md"
DRAWINGS = sorted((DOCS / "images").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
FILE = re.compile(r"`((?:\w+/)*test_\w+\.py)`")


def test_every_file_that_a_promise_names_exists() -> None:
    named = set(FILE.findall(INDEX.read_text()))
    assert len(named) > 50
    assert sorted(name for name in named if not (TESTS / name).is_file()) == []


def test_every_rest_route_is_listed_and_no_other() -> None:
    router = APIRouter()
    context = SimpleNamespace(router=router, auth_enabled=False)
    add_routes(context, Mock())
    add_prefix_routes(context, Mock())
    served = {
        f"{method} {route.path}"
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    listed = re.findall(
        r"^\| `((?:GET|POST|PATCH|DELETE) [^`]+)`", (DOCS / "api.md").read_text(), re.MULTILINE
    )
    assert set(listed) == served


@pytest.mark.parametrize(
    ("section", "reasons"),
    [
        ("## Why a fetch was rolled back", errors.ROLLBACKS),
        ("### Why a replica does not share", errors.NotSharing),
    ],
)
def test_every_reason_is_explained_and_no_other(section: str, reasons: Iterable[str]) -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    rows = re.split(r"^##", page.partition(f"{section}\n")[2], flags=re.MULTILINE)[0]
    assert sorted(re.findall(r"^\| `([^`]+)` \|", rows, re.MULTILINE)) == sorted(reasons)


def test_every_source_of_tokens_is_explained() -> None:
    assert all(f"`{source}`" in (DOCS / "api.md").read_text() for source in HIT_SOURCES)


def test_every_event_that_a_hook_may_get_is_in_the_reference() -> None:
    page = (DOCS / "python.md").read_text()
    listed = re.findall(r"autoclass:: (\w+)$", page.partition("## Events and hooks")[2], re.M)
    assert set(listed) == {name for name, each in vars(events).items() if _is_event(each)}


def _is_event(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, events.Event)


def test_every_public_error_has_a_docstring() -> None:
    """Its docstring is its entry in the reference."""
    ours = [each for each in vars(errors).values() if isinstance(each, type)]
    assert len(ours) > 8
    assert all(each.__doc__ for each in ours)


def test_the_architecture_fits_into_100_columns() -> None:
    lines = (DOCS / "architecture.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.name)
def test_drawings_have_descriptions_and_are_for_light_and_dark(drawing: Path) -> None:
    """They have a background of their own for each, so that no theme of the reader or the system
    makes them unreadable. They load nothing from elsewhere."""
    root = ElementTree.parse(drawing).getroot()
    for name in ("title", "desc"):
        element = root.find(f"{SVG}{name}")
        assert element is not None
        assert element.text
    style = root.findtext(f"{SVG}style") or ""
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    for part in (light, dark):
        assert ".paper { fill: #" in part
        assert re.search(r"text \{[^}]*fill: #", part)
    used = {name for each in root.iter() for name in each.get("class", "").split()}
    assert all(f".{name} " in light or f".{name}," in light for name in used)
    assert "href=" not in drawing.read_text()
