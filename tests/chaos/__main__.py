"""`python -m tests.chaos`: inject faults by a schedule; none may cause damage.

Writes `build/chaos-report.json`; the exit status is 1 if anything is wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.near import AUTO
from tests.chaos.run import run
from tests.faults import ORDERED

SECONDS = 540.0
"""The duration of a full run."""
REPORT = Path("build/chaos-report.json")
MAX_ATTEMPTS = 6
"""At most this many runs search for a shorter prefix that fails."""


def _say(line: str) -> None:
    print(line, flush=True)


def _look_for_shorter_failure(seed: int, steps: int, transport: str) -> None:
    """Replicas start at once, so it does not take long."""

    def fails(prefix: int) -> bool:
        _say(f"looking for a shorter failure: the first {prefix} steps")
        found = run(seed, SECONDS, steps=prefix, transport=transport, say=_say)
        return bool(found.failures())

    shortest = shortest_failing(steps, fails)
    _say(f"seed {seed}: the shortest prefix seen to fail has {shortest} steps of the schedule")
    again = f"make chaos SEED={seed} STEPS={shortest} TRANSPORT={transport}"
    _say(f"to run only that prefix: {again}")


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
    parser.add_argument("--seconds", type=float, help="duration, instead of a full run")
    parser.add_argument("--steps", type=int, help="at most this many steps of the schedule")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--transport", choices=[AUTO, *sorted(ORDERED)], default=AUTO)
    arguments = parser.parse_args()
    seed, steps, transport = arguments.seed, arguments.steps, arguments.transport
    _say(f"seed {seed}")
    report = run(seed, arguments.seconds or SECONDS, steps=steps, transport=transport, say=_say)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(report.to_json())
    _say(REPORT.read_text())
    for kind, count in sorted(report.unobserved.items()):
        _say(f"{count} of {kind!r} had no observed effect")
    failures = report.failures()
    if arguments.seconds is None and steps is None:
        failures += report.missed_bars()
    for failure in failures:
        _say(f"FAILED  {failure}")
    if report.failures():
        _look_for_shorter_failure(seed, report.steps, transport)
    _say(f"seed {seed}: {'failed' if failures else 'passed'}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
