"""`python -m benchmarks [PART …]`: measures all parts, or those, and writes the report."""

from __future__ import annotations

import sys
import time

from benchmarks import report, transport

PARTS = {"transport": transport}


def main(names: list[str]) -> None:
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    found = report.load()
    for name in names or PARTS:
        print(f"[{name}] …", flush=True)
        began = time.monotonic()
        part = PARTS[name].measure()
        report.add(found, name, part, time.monotonic() - began)
        report.write_page(found, PARTS)
        print(PARTS[name].markdown(part), flush=True)
    print(f"{report.REPORT.relative_to(report.ROOT)} and {report.PAGE.relative_to(report.ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
