"""The sources from which a request fetches its missing chunks, where that pays.

Belongs to the scheduler thread. A hit needs, up to its end, all chunks of the groups with full
attention and the last few of each group with a sliding window or a recurrent state. What counts is
what it saves: with windows, a few chunks can save a whole prompt.

A set of sources is an integer: see `Peers`.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xinference_xavier.engine.costs import CostModel, PrefillRate
from xinference_xavier.engine.fetches import Fetches, FetchPlan
from xinference_xavier.engine.keys import Group
from xinference_xavier.engine.request import Request
from xinference_xavier.peers import DISK_BIT, Source
from xinference_xavier.pool.pool import Pool
from xinference_xavier.replica.peer_tier import PeerTier

_SHORTER = 0.8  # time with one more donor, relative to without
_MAX_ATTEMPTS = 16  # to find where the windows of a hit are
_ENOUGH = 8
"""Donors of measured speed among which to choose. Others are not tried as long as there are so
many, because the first fetch from each opens a link."""


class _Reach(NamedTuple):
    """A candidate hit: once `keys` have arrived, tokens `start` to `end` need no computing.
    `ends[i]` is the token at which the chunk of `keys[i]` ends.

    Each of `holders` has all chunks that are not on their way already.
    """

    start: int
    end: int
    ends: list[int]
    keys: list[bytes]
    holders: int


_NOTHING = _Reach(0, 0, [], [], 0)

_Groups = list[tuple[Group, list[bytes]]]
"""A request's groups with their keys."""


class DonorSelection:
    def __init__(
        self,
        pool: Pool,
        tier: PeerTier,
        fetches: Fetches,
        prefill_rate: PrefillRate,
        cost_model: CostModel,
        *,
        min_fetch_tokens: int,
        adaptive: bool,
    ) -> None:
        """Hits that save fewer than `min_fetch_tokens` are not worth a fetch. Unless `adaptive`,
        all others are, without a prediction. If `adaptive`, neighbours lend fewer, too."""
        self.adaptive = adaptive
        self.prefill_seconds = prefill_rate.seconds
        self.min_tokens = min_fetch_tokens
        self._pool = pool
        self._tier = tier
        self._peers = tier.peers
        self._fetches = fetches
        self._cost_model = cost_model

    def plan(
        self, request: Request, deadline: float, now: float, without: int = 0
    ) -> FetchPlan | None:
        """Choose donors and keys for the longest hit that can be complete by `deadline`.

        If the missing chunks are nowhere, or not worth a fetch: a trial, or None. `without` is the
        set of sources that are too slow.
        """
        busy = self._fetches.by_source()
        groups = self._sorted_groups(request)
        left_out = self._peers.where(lambda source: source.outage.is_on)
        eligible = ~(self._peers.set_of(request.failed) | left_out | without)
        reach = self._reach(request, groups, eligible)
        donors = self._ranked(reach.holders, len(reach.keys), busy, now)
        if self.adaptive and donors:
            in_time = donors[0].rate(now).largest(deadline - now)
            while len(reach.keys) > in_time:
                limit = reach.ends[int(in_time)] - 1
                reach = self._reach(request, groups, eligible, limit)
        start, end, _, keys, _ = reach
        fast = [donor for donor in donors if self._is_faster(donor, len(keys), start, end, now)]
        is_lent = self.adaptive and bool(fast) and fast[0].is_neighbour
        is_enough = bool(keys) and (is_lent or end - start >= self.min_tokens)
        if is_enough and (fast or not donors):
            fast = fast[: self._count_donors(fast, len(keys), busy)]
            return FetchPlan(fast, keys, self.prefill_seconds(start, end))
        if self._peers.disk in donors:  # peers may have less, but faster
            return self.plan(request, deadline, now, without=DISK_BIT)
        if is_enough:
            self._cost_model.decisions.computed += not request.counted.declined
            request.counted.declined = True
        return self._trial(groups, now)

    def _trial(self, groups: _Groups, now: float) -> FetchPlan | None:
        """Fetch a chunk from a source that has been left out for long enough."""
        due = self._peers.where(lambda source: source.is_due(now))
        if not due:
            return None
        for _, keys in groups:
            for key in reversed(keys):  # a failure costs the pool this chunk, so take the last one
                donors = self._tier.holders(key) & due
                if donors and not self._pool.holds(key):
                    return FetchPlan(self._peers.of_set(donors)[:1], [key], None, is_trial=True)
        return None

    def may_become_worth_fetching(self, key: bytes, request: Request, now: float) -> bool:
        """False if even all chunks of the prompt are predicted to be computed faster."""
        holders = self._tier.holders(key) & ~DISK_BIT
        if not holders:
            return True
        groups = self._sorted_groups(request)
        start, end = request.prefix_tokens, _end(groups)
        rows = sum(len(_needed(group, start, end)) for group, _ in groups)
        return end - start >= self.min_tokens and any(
            self._is_faster(peer, rows, start, end, now)
            for peer in self._ranked(holders, rows, {}, now)
        )

    def _ranked(self, holders: int, rows: int, busy: Mapping[str, int], now: float) -> list[Source]:
        """Donors to choose from: neighbours first, then the fastest; among equals the least busy,
        then any, to spread the load."""
        sources = self._peers.of_set(holders)
        donors = [source for source in sources if source.rate(now)]
        if len(donors) < _ENOUGH:
            others = [source for source in sources if not source.rate(now)]
            donors += random.sample(others, min(_ENOUGH, len(others)))

        def rank(donor: Source) -> tuple[bool, float, int, float]:
            seconds, pending = donor.rate(now).predict(rows), busy.get(donor.name, 0)
            return not donor.is_neighbour, seconds * (1 + pending), pending, random.random()

        return sorted(donors, key=rank)

    def _is_faster(self, donor: Source, rows: int, start: int, end: int, now: float) -> bool:
        """True if a fetch is predicted to take less time than to compute from `start` to `end`."""
        prefill = self.prefill_seconds(start, end)
        if prefill is None or not self.adaptive:
            return True
        return donor.rate(now).predict(rows) < prefill

    def _count_donors(self, donors: Sequence[Source], rows: int, busy: Mapping[str, int]) -> int:
        """The number of donors among which to divide a fetch.

        One more donor must make it clearly shorter, because its messages cost processor time. It
        takes a neighbour no time to lend more rows.
        """
        if donors and donors[0].is_neighbour:
            return 1
        rates = [donor.rate() for donor in donors]
        pending = [1 + busy.get(donor.name, 0) for donor in donors]

        def seconds(count: int) -> float:
            share = -(-rows // count)
            parts = zip(rates[:count], pending, strict=False)
            return max(rate.predict(share) * times if rate else math.inf for rate, times in parts)

        count = 1
        while count < min(len(donors), rows) and seconds(count + 1) < seconds(count) * _SHORTER:
            count += 1
        return count

    def _sorted_groups(self, request: Request) -> _Groups:
        """The request's groups, those with windows last."""
        group = request.layout.group
        pairs = [(group(keys[0]), keys) for keys in request.groups().values() if keys]
        return sorted(pairs, key=lambda pair: pair[0].window is not None)

    def _reach(
        self, request: Request, groups: _Groups, eligible: int, limit: float = math.inf
    ) -> _Reach:
        """The longest hit up to `limit` tokens from one of the `eligible` donors; `_NOTHING` if
        nothing is missing, or too much."""
        step = math.lcm(*(group.chunk_tokens for group, _ in groups))
        begin, end = request.prefix_tokens, int(min(limit, _end(groups)))
        windows = [pair for pair in groups if pair[0].window is not None]
        for _ in range(_MAX_ATTEMPTS):
            end = end // step * step
            while (gap := self._gap(windows, begin, end)) is not None:
                end = gap // step * step
            walk = _Walk(self._pool, self._tier, self._fetches, eligible)
            reached = end
            for group, keys in groups:
                reached = walk.to_gap(group, keys, begin, reached)
            if reached == end or not windows:
                return walk.reach(begin, reached // step * step)
            end = reached
        return _NOTHING

    def _gap(self, windows: _Groups, begin: int, end: int) -> int | None:
        """The first token of a chunk that a hit up to `end` needs and no replica has; None if there
        is none. Recurrent states are stored for few chunks, so such gaps are common."""
        is_coming = self._fetches.bringing
        for group, keys in windows:
            for place in _needed(group, begin, end):
                key = keys[place]
                if not (self._pool.holds(key) or self._tier.holders(key) or is_coming(key)):
                    return place * group.chunk_tokens
        return None


class _Walk:
    """Collects the chunks that a hit misses, and who has all of them."""

    def __init__(self, pool: Pool, tier: PeerTier, fetches: Fetches, eligible: int) -> None:
        self._pool = pool
        self._tier = tier
        self._is_coming = fetches.bringing
        self._holders = eligible  # negative until a chunk is asked for
        self._missing: list[tuple[Group, list[bytes], Sequence[int]]] = []  # places of the keys

    def to_gap(self, group: Group, keys: list[bytes], begin: int, end: int) -> int:
        """Return `end`, or where a chunk starts that is neither here, nor coming, nor held by a
        peer that holds all others."""
        places = _needed(group, begin, end)
        wanted = [keys[place] for place in places]
        if self._pool.held.isdisjoint(wanted):  # as mostly
            count, self._holders = self._tier.run(wanted, self._holders)
            self._missing.append((group, keys, places[:count]))
            return end if count == len(places) else places[count] * group.chunk_tokens
        holders = self._tier.holders
        common, missing = self._holders, list[int]()
        for place, key in zip(places, wanted, strict=True):
            if self._pool.holds(key):
                if self._pool.lookup(key) is not None:
                    continue
                if not self._is_coming(key):  # it is being stored
                    end = place * group.chunk_tokens
                    break
            elif having := common & holders(key):
                common = having
            else:
                end = place * group.chunk_tokens
                break
            missing.append(place)
        self._holders = common
        self._missing.append((group, keys, missing))
        return end

    def reach(self, begin: int, end: int) -> _Reach:
        """The hit up to `end`; `_NOTHING` if nothing is missing."""
        start, ends, missing = end, list[int](), list[bytes]()
        for group, keys, places in self._missing:
            size = group.chunk_tokens
            within = places
            if places and (max(places[0], places[-1]) + 1) * size > end:
                within = [place for place in places if (place + 1) * size <= end]
            if within:
                # Without its window, the whole prefix would be computed.
                start = min(start, begin if group.window is not None else within[0] * size)
            ends += [(place + 1) * size for place in within]
            missing += [keys[place] for place in within]
        if not missing:
            return _NOTHING
        if len(self._missing) > 1 or ends[0] > ends[-1]:
            ordered = sorted(zip(ends, missing, strict=True))
            ends, missing = [each for each, _ in ordered], [key for _, key in ordered]
        return _Reach(start, end, ends, missing, max(self._holders, 0))


def _end(groups: _Groups) -> int:
    """The tokens that all groups have keys for."""
    return min((group.chunk_tokens * len(keys) for group, keys in groups), default=0)


def _needed(group: Group, start: int, end: int) -> Sequence[int]:
    """The places of the chunks that a hit from `start` to `end` needs, those with a window from
    the end."""
    first, last = start // group.chunk_tokens, end // group.chunk_tokens
    if group.window is None:
        return range(first, last)
    return range(max(first, last - group.window), last)[::-1]
