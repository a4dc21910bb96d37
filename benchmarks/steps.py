"""What each step of an engine takes, with its connector and with the connector taken out.

Both are measured in one process. The connector is taken out for whole requests while the engine has
none, or for single steps in which all requests only go on within their blocks, so that vLLM has
nothing to tell it. This extends vLLM's worker, which runs in the engine's process here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.threads import ThreadTimes


class Connector(Enum):
    IN = "in"
    OUT = "out"
    IN_TURNS = "in turns"
    """Out for two of four steps."""
    TIMED = "timed"
    """In, and each call of it is timed, which itself takes some microseconds a step."""


class Step(NamedTuple):
    """Seconds of a step that computed `tokens` for `requests`, and of its parts.

    `ours` and `vllms` are what the connector's Python takes, while it is timed: of what this
    project has written, and of vLLM's offloading connector that calls it."""

    connector: bool
    requests: int
    tokens: int
    whole: float
    schedule: float
    worker: float
    forward: float
    update: float
    ours: float
    vllms: float


PARTS = Step._fields[4:]


class StepTimes(ThreadTimes):
    """vLLM mixes this into the worker through `worker_extension_cls`."""

    def benchmark_connector(self, state: str) -> None:
        """Call it while the engine has no requests."""
        _recorder(self).turn(Connector(state))

    def benchmark_steps(self) -> list[Step]:
        """The steps since the last call."""
        steps = _recorder(self).steps
        taken = steps[:]
        steps.clear()
        return taken


_made: list[_Recorder] = []


def _recorder(worker: Any) -> _Recorder:
    if not _made:
        _made.append(_Recorder(_engine_core(sys._getframe()), worker))
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
    def __init__(self, core: Any, worker: Any) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        self.steps: list[Step] = []
        self._core = core
        self._state = Connector.IN
        self._turn = 0
        self._connector = core.scheduler.connector
        self._group: Any = kv_transfer_state
        self._agent = self._group._KV_CONNECTOR_AGENT
        self._timing = ExitStack()
        self._seconds: dict[str, float] = {}
        self._scheduled: Any = None
        self._inner = 0.0  # seconds of charged methods that the present one has called
        self._wrap(core.scheduler, "schedule", "schedule")
        self._wrap(core.scheduler, "update_from_output", "update")
        self._wrap(core.model_executor, "execute_model", "worker")
        self._wrap(core.model_executor, "sample_tokens", "worker")
        self._wrap(worker.model_runner, "_model_forward", "forward")
        step = core.step_fn
        core.step_fn = lambda: self._step(step)

    def turn(self, state: Connector) -> None:
        assert not self._core.scheduler.has_requests()
        self._state = state
        self._timing.close()
        self._put(state is not Connector.OUT)
        if state is Connector.TIMED:
            self._time_calls()

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

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = inner(*args, **kwargs)
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began
            if part == "schedule":
                self._scheduled = found
            return found

        setattr(owner, name, timed)

    def _step(self, inner: Callable[[], Any]) -> Any:
        connected = self._state is not Connector.OUT
        in_turns = self._state is Connector.IN_TURNS and self._may_be_out()
        if in_turns:
            self._turn += 1
            connected = self._turn % 4 < 2
            self._put(connected)
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._scheduled = None
        began = time.perf_counter()
        found = inner()
        whole = time.perf_counter() - began
        if in_turns:
            self._put(True)
        if self._scheduled is not None and (in_turns or self._state is not Connector.IN_TURNS):
            counts = self._scheduled.num_scheduled_tokens
            self.steps.append(
                Step(connected, len(counts), sum(counts.values()), whole, **self._seconds)
            )
        return found

    # -- whose Python takes how long ------------------------------------------------------------

    def _time_calls(self) -> None:
        """Time the methods of the connector, of vLLM's that it extends, and of what we put below.

        Not what is called in each layer: timing it takes longer than the call."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
            OffloadingConnector,
        )

        kinds_of_connector = type(self._connector).mro()
        manager = self._connector.connector_scheduler.manager
        worker = self._agent.connector_worker.worker
        ours = kinds_of_connector[: kinds_of_connector.index(OffloadingConnector)]
        for owner, kinds in {
            "ours": (*ours, type(manager), type(worker)),
            "vllms": (OffloadingConnector,),
        }.items():
            for kind in kinds:
                for name, method in list(vars(kind).items()):
                    if name in _IN_EACH_LAYER or name.startswith("_") or not callable(method):
                        continue
                    self._timing.enter_context(
                        patch.object(kind, name, self._charged(method, owner))
                    )

    def _charged(self, method: Callable[..., Any], owner: str) -> Callable[..., Any]:
        """The method, charged to `owner` but for the charged methods that it calls."""

        def charged(*args: Any, **kwargs: Any) -> Any:
            entered = time.perf_counter()
            outer, self._inner = self._inner, 0.0
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                ended = time.perf_counter()
                self._seconds[owner] += ended - began - self._inner
                self._inner = outer + time.perf_counter() - entered

        return charged


_IN_EACH_LAYER = {"has_connector_metadata", "wait_for_layer_load", "save_kv_layer"}
