"""Figures of requests: where their prompts' tokens came from, how long people wait for an answer to
begin, by that source, and what prompts have in common. vLLM's own metrics get the tokens, too.

As in vLLM's own metric, a wait begins when the engine's frontend takes the request, by the wall
clock: a request that arrives during a step waits for its end. Requests for whose tokens nobody
waits do not count.

Belongs to the scheduler thread; any thread may read `seconds` and `counts`.
"""

import time
from collections.abc import Callable
from dataclasses import fields

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata
from vllm.v1.request import Request as VllmRequest

from xinference_xavier.engine.request import Request
from xinference_xavier.engine.workload import is_for_client, own_id
from xinference_xavier.limits import LIMIT
from xinference_xavier.stats.schema import (
    HIT_SOURCES,
    AnswerSeconds,
    FirstTokens,
    Hits,
    PromptStats,
)

_PREFIX = "vllm:xavier_"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    return {
        f"{_PREFIX}{source.name}_tokens": OffloadingCounterMetadata(
            documentation=source.metadata["figure"].text
        )
        for source in fields(Hits)
    }


def stats_of(hits: Hits) -> OffloadingConnectorStats:
    """What vLLM adds to its counters."""
    stats = OffloadingConnectorStats()
    for source in HIT_SOURCES:
        if tokens := getattr(hits, source):
            stats.increase_counter(f"{_PREFIX}{source}_tokens", tokens)
    return stats


class FirstTokenTimes:
    """`clock` returns seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.seconds = FirstTokens()
        self._clock = clock
        self._awaited: dict[str, tuple[VllmRequest, Request]] = {}

    def scheduled(self, request: VllmRequest, own: Request) -> None:
        """vLLM has scheduled the request. It may be preempted, and scheduled again."""
        is_awaited = own.source and is_for_client(own_id(request.request_id))
        if not request.num_output_tokens and is_awaited:
            self._awaited[request.request_id] = request, own

    def step_ended(self) -> None:
        """vLLM has appended the step's tokens to its requests."""
        for req_id, (request, own) in [*self._awaited.items()]:
            if request.num_output_tokens:
                times: AnswerSeconds = getattr(self.seconds, own.source)
                times.observe(max(0.0, self._clock() - request.arrival_time))
            if request.num_output_tokens or request.is_finished():
                del self._awaited[req_id]


class CommonBeginnings:
    """What the prompts of one replica have in common with each other and with its peers'.

    `holders` returns the set of the peers that hold a chunk, as bits."""

    def __init__(self, holders: Callable[[bytes], int]) -> None:
        self.counts = PromptStats()
        self._holders = holders
        self._salts: dict[int, None] = {}  # hashes, the latest is last

    def scheduled(self, request: Request, prompt: int, found: int) -> None:
        """The request is scheduled for the first time. The first `found` of the `prompt`'s tokens
        need not be computed."""
        counts, chunk = self.counts, request.layout.chunk_tokens
        counts.seen += 1
        counts.longest = max(counts.longest, found)
        counts.new_salts += request.salt is not None and self._is_new(hash(request.salt))
        if prompt < chunk:
            counts.shorter += 1
        elif found < chunk:
            counts.new += not any(map(self._holders, request.main_keys()[:1]))

    def _is_new(self, salt: int) -> bool:
        is_new = salt not in self._salts
        self._salts.pop(salt, None)
        self._salts[salt] = None
        if len(self._salts) > LIMIT:
            del self._salts[next(iter(self._salts))]
        return is_new
