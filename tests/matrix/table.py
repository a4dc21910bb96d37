"""Updates the table of versions in `docs/compatibility.md` from the report.

A version that was not tested this time keeps its row.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.matrix.environments import ROOT, VERSIONS

PAGE = ROOT / "docs" / "compatibility.md"
COLUMNS = ("unit", "engines", "models", "xinference")
_LINE = "|---|---|---|---|---|---|\n"
_ROW = re.compile(r"^\| `((?:vllm|xinference|python) [\d.]+)` \|.*\n", re.MULTILINE)


def row(name: str, result: Mapping[str, Any]) -> str:
    cells = [_cell(result["steps"].get(column)) for column in COLUMNS]
    tested = f"{result['date']}, `{result['commit']}`"
    return f"| `{name}` | {' | '.join(cells)} | {tested} |\n"


def _cell(step: Mapping[str, int] | None) -> str:
    if step is None:
        return "–"
    failed = step["failed"]
    return f"{step['passed']} ✓" if not failed else f"{step['passed']} ✓, {failed} ✗"


def write(report: Mapping[str, Any], page: Path = PAGE) -> None:
    """Write the rows of `report` into the table."""
    text = page.read_text()
    rows = {found[1]: found[0] for found in _ROW.finditer(text)}
    rows |= {name: row(name, result) for name, result in report["versions"].items()}
    ordered = "".join(rows[each.name] for each in VERSIONS if each.name in rows)
    start = text.index(_LINE) + len(_LINE)
    end = max([start, *(found.end() for found in _ROW.finditer(text))])
    page.write_text(text[:start] + ordered + text[end:])
