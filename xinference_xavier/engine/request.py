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
        "fetch",
        "fetched",
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
        self.fetch: Fetch | None = None
        self.first: set[bytes] = set()  # the fetch's first chunk of each group
        self.deadline: float | None = None  # of all its waiting together
        self.pending_since = 0.0  # on `DecisionTime`'s clock
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

    def waits_for(self, fetch: Fetch) -> None:
        """It gets a RETRY from each group's first chunk until the fetch is over."""
        self.fetch = fetch
        self.first = _first_of_each_group(self.wanted)

    def conclude(self) -> None:
        """The fetch is over for us: what it brought are HITs, what it did not are MISSes."""
        if self.fetch is not None:
            self.fetched.update(row.key for row in self.fetch.committed)
            self.given_up = self.fetch.state is not FetchState.COMMITTED
            self.fetch = None


def _first_of_each_group(keys: Iterable[bytes]) -> set[bytes]:
    first: dict[bytes, bytes] = {}
    for key in keys:
        first.setdefault(key[GROUP], key)
    return set(first.values())
