"""A GPU day keeps the result of each step, whatever happens to the others. No card is needed."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.gpu.day import STEPS, Step, run

HANGS = "import time; print('begins', flush=True); time.sleep(600)"


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "day.jsonl").read_text().splitlines()]


def test_each_step_is_told_whatever_the_others_do(tmp_path: Path) -> None:
    steps = [
        Step("fails", 60.0, ("-c", "raise SystemExit('no card')")),
        Step("hangs", 2.0, ("-c", HANGS)),
        Step("works", 60.0, ("-c", "print('3 GB/s')")),
    ]
    assert not run(steps, tmp_path, 100.0)
    fails, hangs, works = told(tmp_path)
    assert (fails["status"], fails["said"]) == (1, "no card\n")
    assert hangs["status"] == "out of time"
    assert (works["status"], works["said"]) == (0, "3 GB/s\n")


def test_what_a_step_has_started_ends_with_it(tmp_path: Path) -> None:
    """Engines hold memory of the card, which the next step needs."""
    program = (
        "import pathlib, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {HANGS!r}])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
    )
    assert run([Step("leaves one", 60.0, ("-c", program))], tmp_path, 100.0)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "child").read_text())).wait(60.0)


def test_what_no_time_is_left_for_is_told_too(tmp_path: Path) -> None:
    steps = [Step("first", 60.0, ("-c", HANGS)), Step("second", 60.0, ("-c", ""))]
    assert not run(steps, tmp_path, 12.0)
    assert [step["status"] for step in told(tmp_path)] == ["out of time", "no time"]


def test_the_telling_steps_fit_into_one_call() -> None:
    """What comes after them takes what is left."""
    assert sum(step.seconds for step in STEPS[:5]) <= 560.0
