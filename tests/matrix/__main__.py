"""`python -m tests.matrix [NAME …]`: runs the tests with other versions of vLLM and xinference.

NAME is a version such as `vllm-0.31.0`, or `newest`: whatever the registry has. By default all
known versions are tested. Writes `build/matrix-report.json` and the table of versions in
`docs/compatibility.md`. Needs a network.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from tests.matrix import table
from tests.matrix.environments import (
    BUILD,
    ROOT,
    VERSIONS,
    Step,
    Version,
    interpreter,
    newest,
)

NEWEST = "newest"
REPORT = ROOT / "build" / "matrix-report.json"


def main(names: list[str]) -> int:
    known = {version.name.replace(" ", "-"): version for version in VERSIONS}
    unknown = sorted(set(names) - {*known, NEWEST})
    if unknown:
        sys.exit(f"unknown versions: {', '.join(unknown)}; known are {NEWEST}, {', '.join(known)}")
    versions = [known[name] for name in names if name != NEWEST] if names else [*VERSIONS]
    versions += newest() if NEWEST in names else []
    BUILD.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"versions": {}}
    if REPORT.exists():
        report |= json.loads(REPORT.read_text())
    failed, commit = 0, _commit()  # asked now: each row that is written changes the page
    for version in versions:
        result = {**tried(version), "commit": commit}
        failed += sum(step["failed"] for step in result["steps"].values())
        report["versions"][version.name] = result
        REPORT.write_text(json.dumps(report, indent=1) + "\n")
        table.write(report)
    page = table.PAGE.relative_to(ROOT)
    print(f"{REPORT.relative_to(ROOT)}, {page}: {'all passed' if not failed else f'{failed} ✗'}")
    return 1 if failed else 0


def tried(version: Version) -> dict[str, Any]:
    print(f"[{version.name}] making its environment …", flush=True)
    python = interpreter(version)
    steps = {}
    for column, step in version.steps.items():
        began = time.monotonic()
        print(f"[{version.name}] {column}: {' '.join(step.arguments)} …", flush=True)
        # xinference creates the environment for a vLLM by itself.
        own = column == "xinference" and version.name.startswith("vllm")
        steps[column] = _run(sys.executable if own else str(python), version, column, step)
        took = time.monotonic() - began
        print(
            f"[{version.name}] {column}: {table._cell(steps[column])} in {took:.0f} s", flush=True
        )
    return {"date": time.strftime("%Y-%m-%d", time.gmtime()), "steps": steps}


def _commit() -> str:
    """What was tested."""
    asked = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(asked, cwd=ROOT, check=False, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _run(python: str, version: Version, column: str, step: Step) -> dict[str, int]:
    stem = f"{version.name.replace(' ', '-')}-{column}"
    results, log = BUILD / f"{stem}.xml", BUILD / f"{stem}.log"
    results.unlink(missing_ok=True)
    environment = {**os.environ, **step.variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("wb") as output:
        subprocess.run(
            [python, "-m", "pytest", f"--junitxml={results}", *step.arguments],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return (
        _counts(ElementTree.parse(results).getroot())
        if results.exists()
        else {"passed": 0, "failed": 1}
    )


def _counts(root: ElementTree.Element) -> dict[str, int]:
    suites: list[Mapping[str, str]] = [suite.attrib for suite in root.iter("testsuite")]
    bad = sum(int(suite[kind]) for suite in suites for kind in ("failures", "errors", "skipped"))
    return {"passed": sum(int(suite["tests"]) for suite in suites) - bad, "failed": bad}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
