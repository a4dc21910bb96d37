"""From which peers a request fetches its missing chunks, and whether that pays.

Belongs to the scheduler thread. A hit needs, up to its end, all chunks of the groups with full
attention and the last few of each group with a sliding window or a recurrent state. What counts is
what it saves: with windows, a few chunks can save a whole prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from xinference_xavier.engine.compat import key_positions
from xinference_xavier.engine.policy.cost_model import CostModel
from xinference_xavier.engine.policy.prefill_rate import PrefillRate
from xinference_xavier.engine.request import GROUP, Request
from xinference_xavier.pool.pool import Pool
from xinference_xavier.tiers.base import Tier

_SHORTER = 0.8  # time with one more donor, relative to without
_MAX_ATTEMPTS = 16  # to find a hit's end, each as long as the prompt


class FetchPolicy(Enum):
    ADAPTIVE = auto()  # fetch what is predicted to be faster than computing
    FIXED_THRESHOLD = auto()  # fetch every run of at least `min_fetch_tokens`


class Group(NamedTuple):
    """A KV-cache group. A hit needs the last `window` of its chunks; None: all."""

    chunk_tokens: int
    window: int | None = None


class FetchPlan(NamedTuple):
    """`keys` in the order of their tokens, to be divided equally among `donors`, the best first.

    Without donors, other fetches bring all of them.
    """

    donors: list[str]
    keys: list[bytes]
    prefill_seconds: float | None  # that the fetch saves; None if unknown


class _Chunk(NamedTuple):
    end: int  # in tokens of the prompt
    key: bytes


class _Reach(NamedTuple):
    """A hit up to `end`, once the `missing` chunks are here. Each of `holders` has all of them."""

    start: int
    end: int
    missing: list[_Chunk]
    holders: Collection[str]


_Groups = list[tuple[Group, list[bytes]]]
"""A request's groups with their keys."""


class DonorSelection:
    """`groups` are by the number at the end of their keys. A group without an entry has chunks of
    `chunk_tokens` tokens and no window."""

    def __init__(
        self,
        pool: Pool,
        tier: Tier,
        prefill_rate: PrefillRate,
        cost_model: CostModel,
        *,
        chunk_tokens: int,
        min_fetch_tokens: int,
        policy: FetchPolicy,
    ) -> None:
        """Hits that save fewer than `min_fetch_tokens` are not worth a fetch."""
        self.groups: Mapping[bytes, Group] = {}
        self.policy = policy
        self.min_tokens = max(chunk_tokens, min_fetch_tokens)
        self._pool = pool
        self._tier = tier
        self._prefill_rate = prefill_rate
        self._cost_model = cost_model
        self._default_group = Group(chunk_tokens)

    def group(self, key: bytes) -> Group:
        return self.groups.get(key[GROUP], self._default_group)

    def prefill_seconds(self, start: int, end: int) -> float | None:
        """Predict how long it takes to compute a prompt's tokens from `start` up to `end`."""
        return self._prefill_rate.seconds(start, end)

    def plan(
        self,
        request: Request,
        deadline: float,
        busy: Mapping[str, int],
        is_coming: Callable[[bytes], bool],
        now: float,
    ) -> FetchPlan | None:
        """Choose donors and keys for the longest hit that can be complete by `deadline`.

        `busy` counts the pending fetches by donor, and `is_coming` tells which chunks they bring.
        None if the missing chunks are nowhere, or not worth a fetch.
        """
        groups = self._sorted_groups(request)
        reach = self._reach(request, groups, is_coming)
        if reach is None:
            return None
        rows = len(reach.missing)

        def rank(donor: str) -> tuple[float, int, float]:
            """The fastest first; among equals the least busy, then any, to spread the load."""
            seconds, pending = self._cost_model.seconds(donor, rows, now), busy.get(donor, 0)
            return seconds * (1 + pending), pending, random.random()

        donors = sorted(reach.holders, key=rank)
        if self.policy is FetchPolicy.ADAPTIVE and donors:
            in_time = self._cost_model.rows_within(donors[0], deadline - now, now)
            while reach is not None and len(reach.missing) > in_time:
                reach = self._reach(request, groups, is_coming, reach.missing[in_time].end - 1)
            if reach is None:
                return None
            donors = [donor for donor in donors if donor in reach.holders]
        keys = [chunk.key for chunk in reach.missing]
        if reach.end - reach.start < self.min_tokens:
            return None
        if donors and not self._is_faster(donors[0], len(keys), reach.start, reach.end, now):
            self._cost_model.decisions.computed += not request.computes
            request.computes = True
            return None
        donors = donors[: self._count_donors(donors, len(keys), busy)]
        return FetchPlan(donors, keys, self.prefill_seconds(reach.start, reach.end))

    def may_become_worth_fetching(self, key: bytes, request: Request, now: float) -> bool:
        """False if even all chunks of the prompt are predicted to be computed faster."""
        holders = self._tier.holders(key)
        if not holders:
            return True
        groups = self._sorted_groups(request)
        start, end = request.prefix_tokens, _end(groups)
        rows = sum(len(_needed(group, start, end)) for group, _ in groups)
        return end - start >= self.min_tokens and any(
            self._is_faster(peer, rows, start, end, now) for peer in holders
        )

    def _is_faster(self, donor: str, rows: int, start: int, end: int, now: float) -> bool:
        """Whether a fetch is predicted to take less time than to compute from `start` to `end`."""
        prefill = self.prefill_seconds(start, end)
        return (
            self.policy is FetchPolicy.FIXED_THRESHOLD
            or prefill is None
            or self._cost_model.seconds(donor, rows, now) < prefill
        )

    def _count_donors(self, donors: Sequence[str], rows: int, busy: Mapping[str, int]) -> int:
        """Among how many of the donors to divide a fetch.

        One more donor must make it clearly shorter, because its messages cost processor time.
        """

        def seconds(count: int) -> float:
            share = -(-rows // count)
            return max(
                self._cost_model.last_seconds(donor, share) * (1 + busy.get(donor, 0))
                for donor in donors[:count]
            )

        count = 1
        while count < min(len(donors), rows) and seconds(count + 1) < seconds(count) * _SHORTER:
            count += 1
        return count

    def groups_of(self, request: Request) -> dict[bytes, list[bytes]]:
        """The keys of the request's whole chunks in order, by the number of their group."""
        if request.groups is None:
            request.groups = {}
            for key, end in key_positions(request.context):
                keys = request.groups.setdefault(key[GROUP], [])
                if end in (None, (len(keys) + 1) * self.group(key).chunk_tokens):
                    keys.append(request.row_key(key))
        return request.groups

    def first_key(self, request: Request) -> bytes | None:
        """That of the first chunk in the first group."""
        keys = next(iter(self.groups_of(request).values()), [])
        return keys[0] if keys else None

    def _sorted_groups(self, request: Request) -> _Groups:
        """Those with windows last."""
        pairs = [(self.group(keys[0]), keys) for keys in self.groups_of(request).values() if keys]
        return sorted(pairs, key=lambda pair: pair[0].window is not None)

    def _reach(
        self,
        request: Request,
        groups: _Groups,
        is_coming: Callable[[bytes], bool],
        limit: float = math.inf,
    ) -> _Reach | None:
        """The longest hit up to `limit` tokens; None if nothing is missing, or too much."""
        step = math.lcm(*(group.chunk_tokens for group, _ in groups))
        start, end = request.prefix_tokens, int(min(limit, _end(groups)))
        windows = [pair for pair in groups if pair[0].window is not None]
        for _ in range(_MAX_ATTEMPTS):
            end = end // step * step
            while (gap := self._gap(windows, is_coming, start, end)) is not None:
                end = gap // step * step
            reach = self._try_reach(groups, is_coming, start, end)
            if isinstance(reach, _Reach):
                return reach if reach.missing else None
            end = reach
        return None

    def _gap(
        self, windows: _Groups, is_coming: Callable[[bytes], bool], start: int, end: int
    ) -> int | None:
        """Where a chunk begins that nobody has, but a hit up to `end` needs. Recurrent states are
        stored here and there only, so there may be many."""
        for group, keys in windows:
            for place in _needed(group, start, end):
                key = keys[place]
                held = self._pool.holds(key) or self._tier.holders(key) or is_coming(key)
                if not held:
                    return place * group.chunk_tokens
        return None

    def _try_reach(
        self, groups: _Groups, is_coming: Callable[[bytes], bool], start: int, end: int
    ) -> _Reach | int:
        """A hit up to `end`, or where a chunk begins that it needs and cannot get."""
        missing: list[_Chunk] = []
        holders = _Holders()
        saved_from = end
        for group, keys in groups:
            for place in _needed(group, start, end):
                key, begin = keys[place], place * group.chunk_tokens
                if self._pool.lookup(key) is not None:
                    continue
                if not is_coming(key) and (
                    self._pool.holds(key) or not holders.narrow(self._tier.holders(key))
                ):
                    return begin
                missing.append(_Chunk(begin + group.chunk_tokens, key))
                # Without its window, the whole prefix would be computed.
                saved_from = min(saved_from, begin if group.window is None else start)
        missing.sort(key=lambda chunk: chunk.end)
        return _Reach(saved_from, end, missing, holders.common or ())


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


class _Holders:
    """Who holds all of several chunks. Most chunks share one tuple of holders."""

    def __init__(self) -> None:
        self.common: set[str] | None = None
        self._latest: Sequence[str] = ()

    def narrow(self, holders: Sequence[str]) -> bool:
        """False, and no change, if nobody would be left."""
        if holders is self._latest and self.common:
            return True
        common = set(holders) if self.common is None else self.common.intersection(holders)
        if common:
            self.common, self._latest = common, holders
        return bool(common)
