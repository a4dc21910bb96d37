"""What is on about one request, from its first scheduling attempt to its end.

Belongs to the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.v1.kv_offload.base import ReqContext

from xinference_xavier.engine.versions import known_keys
from xinference_xavier.engine.waiting import Wait
from xinference_xavier.transfer.fetch import Fetch, FetchState

GROUP = slice(-4, None)
"""The part of an offload key that numbers its KV-cache group."""


class Request:
    __slots__ = (
        "asked",
        "computes",
        "context",
        "deadline",
        "fetched",
        "fetches",
        "first",
        "given_up",
        "pending_since",
        "trace_headers",
        "wait",
        "wanted",
    )

    def __init__(self, context: ReqContext) -> None:
        self.context = context
        self.wanted: list[bytes] = []  # this pass's RETRYs, to be fetched
        self.fetches: list[Fetch] = []  # that it waits for
        self.first: set[bytes] = set()  # the first chunk of each group in each of them
        self.deadline: float | None = None  # of all its waiting together
        self.pending_since = 0.0  # on the clock of `Steps.idle_time`
        self.given_up = False
        self.computes = False  # what it could have fetched, as that is expected to be quicker
        self.fetched: set[bytes] = set()  # came from a peer for this request
        self.trace_headers: Mapping[str, str] | None = None
        self.asked = False  # who computes what nobody has, or whether to ask
        self.wait: Wait | None = None  # for who does; stays when it is over

    def group_of(self, key: bytes) -> list[bytes]:
        """The keys of its chunks in the KV-cache group of `key`, in order; none if vLLM is so old
        that it tells no keys in advance."""
        return [other for other in known_keys(self.context) if other[GROUP] == key[GROUP]]

    @property
    def pending(self) -> Fetch | None:
        """The first of its fetches that is not over; none if one before it has failed, since what
        follows a gap is of no use."""
        committed = FetchState.COMMITTED
        fetch = next((fetch for fetch in self.fetches if fetch.state is not committed), None)
        return fetch if fetch is not None and fetch.state is FetchState.PENDING else None

    def waits_for(self, fetches: list[Fetch]) -> None:
        """In the order of their rows. Meanwhile it gets RETRYs from `first`."""
        self.fetches = fetches
        self.first = _first_of_each_group(self.wanted).union(
            *(_first_of_each_group(row.key for row in fetch.rows) for fetch in fetches)
        )

    def conclude(self) -> None:
        """The fetches are over for us: what they brought are HITs, what they did not are MISSes."""
        for fetch in self.fetches:
            self.fetched.update(row.key for row in fetch.committed)
            self.given_up |= fetch.state is not FetchState.COMMITTED
        self.fetches = []


def _first_of_each_group(keys: Iterable[bytes]) -> set[bytes]:
    first: dict[bytes, bytes] = {}
    for key in keys:
        first.setdefault(key[GROUP], key)
    return set(first.values())
