"""`python -m tests.chaos`: inject faults by a schedule; none may cause damage.

Parts: `replicas` (no engine, more than a thousand faults) and `engines` (vLLM under xinference).
Writes `build/chaos-report.json` for the parts that ran; the exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.report import FULL, Report, to_json
from xinference_xavier.options import DEFAULT_FETCH_TIMEOUT

FULL_SECONDS = {"replicas": 540.0, "engines": 540.0}
REPORT = Path("build/chaos-report.json")
MAX_ATTEMPTS = 6
"""At most this many runs search for a shorter prefix that fails."""


def _say(line: str) -> None:
    print(line, flush=True)


def _run_engines(seed: int, seconds: float) -> Report:
    from tests.chaos import engines  # imports xinference

    report = Report("engines", seed, DEFAULT_FETCH_TIMEOUT)
    engines.run(seed, seconds, report)
    return report


def _run_replicas(seed: int, seconds: float, steps: int | None) -> Report:
    from tests.chaos import replicas  # imports vLLM

    report = replicas.make_report(seed)
    carried_out = replicas.run(seed, seconds, report, steps=steps, say=_say)
    if report.failures():
        for failure in report.failures():
            _say(f"FAILED  {failure}")
        shortest = shortest_failing(carried_out, lambda prefix: _fails(seed, prefix))
        _say(f"seed {seed}: the shortest prefix seen to fail has {shortest} steps of the schedule")
        _say(f"to run only that prefix: make chaos PART=replicas SEED={seed} STEPS={shortest}")
    return report


def _fails(seed: int, steps: int) -> bool:
    from tests.chaos import replicas

    _say(f"looking for a shorter failure: the first {steps} steps")
    report = replicas.make_report(seed)
    replicas.run(seed, FULL_SECONDS["replicas"], report, steps=steps, say=_say)
    return bool(report.failures())


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
    parser.add_argument("--steps", type=int, help="at most this many steps, part replicas only")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    parts = [arguments.part] if arguments.part else ["replicas", "engines"]
    _say(f"seed {arguments.seed}, parts: {', '.join(parts)}")
    reports = []
    for part in parts:
        seconds = arguments.seconds or FULL_SECONDS[part]
        if part == "replicas":
            reports.append(_run_replicas(arguments.seed, seconds, arguments.steps))
        else:
            reports.append(_run_engines(arguments.seed, seconds))
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(to_json(reports))
    _say(REPORT.read_text())
    return _verdict(reports, is_full=arguments.seconds is None and arguments.steps is None)


def _verdict(reports: list[Report], is_full: bool) -> int:
    wrong = [failure for report in reports for failure in report.failures()]
    if is_full:
        wrong += [missed for report in reports for missed in report.missed_bars()]
    for report in reports:
        for kind, count in sorted(report.unobserved.items()):
            _say(f"{report.part}: {count} of {kind!r} had no observed effect")
    for failure in wrong:
        _say(f"FAILED  {failure}")
    _say(f"seed {reports[0].seed}: {'failed' if wrong else 'passed'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
