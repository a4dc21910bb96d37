"""Typed answers of the REST interface, other than stats."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import ModelStatus


@dataclass(frozen=True)
class ModelList:
    """All `models` that share and whose trackers answer. `unavailable` has the reason for each of
    the others, by uid."""

    models: tuple[ModelStatus, ...]
    unavailable: dict[str, str]
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class EventRecord:
    """`event` is the name of a class in `xinference_xavier.events`, `fields` that class's other
    fields."""

    event: str
    time: float
    fields: Mapping[str, Any]

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        rest = {name: value for name, value in raw.items() if name not in ("event", "time")}
        return cls(raw["event"], raw["time"], rest)


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a prompt, and the incarnations that hold them."""

    start: int
    end: int
    holders: frozenset[str]


@dataclass(frozen=True)
class Explanation:
    """The places of a prompt's chunks now."""

    prompt_tokens: int
    chunk_tokens: int
    chunks: tuple[Chunk, ...]
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        chunks = (
            Chunk(
                chunk["from"],
                chunk["to"],
                frozenset(name for name, where in chunk["replicas"].items() if where != "none"),
            )
            for chunk in raw["chunks"]
        )
        return cls(raw["prompt_tokens"], raw["chunk_tokens"], tuple(chunks), raw)

    def held(self, incarnation: str) -> int:
        """The tokens from the prompt's beginning on that the replica holds."""
        missing = (chunk.start for chunk in self.chunks if incarnation not in chunk.holders)
        return next(missing, len(self.chunks) * self.chunk_tokens)

    @property
    def missing(self) -> str:
        """Why a part of the prompt is held by no replica; empty if that is less than a chunk."""
        if not self.chunks:
            return f"it is shorter than a chunk of {self.chunk_tokens}, and whole ones are kept"
        first = next((chunk for chunk in self.chunks if not chunk.holders), None)
        if first is None:
            return ""
        if first.start == 0:
            return (
                "no replica holds its first chunk: no prompt that began like this was computed, or "
                "it was evicted, or it had another cache_salt, an adapter or images, which are "
                "part of what is looked up"
            )
        return (
            f"no replica holds tokens {first.start} to {first.end}: from there on it differs from "
            "the prompts that were computed, or these chunks were evicted"
        )


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
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        copies = {name: read(PrefixCopy, copy) for name, copy in raw["replicas"].items()}
        own = {each.name for each in fields(cls)}
        known = {name: value for name, value in raw.items() if name in own}
        return cls(**{**known, "replicas": copies, "raw": raw})

    @property
    def progress(self) -> float:
        """The part of the first copy that is there."""
        held = max((copy.held for copy in self.replicas.values()), default=0)
        return held / max(1, self.chunks)
