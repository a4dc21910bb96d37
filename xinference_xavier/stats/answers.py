"""Typed answers of the REST interface, other than stats."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import NOT_SENT, ModelStatus


@dataclass(frozen=True)
class ModelList:
    """All `models` that share and whose trackers answer. `unavailable` has the reason for each of
    the others, by uid."""

    models: tuple[ModelStatus, ...]
    unavailable: dict[str, str]
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, metadata=NOT_SENT)


@dataclass(frozen=True)
class EventRecord:
    """`event` is the name of a class in `xinference_xavier.events`, `fields` that class's other
    fields."""

    event: str
    time: float
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
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
    """Tokens of a prompt that a replica would get from its `local_pool`, from its host's `disk`,
    from a peer (`remote`), or that it would have `computed`."""

    local_pool: int = 0
    disk: int = 0
    remote: int = 0
    computed: int = 0


@dataclass(frozen=True)
class Forecast:
    """Seconds until a replica would have answered: its `backlog`, then what it would `fetch` from
    a peer and `compute` of this prompt. `prefill` is the replica that would compute it instead."""

    backlog: float = 0.0
    fetch: float = 0.0
    compute: float = 0.0
    prefill: str = ""

    @property
    def total(self) -> float:
        return self.backlog + self.fetch + self.compute


@dataclass(frozen=True)
class Explanation:
    """What a request for a prompt would reuse at each replica that could answer it now. `reuse` is
    keyed by incarnation, `forecasts` by xinference's name for the replica."""

    prompt_tokens: int
    chunk_tokens: int
    chunks: tuple[Chunk, ...]
    reuse: Mapping[str, Reuse]
    forecasts: Mapping[str, Forecast]
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, metadata=NOT_SENT)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        chunks = (
            Chunk(
                chunk["from"],
                chunk["to"],
                frozenset(name for name, where in chunk["replicas"].items() if where != "none"),
            )
            for chunk in raw["chunks"]
        )
        reuse = {name: read(Reuse, tokens) for name, tokens in raw["reuse"].items()}
        routing = raw.get("routing", {})
        forecasts = {name: read(Forecast, terms) for name, terms in routing.items()}
        tokens, size = raw["prompt_tokens"], raw["chunk_tokens"]
        return cls(tokens, size, tuple(chunks), reuse, forecasts, raw)

    @property
    def first(self) -> str:
        """The replica that is expected to answer first; empty if none accepts a request."""
        return min(self.forecasts, key=lambda name: self.forecasts[name].total, default="")


@dataclass(frozen=True)
class PrefixCopy:
    """A named prefix of so many `tokens` at one replica: `held` of its `chunks` are in the pool.
    They are not evicted if it is `firm`."""

    tokens: int = 0
    chunks: int = 0
    held: int = 0
    firm: bool = False


def is_part_of_path(name: str) -> bool:
    """A route can tell of what has this name. A slash ends a part of a path, and clients and
    proxies take dots out of it."""
    return "/" not in name and name not in ("", ".", "..")


SALT_HEADER = "x-xavier-cache-salt"
"""Names the tenant whose prefixes a request is about, percent-encoded; URLs are written to logs."""
ENDED = ("kept", "failed")
"""States in which nothing is left to do for a prefix."""


@dataclass(frozen=True)
class NamedPrefix:
    """A text under a `name`. `state` is "waiting", "computing", "kept", or "failed" for `reason`.
    `tokens` is 0 until it has been computed; it has so many `chunks`. `replicas` are those that
    keep it, by xinference's names; `copies` is how many should, 1 or "all". Its `retention` is
    "soft" or "hard". `ttl` is in seconds since the last use; `created`, `used` and `expires` are
    wall-clock times in seconds."""

    name: str
    state: str
    reason: str
    tokens: int
    chunks: int
    replicas: Mapping[str, PrefixCopy]
    ttl: float
    copies: int | str
    retention: str
    created: float
    used: float
    expires: float
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, metadata=NOT_SENT)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        copies = {name: read(PrefixCopy, copy) for name, copy in raw["replicas"].items()}
        own = {each.name for each in fields(cls)}
        known = {name: value for name, value in raw.items() if name in own}
        return cls(**{**known, "replicas": copies, "raw": raw})

    @property
    def progress(self) -> float:
        """The part of the first copy that is there."""
        held = max((copy.held for copy in self.replicas.values()), default=0)
        return held / max(1, self.chunks)
