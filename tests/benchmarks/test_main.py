"""Parts are measured one by one; a quick run shows that they work and changes no figure."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import report


def part() -> Any:
    """Measures its own size."""
    module = SimpleNamespace(TITLE="Size", SIZE=100, QUICK={"SIZE": 1})
    module.measure = lambda: {"size": module.SIZE}
    module.markdown = lambda measured: f"the size is {measured['size']}"
    module.plot = lambda measured, axes: axes.plot([measured["size"]])
    return module


@pytest.fixture(autouse=True)
def one_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("REPORT", "QUICK", "PAGE", "IMAGES"):
        monkeypatch.setattr(report, name, tmp_path / name.lower())
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(program, "PARTS", {"one": "a short one", "other": "a long one"})
    monkeypatch.setattr(program, "LONG", {"other"})
    module = part()
    monkeypatch.setattr(program, "_module", lambda name: module)


def test_a_part_goes_to_the_report_and_the_page() -> None:
    program.main(["one"])
    assert report.load()["parts"]["one"]["size"] == 100
    assert "the size is 100" in report.PAGE.read_text()


def test_the_page_shows_what_was_measured_before_a_part_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = {"one": part(), "other": SimpleNamespace()}
    monkeypatch.setattr(program, "_module", modules.__getitem__)
    with pytest.raises(AttributeError):
        program.main(["one", "other"])
    assert "the size is 100" in report.PAGE.read_text()


def test_a_part_of_another_version_stays_in_the_report_only() -> None:
    report.add({"parts": {}}, "former", {}, 1.0)
    program.main(["one"])
    assert report.load()["parts"].keys() == {"former", "one"}
    assert "former" not in report.PAGE.read_text()


def test_long_parts_are_measured_where_they_are_named_and_in_quick_runs() -> None:
    program.main([])
    assert report.load()["parts"].keys() == {"one"}
    program.main(["other"])
    assert report.load()["parts"].keys() == {"one", "other"}
    program.main([], quick=True)
    assert json.loads(report.QUICK.read_text())["parts"].keys() == {"one", "other"}


def test_a_quick_run_is_smaller_and_changes_neither_report_nor_page() -> None:
    program.main(["one"], quick=True)
    assert json.loads(report.QUICK.read_text())["parts"]["one"]["size"] == 1
    assert not report.REPORT.exists()
    assert not report.PAGE.exists()


def test_an_unknown_part_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(SystemExit, match="unknown part two; the parts are one, other"):
        program.main(["one", "two"])
    assert not report.REPORT.exists()
