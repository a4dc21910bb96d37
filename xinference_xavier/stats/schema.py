"""What is reported of sharing, typed. Times are in seconds, sizes in bytes.

A server may be newer than its client: missing values are zero, unknown ones stay in `raw`. Figures
come from peers and are read without trust. A histogram travels as bucket counts, since those who
count and those who show know the bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_NUMBER = 1 << 63
SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Of how long a fetch takes; `xavier_fetch_timeout` is 5 s unless it is set."""
BYTES_BOUNDS = tuple(float(1 << power) for power in range(16, 34, 2))
"""Of what a fetch brings: 64 KiB to 4 GiB."""
COMMITTED, ROLLED_BACK = OUTCOMES = ("committed", "rolled_back")


@dataclass(frozen=True)
class Hits:
    """Prompt tokens by where their KV came from."""

    prefix_cache: int = 0
    local_pool: int = 0
    remote: int = 0
    computed: int = 0

    @property
    def total(self) -> int:
        return self.prefix_cache + self.local_pool + self.remote + self.computed

    @property
    def ratio(self) -> float:
        """The part that was not computed; 0 before the first request."""
        return 1 - self.computed / self.total if self.total else 0.0

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Hits:
        return cls(**{name: raw.get(name, 0) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Counts:
    """Of one replica since its start, or of all together."""

    hits: Hits = field(default_factory=Hits)
    requests: int = 0
    holdings: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    fetches_started: int = 0
    fetches_committed: int = 0
    fetches_rolled_back: Mapping[str, int] = field(default_factory=dict)
    seconds_saved: float = 0.0

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Counts:
        fetches = raw.get("fetches", {})
        return cls(
            hits=Hits.of(raw.get("hits", {})),
            requests=raw.get("requests", 0),
            holdings=raw.get("holdings", 0),
            bytes_received=raw.get("bytes_received", 0),
            bytes_sent=raw.get("bytes_sent", 0),
            fetches_started=fetches.get("started", 0),
            fetches_committed=fetches.get("committed", 0),
            fetches_rolled_back=fetches.get("rolled_back", {}),
            seconds_saved=raw.get("seconds_saved", 0.0),
        )


@dataclass(frozen=True)
class ReplicaStatus:
    """`replica` is xinference's name for it, `vllm` the version it runs. `stale`: it did not
    answer, and its figures are those of its last heartbeat. Rows are chunks."""

    replica: str
    incarnation: str
    address: str
    namespace: str
    vllm: str | None
    stale: bool
    counts: Counts
    rows: int
    rows_used: int
    rows_pinned: int
    row_bytes: int
    received_from: Mapping[str, int]
    fetching: Mapping[str, int]
    prefill_tokens_per_s: float | None
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> ReplicaStatus:
        pool = raw.get("pool", {})
        return cls(
            replica=raw.get("replica", raw["incarnation"]),
            incarnation=raw["incarnation"],
            address=raw["address"],
            namespace=raw["namespace"],
            vllm=raw.get("vllm"),
            stale=raw.get("stale", False),
            counts=Counts.of(raw),
            rows=pool.get("rows", 0),
            rows_used=pool.get("ready", 0) + pool.get("filling", 0),
            rows_pinned=pool.get("pinned", 0),
            row_bytes=pool.get("row_bytes", 0),
            received_from=raw.get("received_from", {}),
            fetching=raw.get("fetching", {}),
            prefill_tokens_per_s=raw.get("prefill_tokens_per_s"),
            raw=raw,
        )


@dataclass(frozen=True)
class ModelStatus:
    model_uid: str
    enabled: bool
    replicas: tuple[ReplicaStatus, ...]
    totals: Counts
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> ModelStatus:
        return cls(
            model_uid=raw["model_uid"],
            enabled=raw["enabled"],
            replicas=tuple(map(ReplicaStatus.of, raw["replicas"])),
            totals=Counts.of(raw["totals"]),
            raw=raw,
        )


@dataclass(frozen=True)
class EventRecord:
    """`event` is the name of a class of `hooks`, `fields` what else that class has."""

    event: str
    time: float
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> EventRecord:
        rest = {name: value for name, value in raw.items() if name not in ("event", "time")}
        return cls(raw["event"], raw["time"], rest)


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a prompt, and the incarnations that hold them."""

    start: int
    end: int
    holders: frozenset[str]


@dataclass(frozen=True)
class Reuse:
    """Tokens by where a request would get them from."""

    local_pool: int
    remote: int
    computed: int


@dataclass(frozen=True)
class Explanation:
    """`reuse` by incarnation of the replica that would get the request."""

    prompt_tokens: int
    chunk_tokens: int
    chunks: tuple[Chunk, ...]
    reuse: Mapping[str, Reuse]
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Explanation:
        return cls(
            prompt_tokens=raw["prompt_tokens"],
            chunk_tokens=raw["chunk_tokens"],
            chunks=tuple(
                Chunk(
                    chunk["from"],
                    chunk["to"],
                    frozenset(name for name, where in chunk["replicas"].items() if where != "none"),
                )
                for chunk in raw["chunks"]
            ),
            reuse={
                name: Reuse(tokens["local_pool"], tokens["remote"], tokens["computed"])
                for name, tokens in raw["reuse"].items()
            },
            raw=raw,
        )


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def number(value: object) -> float:
    """From 0 on, and below `MAX_NUMBER`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    return value if 0 <= value < MAX_NUMBER else 0


class Histogram:
    """`counts` has one more entry than `bounds`, for what is above all of them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """A value that equals a bound is not above it."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"counts": list(self.counts), "sum": self.sum}


class FetchStats:
    """Of the fetches over one transport; or of those that ended before one was chosen."""

    def __init__(self) -> None:
        self._seconds = {outcome: Histogram(SECONDS_BOUNDS) for outcome in OUTCOMES}
        self._bytes = Histogram(BYTES_BOUNDS)
        self._reasons: Counter[str] = Counter()

    def ended(self, reason: str | None, seconds: float, size: int) -> None:
        """After `seconds`, with `size` bytes that became hits; `reason` is why not all did."""
        self._seconds[COMMITTED if reason is None else ROLLED_BACK].observe(seconds)
        if reason is not None:
            self._reasons[reason] += 1
        if size:
            self._bytes.observe(size)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. `bytes` counts the fetches that brought some, `reasons` those that did not
        bring all."""
        return {
            "seconds": {outcome: seen.to_dict() for outcome, seen in self._seconds.items()},
            "bytes": self._bytes.to_dict(),
            "reasons": dict(self._reasons),
        }
