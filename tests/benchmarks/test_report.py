"""A part that is measured again replaces its earlier figures in the report."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import report


def test_parts_are_merged(tmp_path: Path) -> None:
    file = tmp_path / "build" / "report.json"
    for name, value in (("one", 1), ("two", 2), ("one", 3)):
        report.add(report.load(file), name, {"value": value}, 0.5, file)
    written = json.loads(file.read_text())["parts"]
    assert {name: entry["value"] for name, entry in written.items()} == {"one": 3, "two": 2}
    assert written["one"]["machine"]["cores"] >= 1
    assert written["one"]["machine"]["vllm"]
