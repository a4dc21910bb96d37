"""The peers of a replica: one record each, in one dictionary.

A `Peer` has all that is known of another replica: where it is, whether it can be fetched from, how
long that takes, and until when it is left alone after failures. Whoever drops the record has
forgotten the peer; only the mirror remembers whom it distrusts.

A set of sources is an integer that has their bits, so that an index can name the holders of a chunk
in a few bytes. The host's disk is a source like the peers, and has the first bit. Once a peer is
forgotten, its number is used again, so a set that was read before may name the wrong peer.

Threading: one thread writes, that of the tracker's client. Any other may read a record, and copy
the dictionary before it goes through it. What fetches take is learnt by the scheduler thread.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from xinference_xavier.protocol.tracker import Member, Verdict
from xinference_xavier.runtime.backoff import Outage
from xinference_xavier.runtime.linear_fit import LinearFit

DISK = "disk"
"""The source that is no peer, and how it transports."""
DISK_BIT = 1
RETRY_AFTER = 30.0
"""Seconds after the last fetch from a source for which its rate counts. They double whenever the
next fetch turns out slower than computing again."""
MAX_RETRY_AFTER = 32 * RETRY_AFTER
MAX_FAILURES = 2  # in a row, before a source is left out
MIN_PAUSE, MAX_PAUSE = 1.0, 60.0  # seconds between two trials of a source that is left out
_BLAMELESS = frozenset({"not held", "not compared", "donor gone", "reset", "stopped"})
"""Reasons for which a fetch is rolled back that say nothing about the donor."""
_PATIENCE, _MIN_PATIENCE = 4.0, 1.0  # predictions and seconds that a fetch may take
_UNKNOWN = LinearFit()


def _outage() -> Outage:
    return Outage(MIN_PAUSE, MAX_PAUSE, tolerated=MAX_FAILURES - 1)


@dataclass(eq=False)
class Source:
    """A place that rows are fetched from, and what fetches from there take.

    `outage` is on while nothing is fetched but a trial from time to time, because fetches failed.
    Times are monotonic seconds.
    """

    name: str
    bit: int
    outage: Outage = field(default_factory=_outage)
    rates: dict[str, LinearFit] = field(default_factory=dict)  # seconds over rows, by transport
    transport: str = ""  # of the latest measured fetch
    tried: float = -math.inf  # when the latest fetch began
    measured: float = -math.inf  # when the latest measured fetch began
    retry_after: float = RETRY_AFTER

    def rate(self, now: float = -math.inf) -> LinearFit:
        """Seconds over rows; empty if unknown, so that it predicts 0. Without `now`, it counts
        however old it is."""
        if now - self.tried > self.retry_after:
            return _UNKNOWN
        return self.rates.get(self.transport, _UNKNOWN)

    def patience(self, rows: int, now: float) -> float:
        """How many seconds to wait for a fetch; infinite if the rate is unknown."""
        rate = self.rate(now)
        return max(_MIN_PATIENCE, _PATIENCE * rate.predict(rows)) if rate else math.inf

    def is_due(self, now: float) -> bool:
        """True if it is left out and may be tried."""
        return self.outage.is_on and self.outage.until <= now

    def begun(self, now: float) -> None:
        """A fetch has begun."""
        self.tried = now
        self.outage.until = math.inf  # no trial before this one has ended

    def failed(self, rows: int, seconds: float, reason: str, now: float) -> None:
        """A fetch was to bring so many rows, and none of them arrived."""
        if reason in _BLAMELESS:
            self.outage.prolong(now)
            return
        if rate := self.rate():
            rate.add(rows, seconds)
        self.outage.fail(now, reason)

    def arrived(
        self, rows: int, seconds: float, transport: str, began: float, is_slow: bool
    ) -> None:
        """So many rows arrived; if it `is_slow`, computing them would have taken less."""
        if self.outage.is_on:
            self.rates.clear()
        self.outage.end()
        opened_link = transport not in self.rates and self.name != DISK
        is_stale = began - self.measured > self.retry_after
        if opened_link or not is_slow:
            self.retry_after = RETRY_AFTER
        elif is_stale and self.rate():
            self.retry_after = min(2 * self.retry_after, MAX_RETRY_AFTER)
        self.measured, self.transport = max(began, self.measured), transport
        if is_stale or transport not in self.rates:
            self.rates[transport] = LinearFit()
        if not opened_link:
            self.rate().add(rows, seconds)


@dataclass(eq=False)
class Peer(Source):
    """Another replica. `address` is that of its actor; None if the tracker does not name it, and it
    may come back: then it `serves` nothing.

    `published` is its last publication in the mirror, and `stale` are the chunks that it turned out
    not to hold, with the publication as of which it does not.
    """

    address: str | None = None
    serves: bool = False
    verdict: Verdict = Verdict.WAITING  # the tracker's, on what it computes
    epoch: str = ""  # of the index that named it last
    is_listed: bool = False  # the mirror may have chunks of it
    published: int = 0
    stale: dict[bytes, int] = field(default_factory=dict)
    actor: Any = None  # its xoscar reference; kept, because finding it costs a round trip
    linked_by: str = ""  # the transport of the latest fetch
    received: int = 0  # rows from it


class Peers(dict[str, Peer]):
    """The other members, by incarnation, and those that a new tracker does not know yet.

    `version` changes whenever a number is given or freed.
    """

    def __init__(self, own: str) -> None:
        super().__init__()
        self.own = own
        self.disk = Source(DISK, DISK_BIT)
        self.version = 0
        self.clear()

    # -- reading ------------------------------------------------------------------------------

    @property
    def members(self) -> frozenset[str]:
        return frozenset(peer.name for peer in [*self.values()] if peer.address is not None)

    @property
    def serving(self) -> frozenset[str]:
        """The peers that can be fetched from now. Others may hold chunks, too."""
        return frozenset(peer.name for peer in [*self.values()] if peer.serves)

    def address(self, name: str) -> str | None:
        """The address of a peer's actor; None if it is not a member."""
        peer = self.get(name)
        return None if peer is None else peer.address

    @property
    def size(self) -> int:
        """All numbers are below it."""
        return len(self._by_number)

    def sources(self) -> list[Source]:
        return [self.disk, *self.values()]

    def where(self, holds: Callable[[Source], bool]) -> int:
        """The set of the sources for which something holds."""
        return sum(each.bit for each in self.sources() if holds(each))

    def set_of(self, names: Iterable[str]) -> int:
        """The set of the named sources. Unknown names are ignored."""
        found = 0
        for name in names:
            if name == DISK:
                found |= DISK_BIT
            elif (peer := self.get(name)) is not None:
                found |= peer.bit
        return found

    def of_set(self, sources: int) -> list[Source]:
        """The sources in a set, which may be older than this object."""
        by_number, found = self._by_number, []
        while sources:
            number = sources.bit_length() - 1
            if number < len(by_number) and (source := by_number[number]) is not None:
                found.append(source)
            sources ^= 1 << number
        return found

    def names(self, sources: int) -> list[str]:
        return [source.name for source in self.of_set(sources)]

    # -- writing ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self.version += 1
        self._by_number: list[Source | None] = [self.disk]
        self._free: deque[int] = deque()
        self._epoch, self._grace_until = "", -math.inf

    def expect(self, epoch: str, seconds: float) -> None:
        """The tracker's index is `epoch`. If it is new, peers that have not joined it yet stay for
        so many seconds, unless it sees them leave."""
        if epoch != self._epoch:
            self._epoch, self._grace_until = epoch, time.monotonic() + seconds

    def follow(self, members: Iterable[Member], epoch: str) -> None:
        """Take over who the members are."""
        named = {each.incarnation: each for each in members if each.incarnation != self.own}
        for peer in self.values():
            if peer.name not in named:
                peer.address, peer.serves = None, False
        for name, member in named.items():
            peer = self.get(name) or self._new(name)
            if peer.address != member.address:
                peer.actor = None
            peer.address, peer.serves, peer.epoch = member.address, member.serves, epoch
            peer.verdict = member.comparison.verdict

    def _new(self, name: str) -> Peer:
        number = self._free.popleft() if self._free else len(self._by_number)
        peer = self[name] = Peer(name, 1 << number)
        self._by_number[number : number + 1] = [peer]
        self.version += 1
        return peer

    def forget_absent(self) -> None:
        """Forget those that are not members and will not come back. No set has them any more."""
        in_grace = time.monotonic() < self._grace_until
        for peer in [*self.values()]:
            if peer.address is None and not (in_grace and peer.epoch != self._epoch):
                self.forget(peer.name)

    def forget(self, name: str) -> None:
        """All that is known of the peer goes with its record."""
        number = self.pop(name).bit.bit_length() - 1
        self._by_number[number] = None
        self._free.append(number)
        self.version += 1
