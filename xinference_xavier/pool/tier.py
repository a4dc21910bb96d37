"""What the scheduler has asked of other threads: fetches of rows, and claims.

One thread writes each, any thread reads it. Memory: the caller reserves rows in the pool. From then
on only the fetch writes them, until it commits them, pinned once, or aborts them. If a slot may
still be written after the fetch has ended, its row is quarantined first.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from xinference_xavier.pool.pool import Row


class FetchState(Enum):
    PENDING = auto()
    COMMITTED = auto()
    ROLLED_BACK = auto()


@dataclass(eq=False)
class Fetch:
    """One load of rows from one source.

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
