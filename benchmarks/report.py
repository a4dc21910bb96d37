"""The report `build/bench-report.json`, and the page `docs/benchmarks.md` with its plots.

A part that is measured again replaces its old results in report and page; the others stay.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure

from benchmarks import bars

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "build" / "bench-report.json"
QUICK = ROOT / "build" / "bench-quick.json"
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
_HEAD = """# Benchmarks

`make bench` writes this page, in half an hour on two cores, except for the long parts `routing`,
`replay` and `roles`. `make bench PART=<part>` measures one part again; with `QUICK=1` it measures
less and does not write here. All samples are in `build/bench-report.json`. Trust the ratios rather
than the absolute figures: each part comes from one machine, and whatever is compared was measured
in turns.
"""
_SECTION = re.compile(r"^## .*\(`(\w+)`\)\n", re.MULTILINE)


def load() -> dict[str, Any]:
    if not REPORT.exists():
        return {"parts": {}}
    report: dict[str, Any] = json.loads(REPORT.read_text())
    return report


def add(
    report: dict[str, Any],
    name: str,
    part: dict[str, Any],
    seconds: float,
    file: Path | None = None,
) -> None:
    """Add a part to the report and write the report to its file."""
    file = file or REPORT
    report["parts"][name] = {
        "measured": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "took_s": seconds,
        "machine": machine(),
        "bars": bars.judge(name, part),
        **part,
    }
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_page(
    report: Mapping[str, Any], measured: Mapping[str, ModuleType], parts: Mapping[str, str]
) -> None:
    """Write the sections of all `parts` (names with a few words) in their order. Parts that are not
    `measured` in this report keep their section; if they have none, the page says so."""
    shown = sections(PAGE.read_text()) if PAGE.exists() else {}
    IMAGES.mkdir(exist_ok=True)
    for name, module in measured.items():
        part = report["parts"][name]
        image = IMAGES / f"bench-{name}.png"
        _draw(image, module, part)
        host = part["machine"]
        shown[name] = (
            f"## {module.TITLE} (`{name}`)\n\n"
            f"{part['measured']}, {part['took_s']:.0f} s; {host['cores']} cores of "
            f"{host['processor']}, Linux {host['kernel']}, load {host['load']:.1f}.\n\n"
            f"{bars.markdown(bars.judge(name, part))}{module.markdown(part)}\n\n"
            f"![{module.TITLE}](images/{image.name})\n"
        )
    found = [shown[name] for name in parts if name in shown]
    missing = [
        f"- `make bench PART={name}`: {words}\n"
        for name, words in parts.items()
        if name not in shown
    ]
    if missing:
        found.append(f"## Not measured yet\n\n{''.join(missing)}")
    PAGE.write_text("\n".join([_HEAD, *found]))


def sections(page: str) -> dict[str, str]:
    """The sections of the page, by the names of their parts."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    named = ((_SECTION.match(part), part) for part in parts)
    return {match[1]: part.rstrip() + "\n" for match, part in named if match}


def _draw(image: Path, module: ModuleType, part: Mapping[str, Any]) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(module.TITLE)
    module.plot(part, axes)
    figure.savefig(image, dpi=100, metadata={"Software": None})
