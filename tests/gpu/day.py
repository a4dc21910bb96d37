"""`python -m tests.gpu.day FOLDER [SECONDS]`: all that needs a card, the most telling first.

Each step is a program with a time limit of its own. What it said and what it measured are in FOLDER
as soon as it has ended, so that a day that is cut off has still told something.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import REPORT
from examples.processes import end, start

SECONDS = 560.0
"""What a call of ten minutes leaves for the steps."""
_PATIENCE = 10.0  # seconds in which a step that is out of time may end its engines
_TAIL = 2000  # characters of what a step said

_PYTEST = (
    *("-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "--confcutdir", "tests/gpu"),
    *("--import-mode", "importlib", "-p", "no:cacheprovider", "-W", "ignore", "-ra", "-x"),
)
_SHARING, _REGION = "tests/gpu/test_sharing.py", "tests/gpu/test_device_region.py"
_SECOND_RUNNER = "(asynchronous and graphs and V2)"


class Step(NamedTuple):
    name: str
    seconds: float
    """At most."""
    words: Sequence[str]
    """Arguments of Python."""


STEPS = (
    Step("one remote hit", 110, (*_PYTEST, _SHARING, "-k", "eager and V1 and every_kind")),
    Step("copies and mappings", 70, ("-m", "benchmarks.gpu", "copies", "mappings")),
    Step("graphs, asynchronous, V2", 130, (*_PYTEST, _SHARING, "-k", _SECOND_RUNNER)),
    Step("7B: hits", 190, ("-m", "benchmarks.gpu", "hits", "--brief")),
    Step("rows of a pool", 60, (*_PYTEST, _REGION)),
    Step("7B: no hits", 120, ("-m", "benchmarks.gpu", "no_hits", "--brief")),
    Step("the other modes", 300, (*_PYTEST, _SHARING, "-k", f"not {_SECOND_RUNNER}")),
)


def run(steps: Sequence[Step], folder: Path, seconds: float) -> bool:
    """Run the steps one after the other. True if all succeeded."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    good = True
    for step in steps:
        left = deadline - time.monotonic() - _PATIENCE
        done = _done(step, folder, left) if left > 0 else {"step": step.name, "status": "no time"}
        good &= done["status"] == 0
        with (folder / "day.jsonl").open("a") as report:
            report.write(json.dumps(done) + "\n")
        if REPORT.exists():
            shutil.copy(REPORT, folder)
        print(f"[{step.name}] {done['status']} {done.get('seconds', '')}", flush=True)
    return good


def _done(step: Step, folder: Path, left: float) -> dict[str, Any]:
    log = folder / f"{step.name.replace(' ', '-').replace(':', '')}.log"
    began = time.monotonic()
    process = start([sys.executable, *step.words], log, start_new_session=True)
    try:
        status: int | str = process.wait(min(step.seconds, left))
    except subprocess.TimeoutExpired:
        status = "out of time"
    finally:
        _end(process)
    return {
        "step": step.name,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "said": log.read_text(errors="replace")[-_TAIL:],
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the step and the engines that it has started, which hold memory of the card."""
    end(process, _PATIENCE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    limit = float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    sys.exit(0 if run(STEPS, Path(sys.argv[1]), limit) else 1)
