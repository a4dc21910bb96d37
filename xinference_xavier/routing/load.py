"""How busy each replica is, in seconds, and how fast it works.

A replica's report says what it had to do when the report was made. Work takes its time: what was
reported shrinks as time passes, and what the router has sent since is added. So a burst between
two reports spreads over the replicas.

Pure: no I/O, no clock. Times are monotonic seconds of the router. Belongs to one thread.

Arrays have one element for each number that the index has given to a replica, so that sets of
holders and loads fit together. Replicas to which it has given none come behind them. Where the
index renumbers its replicas, the arrays are made again.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xinference_xavier.stats.schema import KnownLoad

LEASE = 10.0
"""Seconds after which a replica without a report gets nothing."""
IN_TRANSIT = 0.05
"""Seconds after which the router takes for granted that a request is in the replica's reports, if
they do not say which requests are."""

Floats = NDArray[np.float64]


class Rates(NamedTuple):
    """What a replica has measured of itself, in seconds."""

    token_s: float
    """Seconds of a prompt's first token."""
    depth_s: float = 0.0
    """Seconds that a token takes longer for each token before it."""
    fetch_s: float = 0.0
    """Overhead of a fetch."""
    byte_s: float = 0.0
    """Seconds of a fetched byte."""


_UNKNOWN = Rates(0.0)


class Report(NamedTuple):
    """A replica's load at the time `made`."""

    made: float
    prefill_tokens: int
    """Still to compute, of requests that wait or run."""
    prefill_s: float | None
    """The same by the replica's own forecast, fetches included; None if it has no rates yet."""
    requests: int
    """Waiting, running and decoding requests."""
    rates: Rates | None = None
    free_tokens: float = math.inf
    """Tokens for which there are free KV blocks."""
    known: Collection[str] | None = None
    """The requests that are counted here, if the replica says so. Others have not reached its
    scheduler."""
    role: str = "any"
    """Or "prefill" or "decode"."""
    retention_s: float = 0.0
    """How long the engine's own prefix cache keeps what it holds."""


class Numbers(Protocol):
    """The index's numbers of replicas. It alone gives them."""

    version: int
    """Changes whenever a number is given or freed."""

    @property
    def size(self) -> int:
        """All numbers are below it."""

    def set_of(self, peers: Iterable[str]) -> int:
        """The bits of their numbers; 0 for one without a number, which holds nothing."""


class Numbered(Protocol):
    @property
    def sets(self) -> Numbers:
        """Another object where everything was forgotten."""


class _Sent(NamedTuple):
    at: float
    seconds: float
    tokens: int


@dataclass(slots=True)
class _Replica:
    report: Report
    group: str
    number: int = -1
    rates: Rates | None = None
    limit: float = math.inf
    closed_until: float = 0.0
    draining: bool = False
    running: int = 0  # of this router's requests
    others: int = 0  # that this router does not know; below 0, ours are not counted there yet
    until: float = 0.0  # when all known work will be done
    room: float = math.inf
    sent: dict[str, _Sent] = field(default_factory=dict)  # requests that are not in the report
    computed: set[str] = field(default_factory=set)  # of them

    @property
    def gets_nothing_until(self) -> float:
        """It is closed until then, or draining."""
        return math.inf if self.draining else self.closed_until

    def count(self, typical: Rates) -> None:
        """The work in the report, and what it does not contain. `typical` if it has no rates."""
        report = self.report
        self.sent = {
            request: sent
            for request, sent in self.sent.items()
            if request not in self.computed
            and (
                sent.at > report.made - IN_TRANSIT
                if report.known is None
                else request not in report.known
            )
        }
        self.computed.clear()
        seconds = report.prefill_s
        if seconds is None:
            seconds = report.prefill_tokens * (self.rates or typical).token_s
        self.until = report.made + seconds
        self.room = report.free_tokens - report.prefill_tokens
        for sent in self.sent.values():
            self.add(sent)

    def add(self, sent: _Sent) -> None:
        self.until = max(self.until, sent.at) + sent.seconds
        self.room -= sent.tokens


def _requests(ranks: Collection[_Replica]) -> int:
    """Their waiting and running requests."""
    return sum(each.running for each in ranks) + max(0, sum(each.others for each in ranks))


class Loads:
    """The loads of the replicas that have reported."""

    def __init__(self, index: Numbered) -> None:
        self._index = index
        self._numbers = index.sets
        self._version = -1
        self._replicas: dict[str, _Replica] = {}
        self._unmeasured: set[str] = set()  # replicas that know no rates yet
        self._sum = np.zeros(4)  # of the others' `Rates`
        self._allocate(0)

    def _allocate(self, size: int) -> None:
        self.names: list[str] = [""] * size
        """Replicas' names by number; empty where no replica has reported."""
        self._until, self._made, self._limit, self._closed_until, self.room = np.zeros((5, size))
        self._made -= math.inf
        self.running = np.zeros(size, np.int64)
        """Requests, by number."""
        self._counts = np.zeros((2, size))  # `running` and `others` of `_Replica`
        self._group = np.arange(size)  # the number of the first rank
        self.prefills, self.decodes = np.zeros((2, size), np.bool_)
        """Whether it has that role, by number."""
        self._measured = np.zeros(size, np.bool_)
        self._rates = np.zeros((4, size))

    def report(
        self, name: str, report: Report, *, limit: float = math.inf, group: str = ""
    ) -> None:
        """The latest from a replica; one that arrives late is ignored. `limit` is the number of
        requests that it accepts. The ranks of a data-parallel replica form a `group`: they are one
        process, which chooses among them and has one limit for all."""
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = _Replica(report, group or name)
            self._unmeasured.add(name)
            self._version = -1
        elif report.made <= replica.report.made:
            return
        replica.report, replica.limit = report, limit
        if report.rates:
            self._measure(name, replica, report.rates)
        replica.others = report.requests - replica.running
        replica.count(self.typical)
        self._show(replica)

    def _measure(self, name: str, replica: _Replica, rates: Rates) -> None:
        self._sum += np.subtract(rates, replica.rates or _UNKNOWN)
        replica.rates = rates
        if name in self._unmeasured:
            self._unmeasured.remove(name)
            typical = self.typical
            for each in self._unmeasured:
                self._replicas[each].count(typical)
                self._show(self._replicas[each])

    @property
    def typical(self) -> Rates:
        """The mean of the replicas that know theirs. While nobody does, work seems to take no time,
        and the replica with the fewest requests is chosen."""
        measured = len(self._replicas) - len(self._unmeasured)
        return Rates(*(self._sum / measured).tolist()) if measured else _UNKNOWN

    @property
    def rates(self) -> Floats:
        """`Rates`, one after another, by number."""
        if not self._unmeasured:
            return self._rates
        return np.where(self._measured, self._rates, np.array(self.typical)[:, None])

    def sent(self, name: str, request: str, seconds: float, tokens: int, now: float) -> None:
        """The router has sent a request that will keep the replica busy for `seconds`."""
        replica = self._replicas[name]
        sent = replica.sent[request] = _Sent(now, seconds, tokens)
        replica.running += 1
        replica.add(sent)
        self._show(replica)

    def computed(self, name: str, request: str) -> None:
        """The request's prompt has been computed. The next report will show it."""
        if (replica := self._replicas.get(name)) is not None:
            replica.computed.add(request)

    def ended(self, name: str, request: str) -> None:
        self.computed(name, request)
        if (replica := self._replicas.get(name)) is not None:
            replica.running = max(0, replica.running - 1)
            self._show(replica)

    def close(self, group: str, until: float) -> None:
        """The replica gets nothing, whatever it reports: it failed a request."""
        for rank in self._ranks(group):
            rank.closed_until = until
            self._show(rank)

    def drain(self, name: str, draining: bool) -> None:
        """The replica gets nothing as long as it is `draining`: it will be removed."""
        replica = self._replicas[name]
        if replica.draining != draining:
            replica.draining = draining
            self._show(replica)

    def fill(self, group: str) -> None:
        """The replica accepts nothing now: it has requests that it has not reported yet."""
        ranks = self._ranks(group)
        for rank in ranks:
            rank.limit = _requests(ranks)
            self._show(rank)

    def _ranks(self, group: str) -> list[_Replica]:
        return [each for each in self._replicas.values() if each.group == group]

    def works(self, now: float) -> bool:
        """Whether any replica reports, and is neither closed nor draining."""
        oldest, replicas = now - LEASE, self._replicas.values()
        return any(
            each.report.made > oldest and each.gets_nothing_until <= now for each in replicas
        )

    def retention(self, name: str) -> float:
        """Seconds for which the replica's own prefix cache keeps what it holds."""
        replica = self._replicas.get(name)
        return 0.0 if replica is None else replica.report.retention_s

    def number(self, name: str) -> int | None:
        """The index's number of a replica that has reported. Call `renumber` before."""
        replica = self._replicas.get(name)
        return None if replica is None else replica.number

    def forget(self, name: str) -> None:
        self._unmeasured.discard(name)
        if (replica := self._replicas.pop(name, None)) is not None:
            self._sum -= replica.rates or _UNKNOWN
            self._version = -1

    def known(self, now: float) -> dict[str, KnownLoad]:
        """The loads of replicas whose lease has not expired."""
        groups = defaultdict[str, list[_Replica]](list)
        for each in self._replicas.values():
            groups[each.group].append(each)
        requests = {group: _requests(ranks) for group, ranks in groups.items()}
        return {
            name: KnownLoad(
                max(0.0, each.until - now),
                _requests([each]),
                requests[each.group] < each.limit,
                each.report.role,
            )
            for name, each in self._replicas.items()
            if each.report.made > now - LEASE
        }

    def backlog(self, now: float) -> Floats:
        """Seconds until each replica will have computed what it has, by number. Infinite for one
        that gets nothing: its lease has run out, it is closed or draining, or it has as many
        requests as it accepts."""
        self.renumber()
        running, others = (np.bincount(self._group, each)[self._group] for each in self._counts)
        requests = running + np.maximum(others, 0.0)
        expired, full = self._made <= now - LEASE, requests >= self._limit
        closed = expired | full | (self._closed_until > now)
        return np.where(closed, math.inf, np.maximum(self._until - now, 0.0))

    def renumber(self) -> bool:
        """Follow the index's numbers; True if one of them means another replica now. Cheap unless
        the index has given or freed a number."""
        if self._is_numbered():
            return False
        old, self._numbers = self.names, self._index.sets
        self._version, size = self._numbers.version, self._numbers.size
        for name, replica in self._replicas.items():
            replica.number = self._numbers.set_of((name,)).bit_length() - 1
            if replica.number < 0:
                replica.number, size = size, size + 1
        self._allocate(size)
        first: dict[str, int] = {}
        for name, replica in self._replicas.items():
            self.names[replica.number] = name
            self._group[replica.number] = first.setdefault(replica.group, replica.number)
            self._show(replica)
        kept = len(old) <= len(self.names)
        return not kept or any(
            was and was != now for was, now in zip(old, self.names, strict=False)
        )

    def _is_numbered(self) -> bool:
        return self._numbers is self._index.sets and self._version == self._numbers.version

    def _show(self, replica: _Replica) -> None:
        if not self._is_numbered():
            return  # its number may be another's; the next look makes the arrays again
        number = replica.number
        self._until[number] = replica.until
        self._made[number] = replica.report.made
        self._limit[number] = replica.limit
        self._closed_until[number] = replica.gets_nothing_until
        self.room[number] = replica.room
        self.running[number] = _requests([replica])
        self._counts[:, number] = replica.running, replica.others
        self.prefills[number] = replica.report.role == "prefill"
        self.decodes[number] = replica.report.role == "decode"
        self._measured[number] = replica.rates is not None
        self._rates[:, number] = replica.rates or _UNKNOWN
