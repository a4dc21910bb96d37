"""From which peers a request fetches what it lacks, and whether that is expected to pay.

Belongs to the scheduler thread. Peers hold whole prefixes, so only the ends of runs are looked at.
Chunks of one KV-cache group are counted: those of the others come with them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from xinference_xavier.engine.compat import known_keys
from xinference_xavier.engine.policy.cost_model import CostModel
from xinference_xavier.engine.policy.prefill_rate import PrefillRate
from xinference_xavier.engine.request import GROUP, Request
from xinference_xavier.pool.pool import Pool
from xinference_xavier.tiers.base import Tier

_CLEARLY = 0.8  # of the time


class FetchPolicy(Enum):
    ADAPTIVE = auto()  # fetch where that is expected to be quicker than computing
    FIXED_THRESHOLD = auto()  # fetch every run of at least `min_fetch_tokens`


class FetchPlan(NamedTuple):
    """`keys`, to be divided equally among `donors`."""

    donors: list[str]
    keys: list[bytes]
    prefill_seconds: float | None  # that it saves; None if unknown


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
        """Seconds to compute `chunks` chunks of a prompt from `place` on; None if unknown."""
        first = place * self._chunk_tokens
        return self._prefill_rate.seconds(first, first + chunks * self._chunk_tokens)

    def is_worth_fetching(
        self, key: bytes, holders: Sequence[str], request: Request, now: float
    ) -> bool:
        """Whether a peer holds enough chunks from `key` on, but for those that are here.

        A RETRY can cost the request a whole step of the engine, so this is asked before.
        """
        group = request.group_of(key)
        if key not in group:
            return True
        place = group.index(key)
        rest = len(group) - place
        leasts = ((peer, self._least(peer, request, place, rest, now)) for peer in holders)
        if any(self._reaches(peer, group, place + least) for peer, least in leasts):
            return True
        enough = place + self.min_chunks
        if not request.computes and any(self._reaches(peer, group, enough) for peer in holders):
            request.computes = True
            self._cost_model.decisions.computed += 1
        return False

    def may_become_worth_fetching(self, key: bytes, request: Request, now: float) -> bool:
        """False where even all that is to come from `key` on would be computed sooner."""
        holders = self._tier.holders(key)
        if not holders:
            return True
        group = request.group_of(key)
        place = group.index(key)
        rest = len(group) - place
        return any(self._least(peer, request, place, rest, now) <= rest for peer in holders)

    def plan(
        self, request: Request, deadline: float, busy: Mapping[str, int], now: float
    ) -> FetchPlan | None:
        """What to fetch of the chunks that it wants; `busy` says from whom how many fetches are
        under way. None if what can be had in time is not worth it."""
        donors, keys = self._longest_run(request.wanted)
        if not donors:
            return None

        def rank(donor: str) -> tuple[float, int, float]:
            """Who brings it first; of those that seem equal any: they have about as much to do."""
            seconds, asked = self._cost_model.seconds(donor, len(keys), now), busy.get(donor, 0)
            return seconds * (1 + asked), asked, random.random()

        donors.sort(key=rank)
        best = donors[0]
        if self.policy is FetchPolicy.ADAPTIVE and len({key[GROUP] for key in keys}) == 1:
            keys = keys[: self._cost_model.rows_within(best, deadline - now, now)]
        place, chunks = self._spared(keys, request)
        if not chunks or chunks < self._least(best, request, place, chunks, now):
            return None
        count = self._sharers(donors, len(keys), busy)
        return FetchPlan(donors[:count], keys, self.prefill_seconds(place, chunks))

    def _sharers(self, donors: Sequence[str], rows: int, busy: Mapping[str, int]) -> int:
        """Among how many of the donors, the best first, a fetch is divided: with each one more it
        has to become clearly shorter, as its messages take processor time as well."""

        def seconds(count: int) -> float:
            share = -(-rows // count)
            return max(
                self._cost_model.last_seconds(donor, share) * (1 + busy.get(donor, 0))
                for donor in donors[:count]
            )

        count = 1
        while count < min(len(donors), rows) and seconds(count + 1) < seconds(count) * _CLEARLY:
            count += 1
        return count

    def _longest_run(self, keys: Sequence[bytes]) -> tuple[list[str], list[bytes]]:
        """The longest run from the first key on that a peer holds, and all that hold it."""
        holders = self._tier.holders

        def run(donor: str) -> int:
            return sum(1 for _ in itertools.takewhile(lambda key: donor in holders(key), keys))

        runs = {donor: run(donor) for donor in holders(keys[0])}
        longest = max(runs.values(), default=0)
        return [donor for donor in runs if runs[donor] == longest], list(keys[:longest])

    def _spared(self, keys: Sequence[bytes], request: Request) -> tuple[int, int]:
        """From where on how many chunks of one group need not be computed once `keys` are here:
        these, and those behind them that are here already."""
        if not keys:
            return 0, 0
        group = request.group_of(keys[0])
        fetched = set(keys)
        rest = list(itertools.dropwhile(lambda key: key not in fetched, group))
        if not rest:  # an older vLLM
            return 0, len(keys)
        at_hand = itertools.takewhile(lambda key: key in fetched or self._pool.lookup(key), rest)
        return len(group) - len(rest), sum(1 for _ in at_hand)

    def _least(self, peer: str, request: Request, place: int, chunks: int, now: float) -> int:
        """How many chunks are worth a fetch from this peer, if each takes to be computed what these
        `chunks` from `place` on do in the mean."""
        if self.policy is FetchPolicy.FIXED_THRESHOLD:
            return self.min_chunks
        groups = len({key[GROUP] for key in known_keys(request.context)}) or 1
        seconds = self.prefill_seconds(place, chunks)
        each = None if seconds is None else seconds / chunks
        return max(self.min_chunks, self._cost_model.least(peer, groups, each, now))

    def _reaches(self, peer: str, group: Sequence[bytes], count: int) -> bool:
        """Whether the last of the group's first `count` chunks is at the peer, or here."""
        if count > len(group):
            return False
        last = group[count - 1]
        return peer in self._tier.holders(last) or self._pool.lookup(last) is not None
