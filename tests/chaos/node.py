"""One replica of the chaos harness, as a process: only the engine's computing is simulated.

Processes are forked from a server that has imported vLLM, so that a new one starts at once. A node
writes its figures to a file ten times a second: the file outlives it, and readers need not wait.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.chaos.mutations import Mutation
from tests.faults import ORDERS, UNCHECKED

PRELOAD = ["tests.chaos.inside"]
"""The imports of the server that processes are forked from."""
ANSWER_TIME = 30.0
"""Seconds for a node to answer a command, unless it is stopped."""


class Settings(NamedTuple):
    """`folder` holds the orders to the node and its figures."""

    incarnation: str
    rows: int
    folder: Path
    weights: str
    seed: int
    mutation: Mutation | None
    config: dict[str, Any]


def _run(pipe: Connection, settings: Settings) -> None:
    os.environ[ORDERS] = str(settings.folder)
    if settings.mutation is Mutation.CHECKSUM:
        os.environ[UNCHECKED] = "1"
    output = os.open(settings.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    from tests.chaos.inside import Inside  # imports vLLM, which the controller does not need

    inside = Inside(settings)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, getattr(inside, method)(*args)))
        except Exception as error:
            logging.exception("command %s", method)
            pipe.send((False, repr(error)))


class Node:
    """The controller's handle. Commands are forwarded to `Inside`, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self.incarnation = settings.incarnation
        self.folder = settings.folder
        self.folder.mkdir(parents=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        self._lock = threading.Lock()
        self.process = context.Process(target=_run, args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()

    def command(self, method: str, *args: Any) -> Any:
        with self._lock:
            self._pipe.send((method, args))
            if not self._pipe.poll(ANSWER_TIME):
                raise TimeoutError(f"{self.incarnation} does not answer {method}")
            ok, answer = self._pipe.recv()
        if not ok:
            raise RuntimeError(f"{self.incarnation}, {method}: {answer}")
        return answer

    def figures(self) -> dict[str, Any]:
        """Its latest figures, or a dead node's last; empty before the first."""
        path = self.folder / "figures"
        figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return figures

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def transfer(self) -> psutil.Process | None:
        """Its transfer process, or None if it has none at the moment."""
        pid = self.figures().get("replica", {}).get("transfer_pid")
        try:
            return None if pid is None else psutil.Process(pid)
        except psutil.NoSuchProcess:
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        with self._lock:  # another thread may be waiting for an answer
            self._pipe.close()
