"""One replica of the chaos harness, as a process: only the engine's computing is simulated.

Processes are forked from one that has imported vLLM, so that a new one starts at once. A node
writes its figures to a file ten times a second: the file outlives it, and readers need not wait.
"""

import json
import logging
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.chaos.mutations import Mutation
from tests.faults import ORDERS, UNCHECKED
from tests.harness.processes import running
from tests.harness.remote import Remote, forked, obey

PRELOAD = "tests.chaos.inside"
"""What the process imports that all are forked from."""


def host_of(incarnation: str) -> int:
    """Replicas with odd numbers act as if they were on another host than those with even ones."""
    return int(incarnation.partition("-")[0].strip("n")) % 2


class Settings(NamedTuple):
    """`folder` holds the orders to the node and its figures. Unless it `takes_orders`, its worker
    maps no neighbours until it is told to."""

    incarnation: str
    rows: int
    folder: Path
    weights: str
    seed: int
    mutation: Mutation | None
    config: dict[str, Any]
    takes_orders: bool = True


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

    obey(pipe, Inside, settings)


class Node(Remote):
    """The controller's handle; its commands are the methods of `Inside`."""

    def __init__(self, settings: Settings) -> None:
        self.incarnation = settings.incarnation
        self.folder = settings.folder
        self.folder.mkdir(parents=True)
        super().__init__(_run, settings, name=settings.incarnation, context=forked(PRELOAD))

    def figures(self) -> dict[str, Any]:
        """Its latest figures, or a dead node's last; empty before the first."""
        path = self.folder / "figures"
        figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return figures

    def transfer(self) -> psutil.Process | None:
        """Its transfer process, or None if it has none at the moment."""
        return running(self.figures().get("replica", {}).get("transfer_pid"))
