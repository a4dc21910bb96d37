"""The contract between the scheduler and a tier, a place from which rows of the pool are filled.

The peers are a tier (`replica.peer_tier`), alone or with the host's disk as one more source
(`replica.disk`).

Memory: the caller reserves rows in the pool and hands them to `submit_load`. Only the tier writes
them, until it commits them, pinned once, or aborts them. If a slot may still be written after the
fetch has ended, the tier quarantines its row first.

Life cycle: a tier is made with its pool. It is `ready` while it can load, which may change back and
forth. Its owner closes it; fetches under way end by their deadlines.

Threading: the scheduler thread calls every method here, and each returns at once. A tier works in
threads of its own and reports through the `Fetch`, which one thread writes and any thread reads.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from xinference_xavier.pool.pool import Row

DISK = "disk"
"""The source that is no peer, and how it transports."""


class FetchState(Enum):
    PENDING = auto()
    COMMITTED = auto()
    ROLLED_BACK = auto()


@dataclass(eq=False)
class Fetch:
    """One load of rows from one source of a tier.

    `deadline` is in `time.monotonic()` seconds. Once the fetch has ended, `seconds` is its
    duration, and `reason` says why it was rolled back.
    """

    source: str
    rows: list[Row]
    deadline: float
    began: float = field(default_factory=time.monotonic)
    transport: str = ""  # until one is chosen
    committed: list[Row] = field(default_factory=list)  # the leading rows that arrived, pinned once
    reason: str | None = None
    seconds: float = 0.0
    state: FetchState = FetchState.PENDING
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Claim:
    """A prefix that a request wants to compute: `keys` in order, in about `seconds`.

    `held_by_peer` is how many of the first keys a peer is computing: 0 if this replica should
    compute them, None until the answer arrives. One thread writes it, once; any thread reads it.
    """

    keys: Sequence[bytes]
    seconds: float
    held_by_peer: int | None = None


class Tier(ABC):
    holders: Callable[[bytes], int]
    """The sources that hold a chunk, as a set: the bits of an integer. Only a hint: a stale one
    costs a failed fetch. Not a method, because one more call would take as long as the lookup."""

    @abstractmethod
    def run(self, keys: Sequence[bytes], among: int) -> tuple[int, int]:
        """The number of leading `keys` that one source of the set `among` holds, and the set of
        sources that hold all of them: `among` if the number is 0."""

    @property
    def host_disk(self) -> int:
        """The set of the host's disk alone, empty without one. No replica computes for a disk."""
        return self.set_of((DISK,))

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether `holders` and `submit_load` may be used."""

    @abstractmethod
    def sources(self, holders: int) -> list[str]:
        """The names in a set. Sets and names belong together for one scheduling step."""

    @abstractmethod
    def set_of(self, sources: Iterable[str]) -> int:
        """The set of these names; ignores unknown ones."""

    @abstractmethod
    def submit_load(self, source: str, rows: list[Row], deadline: float) -> Fetch | None:
        """Begin to fill the reserved rows from `source`. Returns None, with the rows aborted, if
        the tier is closed or overloaded."""

    @abstractmethod
    def can_load_from(self, source: str) -> bool:
        """Whether `source` is there now and may be loaded from, if it holds anything."""

    @abstractmethod
    def claim(self, keys: Sequence[bytes], seconds: float) -> Claim | None:
        """Ask whether somebody else is computing the chunks; None if there is nobody to ask."""

    @abstractmethod
    def release_claim(self, claim: Claim) -> None:
        """The request behind the claim has ended."""

    @abstractmethod
    def on_stored(self, rows: Sequence[Row]) -> None:
        """The engine stored these rows: they are READY."""

    @abstractmethod
    def on_evicted(self, keys: Sequence[bytes]) -> None:
        """The pool evicted these chunks."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all chunks: the engine's weights may have changed."""

    @abstractmethod
    def rejoin(self, weights_version: str) -> None:
        """Share with the replicas of these weights, to which everything since `reset` belongs."""
