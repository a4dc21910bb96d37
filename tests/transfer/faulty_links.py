"""A donor's transport that misbehaves on the wire, as a broken or hostile peer can.

A replica gets it as `transport="tests.transfer.faulty_links:WrongDonor"`. The file that `SCRIPT`
names contains its next fault, which it commits once.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import torch

from xinference_xavier.errors import LinkError
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports.base import Acceptance, Check, Link
from xinference_xavier.transfer.transports.gloo import GlooLink, GlooTransport

SCRIPT = "XAVIER_TEST_WRONG_DONOR"
"""The environment variable with the path of the file that names the donor's next fault."""
LATE = 0.5
"""Seconds after the deadline at which a late donor continues."""


class Wrong(StrEnum):
    REFUSED = "refuses the link"
    CUT = "closes the connection half-way"
    FEWER = "claims to be done half-way"
    SHORTER = "sends a row without its end"
    LONGER = "sends a row with extra bytes"
    OTHER_ROWS = "sends the rows in another order"
    OTHER_BYTES = "sends a row with one bit changed"
    LATE = "sends the second half after the deadline"


def begin(wrong: Wrong) -> None:
    """Order this fault for the next batch or link."""
    Path(os.environ[SCRIPT]).write_text(wrong)


def is_done(wrong: Wrong) -> bool:
    """Whether the donor has finished this fault."""
    return Path(os.environ[SCRIPT]).read_text() == f"done: {wrong}"


class WrongDonor(GlooTransport):
    def accept(self, hello: bytes, secret: bytes, deadline: float) -> Acceptance:  # type: ignore[override]
        if _take() is Wrong.REFUSED:
            _done(Wrong.REFUSED)
            raise LinkError("refused")
        return _WrongAcceptance(super().accept(hello, secret, deadline), self.region)


class _WrongAcceptance:
    def __init__(self, half: Acceptance, region: Region) -> None:
        self._half = half
        self._region = region

    @property
    def answer(self) -> bytes:
        return self._half.answer

    def complete(self, deadline: float) -> Link:
        link = self._half.complete(deadline)
        assert isinstance(link, GlooLink)
        return _WrongLink(link, self._region)

    def withdraw(self) -> None:
        self._half.withdraw()


class _WrongLink(Link):
    def __init__(self, link: GlooLink, region: Region) -> None:
        self._link = link
        self._rows = torch.from_numpy(region.array)

    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        return self._link.receive(slots, granted, check, deadline)

    def close(self) -> None:
        self._link.close()

    def send(self, slots: Sequence[int], deadline: float) -> None:
        wrong = _take()
        if wrong is None:
            self._link.send(slots, deadline)
            return
        try:
            self._send_wrong(wrong, slots, deadline)
        finally:
            _done(wrong)

    def _send_wrong(self, wrong: Wrong, slots: Sequence[int], deadline: float) -> None:
        if wrong is Wrong.OTHER_ROWS:
            self._link.send(slots[::-1], deadline)
            return
        half = len(slots) // 2
        self._link.send(slots[:half], deadline)
        row = self._rows[slots[half]].clone()
        match wrong:
            case Wrong.CUT:
                self._link.close()
                raise LinkError("cut")
            case Wrong.SHORTER:
                self._post(row[: len(row) // 2], deadline)
            case Wrong.LONGER:
                self._post(torch.cat([row, row]), deadline)
            case Wrong.OTHER_BYTES:
                row[-1] ^= 1
                self._post(row, deadline)
                self._link.send(slots[half + 1 :], deadline)
            case Wrong.LATE:
                threading.Event().wait(max(0.0, deadline - time.monotonic()) + LATE)
                self._link.send(slots[half:], time.monotonic() + LATE)

    def _post(self, message: torch.Tensor, deadline: float) -> None:
        link = self._link
        link._wait(link._post("send", message, next(link._tags)), deadline)


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
