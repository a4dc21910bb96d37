"""The report: `build/bench-report.json`, and of it `docs/benchmarks.md` with its plots.

A part that is measured anew replaces what the report and the page had of it; the others stay.
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

Written by `make bench`; `make bench PART=<part>` measures one part anew, and with `QUICK=1` tries
it on less without writing here. All samples are in `build/bench-report.json`. Take the ratios, not
the figures: they are of one machine, and what is compared was measured in turns.
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
    """To the report and its file."""
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
    """Of all `parts`, which are names with a few words, in their order; of those that are not
    `measured` in this report, what the page had of them, or that there is nothing yet."""
    sections = _sections(PAGE.read_text()) if PAGE.exists() else {}
    IMAGES.mkdir(exist_ok=True)
    for name, module in measured.items():
        part = report["parts"][name]
        image = IMAGES / f"bench-{name}.png"
        _draw(image, module, part)
        host = part["machine"]
        sections[name] = (
            f"## {module.TITLE} (`{name}`)\n\n"
            f"{part['measured']}, {part['took_s']:.0f} s; {host['cores']} cores of "
            f"{host['processor']}, Linux {host['kernel']}, load {host['load']:.1f}.\n\n"
            f"{bars.markdown(bars.judge(name, part))}{module.markdown(part)}\n\n"
            f"![{module.TITLE}](images/{image.name})\n"
        )
    found = [sections[name] for name in parts if name in sections]
    missing = [
        f"- `make bench PART={name}`: {words}\n"
        for name, words in parts.items()
        if name not in sections
    ]
    if missing:
        found.append(f"## Not measured yet\n\n{''.join(missing)}")
    PAGE.write_text("\n".join([_HEAD, *found]))


def _sections(page: str) -> dict[str, str]:
    """Of the parts that the page shows, by their names."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    named = ((_SECTION.match(part), part) for part in parts)
    return {match[1]: part.rstrip() + "\n" for match, part in named if match}


def _draw(image: Path, module: ModuleType, part: Mapping[str, Any]) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(module.TITLE)
    module.plot(part, axes)
    figure.savefig(image, dpi=100, metadata={"Software": None})
