"""The connector is out only for steps in which vLLM has nothing to tell it."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

from benchmarks import steps
from benchmarks.steps import Connector

BLOCK = 128


class Core:
    """An engine with one request that goes on."""

    def __init__(self) -> None:
        self.request = SimpleNamespace(num_computed_tokens=1)
        self.connector = SimpleNamespace(has_pending_push_work=lambda: False)
        self.scheduler = SimpleNamespace(
            connector=self.connector,
            running=[self.request],
            waiting=[],
            finished_req_ids=set(),
            schedule=lambda throttle: SimpleNamespace(num_scheduled_tokens={"request": 1}),
            has_requests=lambda: False,
        )
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK))
        self.step_fn = self.step
        self.connected: list[bool] = []

    def step(self) -> None:
        with_it = self.scheduler.connector is not None
        assert with_it == kv_transfer_state.has_kv_transfer_group()
        self.connected.append(with_it)
        self.scheduler.schedule(False)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
    return Core()


@pytest.fixture
def recorder(core: Core) -> steps._Recorder:
    return steps._Recorder(core)


def run(core: Core, count: int) -> list[bool]:
    core.connected.clear()
    for _ in range(count):
        core.step_fn()
    return core.connected


@pytest.mark.parametrize(
    ("state", "four_steps"),
    [
        (Connector.IN, [True] * 4),
        (Connector.OUT, [False] * 4),
        (Connector.IN_TURNS, [True, False, False, True]),
    ],
)
def test_it_is_out_always_or_in_two_of_four_steps(
    core: Core, recorder: steps._Recorder, state: Connector, four_steps: list[bool]
) -> None:
    recorder.turn(state)
    assert run(core, 8) == four_steps * 2
    assert [step.connector for step in recorder.steps] == core.connected


@pytest.mark.parametrize(
    "happens",
    [
        lambda core: core.scheduler.waiting.append("new"),
        lambda core: core.scheduler.finished_req_ids.add("old"),
        lambda core: setattr(core.request, "num_computed_tokens", 2 * BLOCK),
        lambda core: setattr(core.connector, "has_pending_push_work", lambda: True),
    ],
    ids=["a request waits", "a request has ended", "a block is full", "a job runs"],
)
def test_it_is_in_and_nothing_is_counted_where_vllm_tells_it_something(
    core: Core, recorder: steps._Recorder, happens: Callable[[Core], object]
) -> None:
    recorder.turn(Connector.IN_TURNS)
    happens(core)
    assert run(core, 4) == [True] * 4
    assert recorder.steps == []
