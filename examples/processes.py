"""Processes on this machine: start a program, wait for what it does, end it."""

import getpass
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil

COMPILED = os.environ.get(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
)
"""Keeps what torch compiles for 20 s at an engine's first request."""
Start = Callable[..., "subprocess.Popen[bytes]"]
"""Starts a program like `subprocess.Popen`, perhaps elsewhere."""


def start(
    words: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    append: bool = False,
    by: Start = subprocess.Popen,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a program; all that it says goes into `log`. `options` are those of `Popen`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab" if append else "wb") as output:
        return by(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            **options,
        )


def end(program: subprocess.Popen[bytes], seconds: float) -> None:
    """Ask a program to end, and kill it if it has not within `seconds`."""
    program.terminate()
    try:
        program.wait(seconds)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def until(condition: Callable[[], object], seconds: float, interval: float = 0.05) -> bool:
    """Ask every `interval` seconds; return whether `condition` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run; a zombie does not."""
    return [process for process in processes if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def answers(url: str) -> bool:
    """True if a GET of `url` succeeds at this moment."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, HTTPException):
        return False


def free_port(host: str) -> int:
    """A port on which nothing listens at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
