"""Parts are measured one by one; a quick run shows that they work and changes no figure."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import report


def part() -> Any:
    """Measures its own size."""
    module = SimpleNamespace(SIZE=100, QUICK={"SIZE": 1})
    module.measure = lambda: {"size": module.SIZE}
    module.markdown = lambda measured: f"the size is {measured['size']}"
    return module


@pytest.fixture(autouse=True)
def two_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second one fails."""
    modules = {"one": part(), "other": SimpleNamespace()}
    for name in ("REPORT", "QUICK"):
        monkeypatch.setattr(report, name, tmp_path / name.lower())
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(program, "PARTS", dict.fromkeys(modules, "a part"))
    monkeypatch.setattr(program, "_module", modules.__getitem__)


def measured(file: Path) -> dict[str, int]:
    return {name: each["size"] for name, each in report.load(file)["parts"].items()}


def test_a_part_is_shown_and_goes_to_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["one"])
    assert measured(report.REPORT) == {"one": 100}
    assert "the size is 100" in capsys.readouterr().out


def test_what_was_measured_before_a_part_failed_is_in_the_report() -> None:
    with pytest.raises(AttributeError):
        program.main([])
    assert measured(report.REPORT) == {"one": 100}


def test_a_quick_run_is_smaller_and_leaves_the_report_alone() -> None:
    program.main(["one"], quick=True)
    assert measured(report.QUICK) == {"one": 1}
    assert not report.REPORT.exists()


def test_an_unknown_part_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(SystemExit, match="unknown part two; the parts are one, other"):
        program.main(["one", "two"])
    assert not report.REPORT.exists()


def test_a_part_that_is_measured_again_replaces_its_earlier_figures(tmp_path: Path) -> None:
    file = tmp_path / "build" / "report.json"
    for name, value in (("one", 1), ("two", 2), ("one", 3)):
        report.add(report.load(file), name, {"value": value}, 0.5, file)
    written = json.loads(file.read_text())["parts"]
    assert {name: entry["value"] for name, entry in written.items()} == {"one": 3, "two": 2}
    assert written["one"]["machine"]["cores"] >= 1
    assert written["one"]["machine"]["vllm"]
