"""Rows over Gloo, for any two hosts: each link is a process group of two.

Gloo's failures shape this module (probed with torch 2.13):

- A wait that times out closes the pair. After that, no late message arrives.
- `abort()` does not stop a late message.
- A message longer than the posted receive aborts the receiving process. So this runs in a process
  of its own.
- If a peer connects for a group that we have abandoned, its socket stays open as long as the
  device.

The rendezvous needs no port: the keys that Gloo sets in each side's store travel in the link's
hello and answer. All groups of a device share one listening port.

Gloo cannot be told which port to use: the kernel chooses among its ephemeral ports.
"""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Literal, Protocol, cast

import torch
from pydantic import ConfigDict, TypeAdapter
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store, Work

from xinference_xavier.errors import LinkError, LinkTimeoutError, TransportError
from xinference_xavier.pool.region import Region
from xinference_xavier.runtime.aio import remaining
from xinference_xavier.transfer.transports.base import Check, Link, Transport

MAX_WITHDRAWN = 8
"""Abandoned links, each of which may have left a socket, before a new device replaces the old one,
which ends with the last of its links."""
_CONSUMER, _DONOR = 0, 1
_MEETING_TAG, _CLOSE_TAG = 0, 1
_IN_FLIGHT_BYTES = 64 << 20  # above the bandwidth-delay product of any LAN
_MIN_IN_FLIGHT = 4
_Operation = Literal["recv", "send"]
_PART = TypeAdapter(dict[str, bytes], config=ConfigDict(ser_json_bytes="hex", val_json_bytes="hex"))
"""The JSON form of the keys that Gloo sets in one side's store."""


class _Group(Protocol):
    """The methods of a ProcessGroupGloo that torch's stubs lack."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...


class _ExchangedStore(Store):
    """A rendezvous store of two sides; the caller sends each side's part to the other."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self._timeout = timeout
        self._own: dict[str, bytes] = {}
        self._peers: dict[str, bytes] = {}
        self._withdrawn = False
        self._changed = threading.Condition()

    def withdraw(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._withdrawn = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # Gloo sets bytes
        with self._changed:
            self._own[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._own[key] if key in self._own else self._peers[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._own or key in self._peers for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._withdrawn or self.check(keys), seconds)
            if self._withdrawn:
                raise LinkError("the link was withdrawn")
            if not self.check(keys):
                raise LinkTimeoutError("the peer's part of the rendezvous did not arrive in time")

    def own_part(self) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._own), self._timeout):
                raise LinkTimeoutError("Gloo did not start its rendezvous in time")
            return _PART.dump_json(self._own)

    def set_peer_part(self, part: bytes) -> None:
        fields = _PART.validate_json(part)
        with self._changed:
            self._peers.update(fields)
            self._changed.notify_all()


class _HalfLink:
    """A group that a thread builds; an `Offer` or an `Acceptance`."""

    def __init__(
        self,
        transport: "GlooTransport",
        rank: int,
        deadline: float,
        peer_part: bytes | None = None,
    ) -> None:
        """The donor has the consumer's part."""
        self._transport = transport
        self._rank = rank
        seconds = remaining(deadline)
        self._store = _ExchangedStore(seconds)
        if peer_part is not None:
            self._store.set_peer_part(peer_part)
        self._link: GlooLink | None = None
        # Gloo cannot be cancelled once both parts are here: then it connects or times out.
        thread = ThreadPoolExecutor(1, "xavier-link")
        self._group: Future[_Group] | None = thread.submit(
            transport.build_group, self._store, rank, seconds
        )
        thread.shutdown(wait=False)

    @property
    def hello(self) -> bytes:
        return self._store.own_part()

    answer = hello

    def set_peer_part(self, part: bytes) -> None:
        self._store.set_peer_part(part)

    def finish(self, deadline: float) -> "GlooLink":
        building, self._group = self._group, None
        if building is None:
            raise LinkError("the link was withdrawn")
        try:
            self._link = GlooLink(
                building.result(remaining(deadline)), self._rank, self._transport.region
            )
        except (RuntimeError, ValueError, MemoryError, TimeoutError) as error:  # Gloo's errors
            if _is_past(deadline):
                raise LinkTimeoutError("no connection was made in time") from None
            raise LinkError(f"no connection: {error}") from None
        finally:
            del building
        self._link.meet(deadline)
        return self._link

    def withdraw(self) -> None:
        self._group = None
        self._store.withdraw()
        self._transport.record_withdrawn()
        if self._link is not None:
            self._link.close()


class _Offer(_HalfLink):
    def complete(self, answer: bytes, deadline: float) -> "GlooLink":
        self.set_peer_part(answer)
        return self.finish(deadline)


class _Acceptance(_HalfLink):
    def complete(self, deadline: float) -> "GlooLink":
        return self.finish(deadline)


class GlooTransport(Transport):
    name = "gloo"

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        """Ignores `port_range`."""
        self.region = region
        self._host = host
        self._device = _listen(host)
        self._withdrawn = 0
        self._replacing = threading.Lock()

    def offer(self, deadline: float) -> _Offer:
        return _Offer(self, _CONSUMER, deadline)

    def accept(self, hello: bytes, deadline: float) -> _Acceptance:
        return _Acceptance(self, _DONOR, deadline, hello)

    def build_group(self, store: Store, rank: int, seconds: float) -> _Group:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
        options._devices = [self._current_device()]
        options._timeout = timedelta(seconds=seconds)
        return cast(_Group, ProcessGroupGloo(store, rank, 2, options))

    def record_withdrawn(self) -> None:
        with self._replacing:
            self._withdrawn += 1

    def _current_device(self) -> ProcessGroupGloo.Device:
        with self._replacing:
            if self._withdrawn >= MAX_WITHDRAWN:
                self._withdrawn = 0
                self._device = _listen(self._host)
            return self._device


def _listen(host: str) -> ProcessGroupGloo.Device:
    try:
        return ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise TransportError(f"Gloo cannot listen on host {host!r}: {error}") from None


class GlooLink(Link):
    """Holds the only reference to `group`. A local variable would keep the group, and its two
    threads, alive with the frames of an exception until the next garbage collection."""

    def __init__(self, group: _Group, rank: int, region: Region) -> None:
        self._group: _Group | None = group
        self._peer = 1 - rank
        self._rank = rank
        self._tags = itertools.count(_CLOSE_TAG + 1)  # one for each row
        # Views of the region: Gloo reads and writes the rows in place.
        self._rows = torch.from_numpy(region.array)
        self._in_flight = max(_MIN_IN_FLIGHT, _IN_FLIGHT_BYTES // region.row_bytes)
        self._closing = threading.Lock()

    def meet(self, deadline: float) -> None:
        """The donor waits for its consumer: the side that connects has a group before the other
        accepts, if it ever does."""
        operation: _Operation = "send" if self._rank == _CONSUMER else "recv"
        self._wait(self._post(operation, torch.zeros(1, dtype=torch.uint8), _MEETING_TAG), deadline)

    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        for slot in self._move("recv", slots, deadline):
            check(slot)
            yield slot

    def send(self, slots: Sequence[int], deadline: float) -> None:
        for _ in self._move("send", slots, deadline):
            pass

    def _move(self, operation: _Operation, slots: Sequence[int], deadline: float) -> Iterator[int]:
        posted: list[Work] = []
        for position, slot in enumerate(slots):
            while len(posted) < min(len(slots), position + self._in_flight):
                row = self._rows[slots[len(posted)]]
                posted.append(self._post(operation, row, next(self._tags)))
            self._wait(posted[position], deadline)
            yield slot

    def close(self) -> None:
        with self._closing:
            if self._group is None:
                return
            with suppress(RuntimeError):  # only a wait that times out makes Gloo close a pair
                never_sent = torch.empty(1, dtype=torch.uint8)
                receiving = self._group.recv([never_sent], self._peer, _CLOSE_TAG)
                receiving.wait(timedelta(milliseconds=1))
            self._group = None

    @property
    def _open(self) -> _Group:
        group = self._group
        if group is None:
            raise LinkError("the link is closed")
        return group

    def _post(self, operation: _Operation, memory: torch.Tensor, tag: int) -> Work:
        try:
            work: Work = getattr(self._open, operation)([memory], self._peer, tag)
        except RuntimeError as error:
            raise LinkError(f"Gloo failed: {error}") from None
        return work

    def _wait(self, work: Work, deadline: float) -> None:
        try:
            work.wait(timedelta(seconds=remaining(deadline)))
        except RuntimeError as error:
            if _is_past(deadline):
                raise LinkTimeoutError("not all rows were moved in time") from None
            raise LinkError(f"Gloo failed: {error}") from None


def _is_past(deadline: float) -> bool:
    """True if Gloo timed out: its errors have no type, and it waits for whole milliseconds."""
    return time.monotonic() > deadline - 0.001
