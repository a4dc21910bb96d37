"""Part `capacity`: what the pools of several replicas hold together.

Managers, pools, mirrors and the index are real; vLLM's scheduler and the transport are simulated,
and no bytes move. The working set is 1.5 times as large as one pool. Each of its documents consists
of a head that all documents have in common and of chunks of its own. Requests for documents, chosen
uniformly or by Zipf's law, arrive at the replicas at random; mirrors learn of changes a few
requests later. After enough requests to fill the pools several times over, the same number is
measured. The reference is the same run with plain least-recently-used eviction.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey

from benchmarks.figures import figure, ratio, shown
from tests.engine.scheduling import KEY_BYTES, Scheduling, ScriptedTier, chunks
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.tier import Fetch, FetchState
from xinference_xavier.protocol.tracker import Member, pack
from xinference_xavier.tracker.index import Index

TITLE = "Capacity"
REPLICAS = (2, 3)
CHOICES = {"uniform": 0.0, "Zipf": 1.0}
"""Exponents: the n-th most popular document is requested in proportion to 1 / n ** exponent."""
SLOTS = 256
WORKING_SET = 1.5
HEAD_CHUNKS = 2
OWN_CHUNKS = 8
REQUESTS = 600
HEARD_EVERY = 4
"""Requests between two updates of a mirror."""
RUNS = 5
_CHUNKS = HEAD_CHUNKS + OWN_CHUNKS
POLICIES = ("spares copies", "least recently used")


class _Replica(Scheduling):
    """One engine. Its publications reach the index at once, and its fetches succeed if the donor
    holds the rows."""

    def __init__(self, name: str, index: Index, lru: bool) -> None:
        super().__init__(SLOTS, name=name)
        self.name = name
        self._index = index
        self._sequence = 0
        if lru:
            self.manager._is_redundant = lambda row: False  # type: ignore[method-assign]
        index.join(Member(name, "127.0.0.1:1"), KEY_BYTES, 0.0)

    def hear(self) -> None:
        mirror = self.tier.mirror
        mirror.apply(self._index.changes_since(mirror.epoch, mirror.revision, self.name))

    def serve(self, number: int, keys: Sequence[OffloadKey], peers: dict[str, _Replica]) -> _Served:
        """Serve one request from its arrival to its end."""
        request = self.arrive(str(number), keys)
        while (hits := self.attempt(request)) is None:
            for fetch in self.tier.fetches:
                if fetch.state is FetchState.PENDING:
                    self._bring(fetch, peers[fetch.source].pool)
        fetched = sum(len(fetch.committed) for fetch in self.tier.fetches)
        self.schedule(request, hits)
        if hits:
            self.loaded(request, hits)
        missing = keys[hits:]
        if missing:
            self.stored(request, self.begin_store(request, missing))
        self.finish(request)
        self.end_step()
        self._publish()
        return hits, fetched

    def _bring(self, fetch: Fetch, donor: Pool) -> None:
        granted = donor.pin_shared([row.key for row in fetch.rows])
        self.tier.end(fetch, len(granted))
        donor.unpin(granted)

    def _publish(self) -> None:
        tier: ScriptedTier = self.tier
        stored = [row for row in tier.stored_rows if self.pool.set_checksum(row, 1)]
        fetched = [row for fetch in tier.fetches for row in fetch.committed]
        added = pack(row.key for row in (*stored, *fetched) if self._holds(row))
        removed = pack(key for key in tier.evicted_keys if self.pool.lookup(key) is None)
        tier.stored_rows, tier.evicted_keys, tier.fetches = [], [], []
        self._sequence += 1
        self._index.publish(self.name, self._sequence, added, removed)

    def _holds(self, row: Row) -> bool:
        return self.pool.lookup(row.key) is row


_Served = tuple[int, int]
"""Chunks that were hits, and how many of them were fetched."""


def measure() -> dict[str, Any]:
    return {
        "runs": [
            _compared(count, choice) | {"replicas": count, "choice": choice}
            for count in REPLICAS
            for choice in CHOICES
        ]
    }


def _compared(count: int, choice: str) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {policy: {} for policy in POLICIES}
    for seed in range(RUNS):
        for policy in POLICIES:
            for name, share in _run(count, choice, policy == POLICIES[1], seed).items():
                found[policy].setdefault(name, []).append(share)
    ours, reference = (found[policy] for policy in POLICIES)
    return {
        **{policy: {n: figure(found[policy][n]) for n in ours} for policy in POLICIES},
        "ratio": {name: ratio(ours[name], reference[name]) for name in ("held", "hits")},
    }


def _run(count: int, choice: str, lru: bool, seed: int) -> dict[str, float]:
    """Shares: of the working set, what is in the cluster at the end; of the requested chunks, what
    were hits, and what was fetched."""
    source = random.Random(seed)
    index = Index()
    names = [f"replica {number}" for number in range(count)]
    replicas = {name: _Replica(name, index, lru) for name in names}
    documents = _documents()
    popularity = [1 / rank ** CHOICES[choice] for rank in range(1, len(documents) + 1)]
    source.shuffle(popularity)
    asked = source.choices(documents, cum_weights=list(accumulate(popularity)), k=2 * REQUESTS)
    hits = fetched = 0
    for number, keys in enumerate(asked):
        if number % HEARD_EVERY == 0:
            for replica in replicas.values():
                replica.hear()
        served = replicas[source.choice(names)].serve(number, keys, replicas)
        if number >= REQUESTS:
            hits, fetched = hits + served[0], fetched + served[1]
    held = sum(
        any(replica.pool.lookup(key) for replica in replicas.values())
        for key in {key for keys in documents for key in keys}
    )
    return {
        "held": held / (HEAD_CHUNKS + len(documents) * OWN_CHUNKS),
        "hits": hits / (REQUESTS * _CHUNKS),
        "fetched": fetched / (REQUESTS * _CHUNKS),
    }


def _documents() -> list[list[OffloadKey]]:
    head = chunks("head", HEAD_CHUNKS)
    count = int((WORKING_SET * SLOTS - HEAD_CHUNKS) / OWN_CHUNKS)
    return [head + chunks(f"document {number}", OWN_CHUNKS) for number in range(count)]


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"Pools of {SLOTS} chunks and a working set of {WORKING_SET:g} pools: documents of "
        f"{OWN_CHUNKS} chunks, preceded by {HEAD_CHUNKS} that all have in common. {REQUESTS:,} "
        f"requests fill the pools, then as many are measured, {RUNS} times. In percent: of the "
        "working set, the part that is in any pool at the end; of the requested chunks, those that "
        "were hits and those that were fetched. Medians, with minimum and maximum in brackets.",
        "",
        "| replicas | choice | eviction | held | hits | fetched |",
        "|---|---|---|---|---|---|",
    ]
    for run in part["runs"]:
        for policy in POLICIES:
            cells = [_percent(run[policy][name]) for name in ("held", "hits", "fetched")]
            lines.append(
                f"| {run['replicas']} | {run['choice']} | {policy} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def _percent(value: dict[str, Any]) -> str:
    return shown({name: 100 * value[name] for name in ("median", "least", "most")}, 1)


def plot(part: dict[str, Any], axes: Any) -> None:
    labels = [f"{run['replicas']} replicas,\n{run['choice']}" for run in part["runs"]]
    for number, policy in enumerate(POLICIES):
        places = [place + 0.4 * number for place in range(len(labels))]
        held = [100 * run[policy]["held"]["median"] for run in part["runs"]]
        axes.bar(places, held, width=0.38, label=policy)
    axes.set_xticks([place + 0.2 for place in range(len(labels))], labels)
    axes.set_ylim(0, 100)
    axes.set_ylabel("% of the working set in the cluster (median)")
    axes.legend(loc="lower center", ncols=2)
