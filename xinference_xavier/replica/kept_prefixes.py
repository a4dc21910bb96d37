"""The prefixes that a replica keeps in its pool, as the chunks that its engine made of them.

Named ones are kept until the tracker lets them go; a new tracker asks what it finds here. Marked
prompts, which requests asked to keep, expire.

Threading: on the replica's background loop. Bounded: a tracker has so many names, and of marked
prompts the replica keeps no more than its pool holds.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from xinference_xavier.pool.eviction import Protection
from xinference_xavier.pool.pool import Pool, protect
from xinference_xavier.protocol.prefixes import Keeping, Kept, KeptPrefix
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.runtime.aio import take_all

Prompt = Sequence[bytes]
"""The keys of a prompt's chunks, group by group."""
MAX_MARKS = 1000
"""Marked prompts. Those that were used last stay."""


class ComputedPrefix(NamedTuple):
    """vLLM has scheduled a request that computes a prefix. `keys` are those of its chunks."""

    prefix: str
    tokens: int
    keys: Sequence[bytes]


class MarkedPrompt(NamedTuple):
    """vLLM has scheduled a request whose prompt is to be kept. `keys` are those of its chunks."""

    keeping: Keeping
    keys: Sequence[bytes]


class _Mark(NamedTuple):
    keys: Sequence[bytes]
    expires: float


class KeptPrefixes:
    """Keeps at most `fraction` of the pool firmly. Prefixes beyond that are evicted last."""

    def __init__(
        self,
        pool: Pool,
        fraction: float,
        computed: deque[ComputedPrefix],
        marked: deque[MarkedPrompt],
        is_near: Callable[[bytes], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`computed` gets the prefixes that the engine is given, and `marked` the prompts to keep.
        What a neighbour holds `is_near`; it keeps the same prefixes. `clock` returns monotonic
        seconds."""
        self._pool = pool
        self._computed = computed
        self._marked = marked
        self._is_near = is_near
        self._clock = clock
        self._budget = int(pool.slots * fraction)
        self._wanted: dict[str, bool] = {}  # and whether firmly
        self._told: dict[str, KeptPrefix] = {}  # what the tracker knows
        self._prefixes: dict[str, ComputedPrefix] = {}
        self._firm: set[str] = set()  # names of them
        self._marks: list[_Mark] = []  # the one that was used last at the end
        self._uses: Counter[bytes] = Counter()
        self._firm_uses: Counter[bytes] = Counter()

    def keep(self, changes: Mapping[str, bool | None] | None) -> Kept:
        """Keep these prefixes, firmly or not, or let them go (None); return what has changed since
        the last call. A tracker that does not know what is kept gives no changes, and hears of
        everything."""
        if changes is None:
            self._told = {}
        else:
            self._change(changes)
        kept = {name: self._kept(name) for name in self._wanted}
        news = {name: each for name, each in kept.items() if self._told.get(name) != each}
        self._told = kept
        return Kept(news, self._budget, len(self._firm_uses))

    def _kept(self, name: str) -> KeptPrefix:
        prefix = self._prefixes.get(name)
        if prefix is None:
            return KeptPrefix()
        held = sum(self._pool.lookup(key) is not None or self._is_near(key) for key in prefix.keys)
        return KeptPrefix(prefix.tokens, len(prefix.keys), held, name in self._firm)

    def prompts(self) -> list[Sequence[bytes]]:
        """The keys of each named prefix."""
        return [prefix.keys for prefix in self._prefixes.values()]

    def collect(self) -> None:
        """Call it now and then: keeps what was marked, and lets go what has expired."""
        now = self._clock()
        for keeping, keys in take_all(self._marked):
            self._mark(_leading(keys, keeping.share), now + keeping.seconds)
        for mark in [mark for mark in self._marks if mark.expires <= now]:
            self._unmark(mark)

    # -- named prefixes ------------------------------------------------------------------------

    def _change(self, changes: Mapping[str, bool | None]) -> None:
        for name, firm in changes.items():
            if firm is not None:
                self._wanted[name] = firm
                continue
            self._wanted.pop(name, None)
            if name in self._prefixes:
                self._drop(name)
        for computed in take_all(self._computed):
            if computed.prefix in self._wanted:
                self._add(computed)
        # What is no longer firm makes room at once for what is.
        for name in sorted(self._prefixes, key=self._wanted.__getitem__):
            self._set_firm(name, self._wanted[name])

    def _add(self, computed: ComputedPrefix) -> None:
        name = computed.prefix
        if name in self._prefixes:
            if self._prefixes[name].keys == computed.keys:
                return
            self._drop(name)  # the model has another chat template now
        self._prefixes[name] = computed
        protect(self._pool, _add(self._uses, computed.keys), Protection.SOFT)

    def _set_firm(self, name: str, firm: bool) -> None:
        keys = self._prefixes[name].keys
        if firm == (name in self._firm):
            return
        if not firm:
            protect(self._pool, _remove(self._firm_uses, keys), Protection.SOFT)
            self._firm.remove(name)
        elif len(self._firm_uses.keys() | keys) <= self._budget:
            protect(self._pool, _add(self._firm_uses, keys), Protection.FIRM)
            self._firm.add(name)

    def _drop(self, name: str) -> None:
        self._set_firm(name, False)
        keys = self._prefixes.pop(name).keys
        protect(self._pool, _remove(self._uses, keys), Protection.NONE)

    # -- marked prompts ------------------------------------------------------------------------

    def _mark(self, keys: Sequence[bytes], expires: float) -> None:
        """Takes the place of each mark that it covers, such as that of the conversation's last
        turn, unless that one lives longer."""
        if not 0 < len(keys) <= self._pool.slots:
            return
        mark, covered = _Mark(keys, expires), frozenset(keys)
        protect(self._pool, _add(self._uses, keys), Protection.SOFT)
        for earlier in [*self._marks]:
            if earlier.expires <= expires and covered.issuperset(earlier.keys):
                self._unmark(earlier)
        self._marks.append(mark)
        while (
            len(self._marks) > MAX_MARKS
            or sum(len(each.keys) for each in self._marks) > self._pool.slots
        ):
            self._unmark(self._marks[0])

    def _unmark(self, mark: _Mark) -> None:
        self._marks.remove(mark)
        protect(self._pool, _remove(self._uses, mark.keys), Protection.NONE)


def _leading(keys: Sequence[bytes], share: float) -> Sequence[bytes]:
    """The leading `share` of each group's chunks, the chunk in which it ends included."""
    if share == 1.0:
        return keys
    groups: dict[bytes, list[bytes]] = {}
    for key in keys:
        groups.setdefault(key[GROUP], []).append(key)
    return [key for each in groups.values() for key in each[: math.ceil(len(each) * share)]]


def _add(uses: Counter[bytes], keys: Iterable[bytes]) -> list[bytes]:
    """Count one more use of each key; returns the keys that were unused before."""
    new = [key for key in keys if key not in uses]
    uses.update(keys)
    return new


def _remove(uses: Counter[bytes], keys: Sequence[bytes]) -> list[bytes]:
    """Count one use less of each key; returns the keys that are unused now."""
    uses.subtract(keys)
    gone = [key for key in keys if not uses[key]]
    for key in gone:
        del uses[key]
    return gone
