"""Gates hold up parts of an engine's work, so that events can happen in the middle of it.

A gate is a file in the engine's folder. While the file exists, the engine's copies between its KV
cache and its pool (`COPIES`) wait, or the rows that it sends to peers (`SENDS`). Nothing is lost or
changed. This module does not import vLLM, because transfer processes load it.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from tests.faults import _FaultyGloo, _StallingLink
from xinference_xavier.errors import LinkError

FOLDER = "XAVIER_TEST_GATES"
"""The environment variable with an engine's folder of gates."""
_INTERVAL = 0.005


class Gate(StrEnum):
    COPIES = "copies"
    SENDS = "sends"


@contextmanager
def closed(folder: Path, gate: Gate) -> Iterator[None]:
    (folder / gate).touch()
    try:
        yield
    finally:
        (folder / gate).unlink(missing_ok=True)


def is_closed(gate: Gate) -> bool:
    return (Path(os.environ[FOLDER]) / gate).exists()


def wait_for(gate: Gate, given_up: threading.Event) -> None:
    while is_closed(gate) and not given_up.wait(_INTERVAL):
        pass


class _GatedLink(_StallingLink):
    def send(self, slots: Sequence[int], deadline: float) -> None:
        wait_for(Gate.SENDS, self._closed)
        if self._closed.is_set():
            raise LinkError("closed while it waited")
        self.link.send(slots, deadline)


class GatedGloo(_FaultyGloo):
    """Gloo whose donors wait at their gate before they send a batch."""

    link = _GatedLink
