"""A donor's transport that misbehaves on the wire, as a broken or hostile peer can.

A replica gets it as `transport="tests.transfer.faulty_links:WrongDonor"`. The file that `SCRIPT`
names contains its next fault, which it commits once.
"""

import os
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import cast

import torch

from tests.faults import _FaultyGloo, _FaultyLink
from xinference_xavier.errors import LinkError
from xinference_xavier.transfer.transports.base import Acceptance
from xinference_xavier.transfer.transports.gloo import GlooLink

SCRIPT = "XAVIER_TEST_WRONG_DONOR"
"""The environment variable with the path of the file that names the donor's next fault."""
LATE = 0.5
"""Seconds after the deadline at which a late donor continues."""


class Wrong(StrEnum):
    REFUSED = "refuses the link"
    SHORTER = "sends a row without its end"
    LONGER = "sends a row with extra bytes"
    LATE = "sends the second half after the deadline"


def begin(wrong: Wrong) -> None:
    """Order this fault for the next batch or link."""
    Path(os.environ[SCRIPT]).write_text(wrong)


def is_done(wrong: Wrong) -> bool:
    """Whether the donor has finished this fault."""
    return Path(os.environ[SCRIPT]).read_text() == f"done: {wrong}"


class _WrongLink(_FaultyLink):
    def send(self, slots: Sequence[int], deadline: float) -> None:
        wrong = _take()
        if wrong is None:
            self.link.send(slots, deadline)
            return
        try:
            self._send_wrong(wrong, slots, deadline)
        finally:
            _done(wrong)

    def _send_wrong(self, wrong: Wrong, slots: Sequence[int], deadline: float) -> None:
        half = len(slots) // 2
        self.link.send(slots[:half], deadline)
        row = torch.from_numpy(self.region.row(slots[half]).copy())
        match wrong:
            case Wrong.SHORTER:
                self._post(row[: len(row) // 2], deadline)
            case Wrong.LONGER:
                self._post(torch.cat([row, row]), deadline)
            case Wrong.LATE:
                threading.Event().wait(max(0.0, deadline - time.monotonic()) + LATE)
                self.link.send(slots[half:], time.monotonic() + LATE)

    def _post(self, message: torch.Tensor, deadline: float) -> None:
        link = cast(GlooLink, self.link)
        link._wait(link._post("send", message, next(link._tags)), deadline)


class WrongDonor(_FaultyGloo):
    link = _WrongLink

    def accept(self, hello: bytes, deadline: float) -> Acceptance:
        if _take() is Wrong.REFUSED:
            _done(Wrong.REFUSED)
            raise LinkError("refused")
        return super().accept(hello, deadline)


def _take() -> Wrong | None:
    """Take the ordered fault, if any. Links are made and rows sent on different threads, but never
    at once."""
    script = Path(os.environ[SCRIPT])
    text = script.read_text() if script.exists() else ""
    if text not in list(Wrong):
        return None
    script.write_text(f"doing: {text}")
    return Wrong(text)


def _done(wrong: Wrong) -> None:
    Path(os.environ[SCRIPT]).write_text(f"done: {wrong}")
