"""`python -m tests.chaos`: inject faults by a schedule; none may cause damage.

Parts: `replicas` (no engine, more than a thousand faults) and `engines` (vLLM under xinference).
Writes `build/chaos-report.json` for the parts that ran; the exit status is 1 if anything is wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tests.chaos.report import FULL, Report, to_json
from tests.faults import ORDERED

SECONDS = 540.0
"""The duration of a full run of one part."""
REPORT = Path("build/chaos-report.json")
MAX_ATTEMPTS = 6
"""At most this many runs search for a shorter prefix that fails."""


def _say(line: str) -> None:
    print(line, flush=True)


def _run(part: str, seed: int, seconds: float, steps: int | None, **options: str) -> Report:
    module = import_module(f"tests.chaos.{part}")  # imports vLLM or xinference
    report: Report = module.run(seed, seconds, steps=steps, say=_say, **options)
    return report


def _look_for_shorter_failure(seed: int, steps: int, options: dict[str, str]) -> None:
    """Replicas start at once, so it does not take long."""

    def fails(prefix: int) -> bool:
        _say(f"looking for a shorter failure: the first {prefix} steps")
        return bool(_run("replicas", seed, SECONDS, prefix, **options).failures())

    shortest = shortest_failing(steps, fails)
    _say(f"seed {seed}: the shortest prefix seen to fail has {shortest} steps of the schedule")
    given = "".join(f" {name.upper()}={value}" for name, value in options.items())
    _say(f"to run only that prefix: make chaos PART=replicas SEED={seed} STEPS={shortest}{given}")


def shortest_failing(steps: int, fails: Callable[[int], bool]) -> int:
    """Bisect: return the length of the shortest prefix that failed, at worst `steps` itself."""
    passed, failed = 0, steps
    for _ in range(MAX_ATTEMPTS):
        middle = (passed + failed) // 2
        if middle in (passed, failed):
            break
        if fails(middle):
            failed = middle
        else:
            passed = middle
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--part", choices=sorted(FULL), help="run one part instead of all")
    parser.add_argument("--seconds", type=float, help="duration, instead of a full run")
    parser.add_argument("--steps", type=int, help="at most this many steps of the schedule")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--transport", choices=sorted(ORDERED), default="gloo", help="of the part replicas"
    )
    arguments = parser.parse_args()
    parts = [arguments.part] if arguments.part else ["replicas", "engines"]
    _say(f"seed {arguments.seed}, parts: {', '.join(parts)}")
    reports = []
    for part in parts:
        options = {"transport": arguments.transport} if part == "replicas" else {}
        seconds = arguments.seconds or SECONDS
        report = _run(part, arguments.seed, seconds, arguments.steps, **options)
        reports.append(report)
        for failure in report.failures():
            _say(f"FAILED  {failure}")
        if report.failures() and part == "replicas":
            _look_for_shorter_failure(arguments.seed, report.steps, options)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(to_json(reports))
    _say(REPORT.read_text())
    return _verdict(reports, is_full=arguments.seconds is None and arguments.steps is None)


def _verdict(reports: list[Report], is_full: bool) -> int:
    """The failures are told already."""
    failed = any(report.failures() for report in reports)
    for report in reports:
        for missed in report.missed_bars() if is_full else ():
            _say(f"FAILED  {missed}")
            failed = True
        for kind, count in sorted(report.unobserved.items()):
            _say(f"{report.part}: {count} of {kind!r} had no observed effect")
    _say(f"seed {reports[0].seed}: {'failed' if failed else 'passed'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
