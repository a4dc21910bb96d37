"""What we use of vLLM without a public name is there, and looks the same in each version."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore

from xinference_xavier.engine import compat


@pytest.mark.parametrize("field", ["kv_cache_block_copies", "kv_connector_block_state"])
def test_copied_blocks_are_noticed(field: str) -> None:
    step = SchedulerOutput.make_empty()
    assert not compat.copies_blocks(step)
    state = SimpleNamespace(boundary_state_offloads={})
    step.kv_connector_block_state = state  # type: ignore[assignment]
    assert not compat.copies_blocks(step)
    state.boundary_state_offloads["request"] = [(0, 7, 128)]
    if field != "kv_connector_block_state":
        step.kv_connector_block_state = None
        setattr(step, field, {"request": [(0, 7, 128)]})
    assert compat.copies_blocks(step)


def test_adapters_that_the_engine_loads_before_their_requests_are_seen() -> None:
    """The connector is made by the scheduler, which is made by the engine."""
    seen: list[Any] = []

    def load(request: Any, load_it: Callable[[], bool]) -> bool:
        seen.append(request)
        return load_it()

    class Core:
        def __init__(self) -> None:
            self.model_executor = object()
            self.make_scheduler()

        def make_scheduler(self) -> None:
            compat.watch_adapters(load)

        def add_lora(self, request: Any) -> bool:
            return request == "good"

    core = Core()
    assert [core.add_lora("good"), core.add_lora("bad")] == [True, False]
    assert seen == ["good", "bad"]


def test_vllm_s_engine_has_what_is_looked_for() -> None:
    source = inspect.getsource(EngineCore.__init__)
    assert source.index("self.model_executor = ") < source.index("self.scheduler: ")
    assert callable(EngineCore.add_lora)
