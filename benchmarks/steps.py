"""What each step of an engine takes, with its connector and with the connector taken out.

Both are measured in one process. The connector is taken out for whole requests while the engine has
none, or for single steps in which all requests only go on within their blocks, so that vLLM has
nothing to tell it. This extends vLLM's worker, which runs in the engine's process here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple


class Connector(Enum):
    IN = "in"
    OUT = "out"
    IN_TURNS = "in turns"
    """Out for two of four steps."""


class Step(NamedTuple):
    """Seconds of a step that computed `tokens` for `requests`, with the connector or without."""

    connector: bool
    requests: int
    tokens: int
    seconds: float


class StepTimes:
    """vLLM mixes this into the worker through `worker_extension_cls`."""

    def benchmark_connector(self, state: str) -> None:
        """Call it while the engine has no requests."""
        _recorder().turn(Connector(state))

    def benchmark_saving(self, everything: bool) -> None:
        """Save `everything` that is computed on the disk, or only what is used again."""
        connector = _engine_core(sys._getframe()).scheduler.connector
        connector._manager._tier.disk._saves_all = everything

    def benchmark_steps(self) -> list[Step]:
        """The steps since the last call."""
        steps = _recorder().steps
        taken = steps[:]
        steps.clear()
        return taken


_made: list[_Recorder] = []


def _recorder() -> _Recorder:
    if not _made:
        _made.append(_Recorder(_engine_core(sys._getframe())))
    return _made[0]


def _engine_core(frame: FrameType | None) -> Any:
    """The engine whose thread this is."""
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "scheduler") and hasattr(caller, "step_fn"):
            return caller
        frame = frame.f_back
    raise LookupError("the worker is not in its engine's process")


class _Recorder:
    def __init__(self, core: Any) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        self.steps: list[Step] = []
        self._core = core
        self._state = Connector.IN
        self._turn = 0
        self._connector = core.scheduler.connector
        self._group: Any = kv_transfer_state
        self._agent = self._group._KV_CONNECTOR_AGENT
        self._scheduled: Any = None
        schedule, step = core.scheduler.schedule, core.step_fn
        core.scheduler.schedule = lambda *arguments: self._schedule(schedule, *arguments)
        core.step_fn = lambda: self._step(step)

    def turn(self, state: Connector) -> None:
        assert not self._core.scheduler.has_requests()
        self._state = state
        self._put(state is not Connector.OUT)

    def _put(self, connected: bool) -> None:
        self._core.scheduler.connector = self._connector if connected else None
        self._group._KV_CONNECTOR_AGENT = self._agent if connected else None

    def _may_be_out(self) -> bool:
        """Whether no request begins, ends, or gets a block in the next step, and no job runs."""
        scheduler, block = self._core.scheduler, self._core.vllm_config.cache_config.block_size
        return not (
            scheduler.waiting
            or scheduler.finished_req_ids
            or self._connector.has_pending_push_work()
        ) and all(request.num_computed_tokens % block for request in scheduler.running)

    def _schedule(self, schedule: Callable[..., Any], *arguments: Any) -> Any:
        self._scheduled = schedule(*arguments)
        return self._scheduled

    def _step(self, step: Callable[[], Any]) -> Any:
        connected = self._state is not Connector.OUT
        in_turns = self._state is Connector.IN_TURNS and self._may_be_out()
        if in_turns:
            self._turn += 1
            connected = self._turn % 4 < 2
            self._put(connected)
        self._scheduled = None
        began = time.perf_counter()
        found = step()
        seconds = time.perf_counter() - began
        if in_turns:
            self._put(True)
        if self._scheduled is not None and (in_turns or self._state is not Connector.IN_TURNS):
            counts = self._scheduled.num_scheduled_tokens
            self.steps.append(Step(connected, len(counts), sum(counts.values()), seconds))
        return found
