"""`python -m benchmarks [PART …]`: measures all parts, or those, and writes the report."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from types import ModuleType

from benchmarks import report

PARTS = ("transport", "scheduler", "tracker", "capacity")


def _module(name: str) -> ModuleType:
    """Of a part. Not before it is needed: the processes that others start come by here, too."""
    return import_module(f"benchmarks.{name}")


def main(names: list[str]) -> None:
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    found = report.load()
    for name in names or PARTS:
        print(f"[{name}] …", flush=True)
        began = time.monotonic()
        part = _module(name).measure()
        report.add(found, name, part, time.monotonic() - began)
        report.write_page(found, {part: _module(part) for part in PARTS if part in found["parts"]})
        print(_module(name).markdown(part), flush=True)
    print(f"{report.REPORT.relative_to(report.ROOT)} and {report.PAGE.relative_to(report.ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
