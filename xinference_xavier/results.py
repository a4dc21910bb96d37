"""What `client` answers, typed. Times are seconds, sizes bytes.

A server may be newer than its client: what is missing counts as nothing, what is unknown is kept
in `raw` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Hits:
    """Prompt tokens by where their KV came from."""

    own_prefix_cache: int = 0
    own_pool: int = 0
    peers: int = 0
    computed: int = 0

    @property
    def total(self) -> int:
        return self.own_prefix_cache + self.own_pool + self.peers + self.computed

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
class Happened:
    """`event` is the name of a class of `hooks`, `fields` what else that class has."""

    event: str
    time: float
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Happened:
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

    own_pool: int
    peers: int
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
                name: Reuse(tokens["own_pool"], tokens["peers"], tokens["computed"])
                for name, tokens in raw["reuse"].items()
            },
            raw=raw,
        )
