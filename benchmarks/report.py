"""The report `build/bench-report.json`: for each part its samples, its date and its machine.

A part that is measured again replaces its old results; the others stay.
"""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from benchmarks import bars
from xinference_xavier.runtime.host import process_info

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "build" / "bench-report.json"
QUICK = ROOT / "build" / "bench-quick.json"


def load(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {"parts": {}}
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def add(
    report: dict[str, Any], name: str, part: dict[str, Any], seconds: float, file: Path
) -> None:
    """Add a part to the report and write the report to its file."""
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
        "vllm": process_info()["versions"]["vllm"],
        "load": os.getloadavg()[0],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
