"""The peers of a replica: one record each, in one dictionary.

A `Peer` has all that is known of another replica: where it is, what it holds, whether it can be
fetched from, how long that takes, and until when it is left alone after failures. Whoever drops the
record has forgotten the peer; only who computes differently is remembered beyond it.

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
from typing import Any, TypeVar

from xinference_xavier.index import Holder, Members
from xinference_xavier.limits import LIMIT
from xinference_xavier.protocol.tracker import (
    INITIAL_SETTINGS,
    Comparison,
    Left,
    Member,
    News,
    Settings,
    Verdict,
)
from xinference_xavier.runtime.backoff import Outage
from xinference_xavier.runtime.linear_fit import LinearFit

DISK = "disk"
"""The source that is no peer, and how it transports."""
IN_PLACE, SHARED_MEMORY = "in_place", "shared_memory"
"""How rows of a neighbour come: they do not move, or are copied."""
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
_T = TypeVar("_T")


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

    @property
    def is_neighbour(self) -> bool:
        """True if rows are loaded from there in place."""
        return False

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
class Peer(Source, Holder):
    """Another replica. `address` is that of its actor; None if the tracker does not name it, and it
    may come back: then it `serves` nothing."""

    address: str | None = None
    serves: bool = False
    verdict: Verdict = Verdict.WAITING  # the tracker's, on what it computes
    epoch: str = ""  # of the index that named it last
    actor: Any = None  # its xoscar reference; kept, because finding it costs a round trip
    linked_by: str = ""  # the transport of the latest fetch
    received: int = 0  # rows from it
    first_row: int | None = None  # the slot number of its row 0, if our workers have mapped them

    @property
    def is_neighbour(self) -> bool:
        return self.first_row is not None


class Peers(Members[Peer]):
    """The other members, by incarnation, and those that a new tracker does not know yet.

    Nothing can be fetched unless this replica, `incarnation`, `is_compared`. `differing` are the
    replicas that it has met and that compute something else, with how. `version` changes whenever a
    number is given or freed.
    """

    def __init__(self, incarnation: str) -> None:
        super().__init__()
        self.incarnation = incarnation
        self.settings = INITIAL_SETTINGS
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

    @property
    def enabled(self) -> bool:
        """The operator's switch."""
        return self.settings.enabled

    @property
    def trusted(self) -> frozenset[str]:
        """The peers that compute what this replica computes."""
        return frozenset(peer.name for peer in [*self.values()] if self._trusts(peer))

    @property
    def near(self) -> tuple[str, ...]:
        """The neighbours that chunks can be loaded from."""
        return tuple(self.names(self.neighbours))

    @property
    def unlike(self) -> frozenset[str]:
        """The peers with which this replica will not share, as far as is known."""
        undecided = (Verdict.WAITING, Verdict.COMPARED)
        return frozenset(peer.name for peer in [*self.values()] if peer.verdict not in undecided)

    def is_usable(self, name: str) -> bool:
        """True if chunks can be fetched from this peer, provided that it holds any."""
        return bool(self.usable & self.set_of((name,)))

    def may_fetch(self, name: str) -> bool:
        """True if this peer can fetch from this replica. It knows its own verdict, which may be
        news to us, but not that we were reset, and left, while it stood still."""
        return self.is_compared and self.address(name) is not None

    def differs(self, name: str) -> bool:
        """True if this peer, which may have left, computes other rows than this replica, or nobody
        knows any more whether it does."""
        return name in self.differing or not self.is_compared

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
        """Forget everything but the operator's switch."""
        super().clear()
        self.version += 1
        self.usable = self.neighbours = 0
        self.is_compared = False
        self.differing: dict[str, Comparison] = {}  # by incarnation; they may have left
        self._met: dict[str, None] = {}  # incarnations that we may have rows of
        self._by_number: list[Source | None] = [self.disk]
        self._free: deque[int] = deque()
        self._epoch, self._grace_until = "", -math.inf

    def set_compared(self, compared: bool) -> None:
        """Note whether this replica computes what others of its namespace compute."""
        self.is_compared = compared
        self._set_usable()

    def map(self, name: str, first_row: int | None) -> None:
        """Our workers have mapped the peer's pool from this row on, or no longer have it."""
        if (peer := self.get(name)) is not None and peer.first_row != first_row:
            peer.first_row = first_row
            self._set_usable()

    def expect(self, epoch: str, seconds: float) -> None:
        """The tracker's index is `epoch`. If it is new, peers that have not joined it yet stay for
        so many seconds, unless it sees them leave."""
        if epoch != self._epoch:
            self._epoch, self._grace_until = epoch, time.monotonic() + seconds

    def foresee(self, news: Iterable[News]) -> None:
        """Who differs is known before the rest of an update, which may take seconds."""
        for each in news:
            if isinstance(each, Member | Left):
                self._note(each.incarnation, each.comparison)
        self._set_usable()

    def follow(self, news: Member | Left | Settings) -> None:
        match news:
            case Settings():
                if news.version >= self.settings.version:
                    self.settings = news
            case Member():
                self._take(news)
            case Left(name, comparison):
                if (peer := self.get(name)) is not None:
                    peer.address, peer.serves = None, False
                    self._forget_if_gone(peer)
                self._note(name, comparison)
        self._set_usable()

    def forget_absent(self) -> None:
        """Forget those that are not members and will not come back. No set has them any more."""
        for peer in [*self.values()]:
            if peer.address is None:
                self._forget_if_gone(peer)

    def _forget_if_gone(self, peer: Peer) -> None:
        in_grace = time.monotonic() < self._grace_until
        if not (in_grace and peer.epoch != self._epoch):
            self.forget(peer.name)

    def forget(self, name: str) -> None:
        """All that is known of the peer goes with its record."""
        number = self.pop(name).bit.bit_length() - 1
        self._by_number[number] = None
        self._free.append(number)
        self.version += 1

    def _take(self, member: Member) -> None:
        name = member.incarnation
        peer = self.get(name) or self._new(name)
        if peer.address != member.address:
            peer.actor = None
        peer.address, peer.serves, peer.epoch = member.address, member.serves, self._epoch
        peer.verdict = member.comparison.verdict
        _remember(self._met, name, None)
        self.differing.pop(name, None)
        self._note(name, member.comparison)

    def _note(self, name: str, found: Comparison) -> None:
        if found.verdict is Verdict.DIFFERS and name in self._met:
            _remember(self.differing, name, found)

    def _new(self, name: str) -> Peer:
        number = self._free.popleft() if self._free else len(self._by_number)
        peer = self[name] = Peer(name, 1 << number)
        self._by_number[number : number + 1] = [peer]
        self.version += 1
        return peer

    def _trusts(self, peer: Peer) -> bool:
        return peer.verdict is Verdict.COMPARED and not self.differs(peer.name)

    def _set_usable(self) -> None:
        fetchable = [peer for peer in self.values() if peer.serves and self._trusts(peer)]
        self.usable = sum(peer.bit for peer in fetchable) if self.enabled else 0
        self.neighbours = self.usable & sum(peer.bit for peer in fetchable if peer.is_neighbour)


def _remember(found: dict[str, _T], name: str, what: _T) -> None:
    """The latest go last; of too many, the oldest go."""
    found.pop(name, None)
    found[name] = what
    if len(found) > LIMIT:
        del found[next(iter(found))]
