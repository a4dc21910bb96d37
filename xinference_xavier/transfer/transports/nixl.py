"""Rows over NIXL, by RDMA: the consumer reads them from the donor's memory.

Each process has one NIXL agent, which registers the region once; the memory's keys travel in the
donor's answer. The donor's processor takes no part in a read. Its `send` only waits for the
consumer's word that the batch is over.

NIXL's failures shape this module (probed with nixl 1.5.1, over TCP):

- Neither releasing a read nor removing its agent stops it: late bytes still arrive. So a link
  ends only when its reads have, and an engine kills a transfer process that takes too long.
- A read from a process that ended fails at once.
- Removing an agent leaks two sockets. So an agent is only removed after a read of it has failed.
- NIXL's own progress thread spins. Here, whoever waits makes progress.
- Over TCP, which UCX emulates reads on, a donor crashes if the consumer ends during a read, and
  whoever reaches UCX's port can read and write the process's memory. So `auto` never uses TCP.

A read is not refused if its grant has expired on the way: the row may have been replaced by then,
and its checksum tells.

xoscar's own NIXL channel is not used: there the owner of the rows writes them, for a copy between
two actors, with an agent for each connection, which registers the memory anew for each copy.
"""

import importlib.util
import logging
import os
import resource
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from pydantic import ConfigDict, TypeAdapter

from xinference_xavier.errors import LinkError, LinkTimeoutError, TransportError
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import check_slots
from xinference_xavier.transfer.transports.base import Check, Link, Transport

logger = logging.getLogger(__name__)

_DEVICES = Path("/sys/class/infiniband")
_PACKAGE = "nixl"
_TAG_BYTES = 16
_COUNT_BYTES = 8
_POLL_SECONDS = 0.0005
_IDLE_POLL_SECONDS = 0.005
_SCRATCH_BYTES = 64
_READ_BYTES = 4 << 20
"""Bytes of a read, so that its rows can be checked while others arrive."""
_IN_FLIGHT_BYTES = 64 << 20  # above the bandwidth-delay product of any LAN
_CLOSED = "the link was closed"


class _Memory(NamedTuple):
    """The donor's answer: where its rows are, and how to read them."""

    agent: str
    metadata: bytes  # of the agent, with the keys of its memory
    base: int  # the address of row 0
    rows: int
    tag: bytes  # of the link


_ANSWER = TypeAdapter(_Memory, config=ConfigDict(ser_json_bytes="hex", val_json_bytes="hex"))


def _has_active_port() -> bool:
    """True if this host has an RDMA device with a port that is up."""
    try:
        return any("ACTIVE" in state.read_text() for state in _DEVICES.glob("*/ports/*/state"))
    except OSError:  # the device is being reset or unplugged
        return False


@contextmanager
def _nixl_errors() -> Iterator[None]:
    """Turns NIXL's errors, which have no common type, into a LinkError."""
    try:
        yield
    except Exception as error:
        raise LinkError(f"NIXL failed: {error}") from None


class _Agent:
    """The agent of this process, the agents that it reads from, and what consumers told it.

    Threading: any. Whoever waits polls, because only that makes progress.
    """

    def __init__(self, region: Region, ucx: str) -> None:
        """Raises TransportError."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise TransportError(
                f"xavier_transport=nixl needs a package that is missing ({error}); "
                "pip install 'xinference-xavier[rdma]' on every worker"
            ) from None
        self.name = os.urandom(16).hex()
        self._rows = region.array  # mapped as long as it is registered
        self.base = self._rows.ctypes.data
        # The first read of a link goes here.
        self.scratch = np.zeros(_SCRATCH_BYTES, np.uint8)
        both = ((self.base, region.size), (self.scratch.ctypes.data, _SCRATCH_BYTES))
        memory = [(address, size, 0, "") for address, size in both]
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict)
        try:
            self.nixl = nixl_agent(self.name, config)
            self.nixl.create_backend("UCX", {"engine_config": ucx})
            self.nixl.register_memory(memory, "DRAM")
            self.metadata = bytes(self.nixl.get_agent_metadata())
        except Exception as error:
            raise TransportError(f"NIXL cannot register the pool ({ucx}): {error}") from None
        self._lock = threading.Lock()
        self._users: dict[str, int] = {}  # links, by the agent that they read from
        self._broken: set[str] = set()
        self._heard: dict[bytes, int] = {}  # batches that are over, by link
        if not _has_active_port():
            arguments = (weakref.ref(self),)
            threading.Thread(target=_serve_reads, args=arguments, name="xavier-nixl").start()

    def join(self, peer: str, metadata: bytes) -> None:
        """Begin to use the agent `peer`. Raises LinkError."""
        with self._lock:
            if peer not in self._users:
                with _nixl_errors():
                    self.nixl.add_remote_agent(metadata)
            self._users[peer] = self._users.get(peer, 0) + 1

    def leave(self, peer: str, broken: bool) -> None:
        """Use it for one link less; none of that link's reads is under way."""
        with self._lock:
            self._users[peer] -= 1
            if broken:
                self._broken.add(peer)
            if not self._users[peer] and peer in self._broken:
                self._broken.discard(peer)
                del self._users[peer]
                try:
                    self.nixl.remove_remote_agent(peer)
                except Exception as error:
                    logger.warning("cannot remove a NIXL agent: error=%r", error)

    def read(
        self, peer: str, ours: Sequence[int], theirs: Sequence[int], size: int, word: bytes = b""
    ) -> object:
        """Begin to read `size` bytes from each of the peer's addresses into ours. The peer hears
        `word` at the end. Raises LinkError."""
        with _nixl_errors():
            here, there = (
                self.nixl.get_xfer_descs([(address, size, 0) for address in addresses], "DRAM")
                for addresses in (ours, theirs)
            )
            handle: object = self.nixl.initialize_xfer("READ", here, there, peer, word)
            self.nixl.transfer(handle)
            return handle

    def is_reading(self, handle: object) -> bool:
        """True while the read goes on. Raises LinkError if it failed; then it writes nothing
        more."""
        with _nixl_errors():
            state = self.nixl.check_xfer_state(handle)
        if state == "ERR":
            raise LinkError("NIXL failed")
        return bool(state == "PROC")

    def tell(self, peer: str, word: bytes) -> None:
        """Send a word to a peer. Raises LinkError."""
        with _nixl_errors():
            self.nixl.send_notif(peer, word)

    def listen(self, tag: bytes) -> None:
        """Keep what is heard about a link."""
        self._heard[tag] = -1

    def forget(self, tag: bytes) -> None:
        self._heard.pop(tag, None)

    def await_word(self, tag: bytes, count: int, deadline: float) -> None:
        """Return once the link's consumer has said that batch `count` is over. Raises LinkError."""
        while True:
            self.progress()
            heard = self._heard.get(tag)
            if heard is None:
                raise LinkError(_CLOSED)
            if heard >= count:
                return
            if time.monotonic() > deadline:
                raise LinkTimeoutError("the consumer did not read all rows in time")
            time.sleep(_POLL_SECONDS)

    def progress(self) -> None:
        """Take what has arrived. Raises LinkError."""
        with self._lock:
            with _nixl_errors():
                arrived = self.nixl.get_new_notifs()
            for words in arrived.values():
                for word in words:
                    tag, count = word[:_TAG_BYTES], int.from_bytes(word[_TAG_BYTES:], "big")
                    if tag in self._heard:
                        self._heard[tag] = max(count, self._heard[tag])


def _serve_reads(agent: "weakref.ref[_Agent]") -> None:
    """Over TCP, a donor's reads are software that somebody must run, even if the donor refuses."""
    while threading.main_thread().is_alive() and (here := agent()) is not None:
        with suppress(LinkError):  # it also meets whoever waits for a word
            here.progress()
        del here
        time.sleep(_IDLE_POLL_SECONDS)


def _word(tag: bytes, count: int) -> bytes:
    """The word that a link's batch `count` is over; batch 0 makes the link."""
    return tag + count.to_bytes(_COUNT_BYTES, "big")


class NixlTransport(Transport):
    name = "nixl"

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        """Without an active RDMA port, it goes over TCP and listens as told."""
        self._region = region
        self._agent = _Agent(region, _ucx(host, port_range, region.size))

    @classmethod
    def unfit(cls) -> str | None:
        if importlib.util.find_spec(_PACKAGE) is None:
            return f"package missing: {_PACKAGE}"
        return None if _has_active_port() else "no active RDMA port"

    def offer(self, deadline: float) -> "_Offer":
        return _Offer(self._region, self._agent)

    def accept(self, hello: bytes, deadline: float) -> "_Acceptance":
        return _Acceptance(self._region, self._agent)


def _ucx(host: str, port_range: tuple[int, int] | None, size: int) -> str:
    """UCX's settings, except for those that the environment has. Raises TransportError if this
    process may not register `size` bytes."""
    if _has_active_port():
        may_lock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if resource.RLIM_INFINITY != may_lock < size:
            raise TransportError(
                f"RDMA locks the pool of {size} bytes in memory, but the limit is {may_lock}; "
                "start the workers with ulimit -l unlimited"
            )
        settings = {"TLS": "ib"}
    else:
        logger.warning(
            "no active RDMA port: NIXL uses TCP, where every host that reaches its port can read "
            "and write the memory of this process; use it only for tests"
        )
        settings = {"TLS": "tcp"}
        interfaces = psutil.net_if_addrs().items()
        named = [name for name, has in interfaces if host in {each.address for each in has}]
        if named:
            settings["NET_DEVICES"] = named[0]
        if port_range is not None:
            settings["TCP_PORT_RANGE"] = "{}-{}".format(*port_range)
    own = {name: value for name, value in settings.items() if f"UCX_{name}" not in os.environ}
    return ",".join(f"{name}={value}" for name, value in own.items())


class _Offer:
    """Reads from the memory that the donor's answer names."""

    hello = b""

    def __init__(self, region: Region, agent: _Agent) -> None:
        self._region = region
        self._agent = agent
        self._link: ConsumerLink | None = None
        self._withdrawn = False

    def complete(self, answer: bytes, deadline: float) -> "ConsumerLink":
        memory = _ANSWER.validate_json(answer)
        # Set before `_withdrawn` is read, as `withdraw` does it the other way round.
        link = self._link = ConsumerLink(self._region, self._agent, memory)
        try:
            if self._withdrawn:
                raise LinkError("the link was withdrawn")
            link.prove(deadline)
        except LinkError:
            link.close()
            raise
        return link

    def withdraw(self) -> None:
        self._withdrawn = True
        if self._link is not None:
            self._link.close()


class _Acceptance:
    """Waits for the consumer's first read."""

    def __init__(self, region: Region, agent: _Agent) -> None:
        self._agent = agent
        self._tag = os.urandom(_TAG_BYTES)
        memory = _Memory(agent.name, agent.metadata, agent.base, region.rows, self._tag)
        self.answer = _ANSWER.dump_json(memory)
        agent.listen(self._tag)

    def complete(self, deadline: float) -> "DonorLink":
        self._agent.await_word(self._tag, 0, deadline)
        return DonorLink(self._agent, self._tag)

    def withdraw(self) -> None:
        self._agent.forget(self._tag)


class _Read(NamedTuple):
    slots: list[int]
    handle: object


class ConsumerLink(Link):
    def __init__(self, region: Region, agent: _Agent, memory: _Memory) -> None:
        """Raises LinkError."""
        agent.join(memory.agent, memory.metadata)
        self._region = region
        self._agent = agent
        self._memory = memory
        self._batches = 0
        self._reads: deque[_Read] = deque()  # in the order in which they began
        self._failed = False
        self._closed = False
        self._beginning = threading.Lock()

    def prove(self, deadline: float) -> None:
        """Read a little, not into a row, so that both sides know that it works. Raises
        LinkError."""
        here, there = self._agent.scratch.ctypes.data, self._memory.base
        size = min(_SCRATCH_BYTES, self._region.row_bytes)
        word = _word(self._memory.tag, 0)
        with self._noting_failure():
            self._await(self._agent.read(self._memory.agent, [here], [there], size, word), deadline)

    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        check_slots(granted, self._memory.rows)
        rows = [*zip(slots, granted, strict=True)]
        step = max(1, _READ_BYTES // self._region.row_bytes)
        parts = deque(rows[first : first + step] for first in range(0, len(rows), step))
        most = max(1, _IN_FLIGHT_BYTES // (step * self._region.row_bytes))
        try:
            while parts or self._reads:
                while parts and len(self._reads) < most:
                    self._begin(parts.popleft(), deadline)
                for slot in self._finish_first(deadline):
                    check(slot)
                    yield slot
        finally:
            self._settle()
            self._reads.clear()
        self._batches += 1
        self._agent.tell(self._memory.agent, _word(self._memory.tag, self._batches))

    def _begin(self, rows: Sequence[tuple[int, int]], deadline: float) -> None:
        size = self._region.row_bytes
        ours = [self._agent.base + slot * size for slot, _ in rows]
        theirs = [self._memory.base + source * size for _, source in rows]
        if time.monotonic() > deadline:
            raise LinkTimeoutError("not all rows were moved in time")
        with self._beginning:
            if self._closed:
                raise LinkError(_CLOSED)
            with self._noting_failure():
                handle = self._agent.read(self._memory.agent, ours, theirs, size)
            self._reads.append(_Read([slot for slot, _ in rows], handle))

    def _finish_first(self, deadline: float) -> list[int]:
        """The slots of the oldest read, once their rows are here."""
        self._await(self._reads[0].handle, deadline)
        return self._reads.popleft().slots

    def _await(self, handle: object, deadline: float) -> None:
        while self._is_reading(handle):
            if self._closed:
                raise LinkError(_CLOSED)
            if time.monotonic() > deadline:
                raise LinkTimeoutError("not all rows were moved in time")
            time.sleep(_POLL_SECONDS)

    def _is_reading(self, handle: object) -> bool:
        with self._noting_failure():
            return self._agent.is_reading(handle)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """The next link to the donor needs a new connection."""
        try:
            yield
        except LinkError:
            self._failed = True
            raise

    def _settle(self) -> None:
        """Return once nothing writes to our region any more."""
        for read in tuple(self._reads):
            with suppress(LinkError):  # it has ended
                while self._is_reading(read.handle):
                    time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        with self._beginning:
            closed, self._closed = self._closed, True
        if not closed:
            self._settle()
            self._agent.leave(self._memory.agent, self._failed)


class DonorLink(Link):
    def __init__(self, agent: _Agent, tag: bytes) -> None:
        self._agent = agent
        self._tag = tag
        self._batches = 0

    def send(self, slots: Sequence[int], deadline: float) -> None:
        """Wait while the consumer reads the rows."""
        self._batches += 1
        self._agent.await_word(self._tag, self._batches, deadline)

    def close(self) -> None:
        self._agent.forget(self._tag)
