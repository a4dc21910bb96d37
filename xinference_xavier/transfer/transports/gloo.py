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

Gloo cannot be told which port to use: the kernel chooses among the ephemeral ports, the lower half
first, and in each half odd ports first (`inet_csk_find_open_port`, for sockets with SO_REUSEADDR).
So for some milliseconds we bind the ports outside the range that the kernel would prefer.
"""

import errno
import itertools
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Literal, Protocol, cast

import psutil
import torch
from pydantic import ConfigDict, TypeAdapter
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store, Work

from xinference_xavier.errors import LinkError, LinkTimeoutError, TransportError
from xinference_xavier.pool.region import Region
from xinference_xavier.runtime.aio import remaining
from xinference_xavier.runtime.net import check_range
from xinference_xavier.transfer.transports.base import Check, Link, Transport

logger = logging.getLogger(__name__)


@contextmanager
def only_free_ports(host: str, low: int, high: int) -> Iterator[None]:
    """Within this context, the kernel chooses a port between `low` and `high` on `host`.

    Another process may free a port outside at that moment, so check the port and try again.
    Raises TransportError if the kernel would choose none of them.
    """
    first, last = check_range(low, high)
    with _raised_file_limit(), ExitStack() as bound:
        try:
            found = any(
                _bind_all_except(host, ports, range(low, high + 1), bound)
                for ports in _in_kernel_order(first, last)
            )
        except OSError as error:
            raise TransportError(
                f"xavier_port_range={low}-{high} cannot be used for Gloo on host {host!r} "
                f"({error}); raise the limit of open files, or choose a range close to {first}"
            ) from None
        if not found:
            raise TransportError(
                f"xavier_port_range={low}-{high} has no free port for Gloo; choose another one"
            )
        yield


@contextmanager
def _raised_file_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _in_kernel_order(first: int, last: int) -> list[range]:
    half = first + (last + 1 - first) // 4 * 2
    return [
        range(start + parity, stop, 2)
        for start, stop in ((first, half), (half, last + 1))
        for parity in (1, 0)
    ]


def _bind_all_except(host: str, ports: range, wanted: range, bound: ExitStack) -> bool:
    """Bind those of `ports` that are not wanted. Returns whether a wanted one is free."""
    found = False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        with ExitStack() as brief:
            holder = bound if port not in wanted else brief
            blocker = holder.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                blocker.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                blocker.close()
            else:
                found = found or port in wanted
    return found


MAX_WITHDRAWN = 8
"""Abandoned links, each of which may have left a socket, before a new device replaces the old one,
which ends with the last of its links."""
_CONSUMER, _DONOR = 0, 1
_MEETING_TAG, _CLOSE_TAG = 0, 1
_IN_FLIGHT_BYTES = 64 << 20  # above the bandwidth-delay product of any LAN
_MIN_IN_FLIGHT = 4
_PORT_ATTEMPTS = 10
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
        self.region = region
        self._where = host, port_range
        self._device = _listen(host, port_range)
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
                try:
                    self._device = _listen(*self._where)
                except TransportError as error:  # no free port; a few sockets may leak
                    logger.warning("keeping the old Gloo device: error=%s", error)
            return self._device


def _listen(host: str, port_range: tuple[int, int] | None) -> ProcessGroupGloo.Device:
    try:
        if port_range is None:
            return ProcessGroupGloo.create_device(hostname=host)
        low, high = port_range
        misfits = []  # kept until the end, so that the kernel does not give their ports again
        with only_free_ports(host, low, high):
            for _ in range(_PORT_ATTEMPTS):
                before = _listening_ports()
                device = ProcessGroupGloo.create_device(hostname=host)
                if any(low <= port <= high for port in _listening_ports() - before):
                    return device
                misfits.append(device)
    except RuntimeError as error:
        raise TransportError(f"Gloo cannot listen on host {host!r}: {error}") from None
    raise TransportError(
        f"xavier_port_range={low}-{high}: the kernel gives Gloo other ports; choose another range"
    )


def _listening_ports() -> set[int]:
    sockets = psutil.Process().net_connections("tcp")
    return {int(s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}


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
