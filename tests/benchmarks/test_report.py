"""A part that is measured again replaces its earlier figures in the report and on the page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import report


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "REPORT", tmp_path / "build" / "report.json")
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(report, "IMAGES", tmp_path / "images")


def part(title: str) -> Any:
    return SimpleNamespace(
        TITLE=title,
        markdown=lambda measured: f"{title} is {measured['value']}",
        plot=lambda measured, axes: axes.plot([1, measured["value"]]),
    )


def test_parts_are_merged() -> None:
    found = report.load()
    report.add(found, "one", {"value": 1}, 0.5)
    found = report.load()
    report.add(found, "two", {"value": 2}, 0.5)
    report.add(found, "one", {"value": 3}, 0.5)
    written = json.loads(report.REPORT.read_text())["parts"]
    assert {name: entry["value"] for name, entry in written.items()} == {"one": 3, "two": 2}
    assert written["one"]["machine"]["cores"] >= 1
    assert report.load() == found


def test_the_page_shows_what_was_measured_in_the_order_of_the_parts() -> None:
    found = report.load()
    for name, value in (("second", 2), ("first", 1)):
        report.add(found, name, {"value": value}, 0.5)
    parts = {"second": part("2nd"), "first": part("First")}
    words = {"first": "the first", "none": "not done", "second": "the second"}
    report.write_page(found, parts, words)
    page = report.PAGE.read_text()
    assert page.index("First is 1") < page.index("2nd is 2")
    assert page.endswith("## Not measured yet\n\n- `make bench PART=none`: not done\n")
    for name in ("first", "second"):
        assert f"images/bench-{name}.png" in page
        assert (report.IMAGES / f"bench-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_keeps_parts_that_this_report_lacks() -> None:
    """The page is kept with the code, the report is not."""
    words = {"first": "", "second": ""}
    before = report.load()
    report.add(before, "first", {"value": 1}, 0.5)
    report.write_page(before, {"first": part("First")}, words)
    report.REPORT.unlink()
    for value in (2, 3):
        found = report.load()
        report.add(found, "second", {"value": value}, 0.5)
        report.write_page(found, {"second": part("2nd")}, words)
    page = report.PAGE.read_text()
    assert page.count("## ") == 2
    assert page.index("First is 1") < page.index("images/bench-first.png") < page.index("2nd is 3")
    assert "Not measured yet" not in page


def test_another_file_leaves_the_report_alone(tmp_path: Path) -> None:
    report.add({"parts": {}}, "one", {"value": 1}, 0.5, tmp_path / "quick.json")
    assert json.loads((tmp_path / "quick.json").read_text())["parts"]["one"]["value"] == 1
    assert report.load() == {"parts": {}}
