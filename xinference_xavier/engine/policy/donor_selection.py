"""From which peers a request fetches its missing chunks, and whether that pays.

Belongs to the scheduler thread. Peers hold whole prefixes, so only the end of a run is looked up.
Chunks are counted in one KV-cache group; the other groups' chunks come with them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from xinference_xavier.engine.policy.cost_model import CostModel
from xinference_xavier.engine.policy.prefill_rate import PrefillRate
from xinference_xavier.engine.request import GROUP, Request
from xinference_xavier.pool.pool import Pool
from xinference_xavier.tiers.base import Tier

_SHORTER = 0.8  # time with one more donor, relative to without


class FetchPolicy(Enum):
    ADAPTIVE = auto()  # fetch what is predicted to be faster than computing
    FIXED_THRESHOLD = auto()  # fetch every run of at least `min_fetch_tokens`


class FetchPlan(NamedTuple):
    """`keys` to be divided equally among `donors`, the best first."""

    donors: list[str]
    keys: list[bytes]
    prefill_seconds: float | None  # that the fetch saves; None if unknown


class DonorSelection:
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
        """Runs shorter than `min_fetch_tokens` are never fetched."""
        self.min_chunks = max(1, -(-min_fetch_tokens // chunk_tokens))
        self.policy = policy
        self._pool = pool
        self._tier = tier
        self._prefill_rate = prefill_rate
        self._cost_model = cost_model
        self._chunk_tokens = chunk_tokens

    def prefill_seconds(self, place: int, chunks: int) -> float | None:
        """Predict how long it takes to compute `chunks` chunks from `place` on; None if unknown."""
        first = place * self._chunk_tokens
        return self._prefill_rate.seconds(first, first + chunks * self._chunk_tokens)

    def is_worth_fetching(
        self, key: bytes, holders: Sequence[str], request: Request, now: float
    ) -> bool:
        """Whether one peer and the pool together hold enough chunks from `key` on.

        Asked before a RETRY, which can cost the request a whole step of the engine.
        """
        group = request.group_of(key)
        if key not in group:
            return True
        place = group.index(key)
        rest = len(group) - place
        needed = ((peer, self._min_chunks(peer, request, place, rest, now)) for peer in holders)
        if any(self._reaches(peer, group, place + chunks) for peer, chunks in needed):
            return True
        enough = place + self.min_chunks
        if not request.computes and any(self._reaches(peer, group, enough) for peer in holders):
            request.computes = True
            self._cost_model.decisions.computed += 1
        return False

    def may_become_worth_fetching(self, key: bytes, request: Request, now: float) -> bool:
        """False if even all chunks from `key` on are predicted to be computed faster."""
        holders = self._tier.holders(key)
        if not holders:
            return True
        group = request.group_of(key)
        place = group.index(key)
        rest = len(group) - place
        return any(self._min_chunks(peer, request, place, rest, now) <= rest for peer in holders)

    def plan(
        self, request: Request, deadline: float, busy: Mapping[str, int], now: float
    ) -> FetchPlan | None:
        """Choose donors and keys among the chunks that the request wants.

        `busy` counts the pending fetches by donor. None if what can arrive by `deadline` is not
        worth a fetch.
        """
        donors, keys = self._longest_run(request.wanted)
        if not donors:
            return None

        def rank(donor: str) -> tuple[float, int, float]:
            """The fastest first; among equals the least busy, then any, to spread the load."""
            seconds, pending = self._cost_model.seconds(donor, len(keys), now), busy.get(donor, 0)
            return seconds * (1 + pending), pending, random.random()

        donors.sort(key=rank)
        best = donors[0]
        if self.policy is FetchPolicy.ADAPTIVE and len({key[GROUP] for key in keys}) == 1:
            keys = keys[: self._cost_model.rows_within(best, deadline - now, now)]
        place, chunks = self._saved(keys, request)
        if not chunks or chunks < self._min_chunks(best, request, place, chunks, now):
            return None
        count = self._count_donors(donors, len(keys), busy)
        return FetchPlan(donors[:count], keys, self.prefill_seconds(place, chunks))

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

    def _longest_run(self, keys: Sequence[bytes]) -> tuple[list[str], list[bytes]]:
        """The longest leading run of `keys` that one peer holds, and all peers that hold it."""
        holders = self._tier.holders

        def run(donor: str) -> int:
            return sum(1 for _ in itertools.takewhile(lambda key: donor in holders(key), keys))

        runs = {donor: run(donor) for donor in holders(keys[0])}
        longest = max(runs.values(), default=0)
        return [donor for donor in runs if runs[donor] == longest], list(keys[:longest])

    def _saved(self, keys: Sequence[bytes], request: Request) -> tuple[int, int]:
        """Return (start, count) of the chunks of one group that `keys` would save.

        That includes the chunks behind them that the pool already has.
        """
        if not keys:
            return 0, 0
        group = request.group_of(keys[0])
        fetched = set(keys)
        rest = list(itertools.dropwhile(lambda key: key not in fetched, group))
        if not rest:  # up to vLLM 0.30 keys may be unknown in advance
            return 0, len(keys)
        saved = itertools.takewhile(lambda key: key in fetched or self._pool.lookup(key), rest)
        return len(group) - len(rest), sum(1 for _ in saved)

    def _min_chunks(self, peer: str, request: Request, place: int, chunks: int, now: float) -> int:
        """How many chunks are worth a fetch from `peer`, by the mean time to compute one of the
        `chunks` from `place` on."""
        if self.policy is FetchPolicy.FIXED_THRESHOLD:
            return self.min_chunks
        groups = len({key[GROUP] for key in request.row_keys()}) or 1
        seconds = self.prefill_seconds(place, chunks)
        per_chunk = None if seconds is None else seconds / chunks
        return max(self.min_chunks, self._cost_model.min_chunks(peer, groups, per_chunk, now))

    def _reaches(self, peer: str, group: Sequence[bytes], count: int) -> bool:
        """Whether the peer or the pool holds the last of the group's first `count` chunks."""
        if count > len(group):
            return False
        last = group[count - 1]
        return peer in self._tier.holders(last) or self._pool.lookup(last) is not None
