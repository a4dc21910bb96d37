"""Whoever resets vLLM's prefix cache, or has its workers do something that we do not know, may have
changed the weights: nothing from before is used.

vLLM's own scheduler, with our connector and a pool.
"""

from collections.abc import Callable
from functools import partial

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.request import RequestStatus

from tests.engine.vllm_scheduler import Engine

PROMPT = list(range(300, 300 + 300))
"""Two whole chunks and a bit."""
Reset = Callable[[Engine], bool]


def vllms_own(engine: Engine) -> bool:
    return engine.scheduler.reset_prefix_cache()


def with_the_connector(engine: Engine) -> bool:
    return engine.scheduler.reset_prefix_cache(reset_connector=True)


def with_all_that_runs(engine: Engine) -> bool:
    return engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def ready(engine: Engine) -> int:
    return engine.own.pool.counts().ready


def stored(engine: Engine) -> int:
    """The chunks that are ready when all requests have ended."""
    engine.run()
    engine.step()  # in which the last store ends
    return ready(engine)


def hold(engine: Engine) -> None:
    """Compute and store the prompt."""
    engine.ask("before", PROMPT, tokens=2)
    assert stored(engine) == 2


def computed(engine: Engine, name: str, tokens: int = 2) -> int:
    """The prompt's tokens that the engine computes in the first step of a request for it."""
    engine.ask(name, PROMPT, tokens)
    return engine.step().num_scheduled_tokens.get(name, 0)


@pytest.mark.parametrize("reset", [vllms_own, with_the_connector, with_all_that_runs])
def test_no_row_from_before_is_loaded(engine: Engine, reset: Reset) -> None:
    hold(engine)
    assert reset(engine)
    assert ready(engine) == 0
    assert computed(engine, "after") == len(PROMPT)
    assert stored(engine) == 2, "what is computed since is stored"


@pytest.mark.parametrize("reset", [vllms_own, with_the_connector])
def test_a_request_that_goes_on_stores_nothing_that_it_computed_before(
    engine: Engine, reset: Reset
) -> None:
    """vLLM offers all of its chunks again, from the first on."""
    assert computed(engine, "runs", tokens=100) == len(PROMPT)
    assert not reset(engine), "vLLM refuses while blocks are in use"
    assert stored(engine) == 0


def test_blocks_that_vllm_refused_to_forget_are_not_stored(engine: Engine) -> None:
    assert computed(engine, "runs", tokens=100) == len(PROMPT)
    assert not vllms_own(engine)
    assert computed(engine, "hit") < len(PROMPT), "vLLM's own cache still has the old blocks"
    assert stored(engine) == 0
    assert computed(engine, "after") == len(PROMPT), "they are forgotten once nothing runs"
    assert stored(engine) == 2


def test_nor_are_those_of_which_vllm_may_have_reused_a_part(engine: Engine) -> None:
    """It does not tell."""
    engine.scheduler.kv_cache_manager.coordinator.enable_partial_hash_hits = True
    assert computed(engine, "runs", tokens=100) == len(PROMPT)
    assert not vllms_own(engine)
    engine.ask("other", [token + 1000 for token in PROMPT], tokens=2)
    assert stored(engine) == 0


def test_a_request_that_is_preempted_for_the_reset_stores_what_it_computes_afterwards(
    engine: Engine,
) -> None:
    assert computed(engine, "runs") == len(PROMPT)
    assert with_all_that_runs(engine)
    assert ready(engine) == 0
    assert stored(engine) == 2


def test_two_resets_in_a_row_are_one(engine: Engine) -> None:
    """Also while jobs are under way."""
    assert computed(engine, "runs", tokens=100) == len(PROMPT)
    engine.step()
    for reset in (vllms_own, with_the_connector, with_all_that_runs):
        reset(engine)
    engine.run()
    engine.step()
    counts = engine.own.pool.counts()
    assert (counts.filling, counts.pinned) == (0, 0)


def test_what_has_come_since_the_last_reset_is_void_too(engine: Engine) -> None:
    """A name's chunks are fetched although nothing runs."""
    assert vllms_own(engine)
    (row,) = engine.own.pool.reserve([b"of a name"]).rows
    assert engine.own.pool.commit(row)
    assert vllms_own(engine)
    assert ready(engine) == 0


def test_rows_of_jobs_from_before_are_free_when_a_step_that_computes_has_ended(
    engine: Engine,
) -> None:
    """All workers have begun it, and it begins with a flush. If every row were in quarantine, no
    later job could begin. vLLM 0.33 says itself when its workers have ended all jobs."""
    waiting = 0 if hasattr(OffloadingManager, "on_reset_flushed") else 2
    engine.ask("runs", PROMPT, tokens=100)
    while not engine.own.pool.counts().filling:
        engine.step()
    under_way = engine.begin_step()
    assert under_way.total_num_scheduled_tokens
    assert not vllms_own(engine)
    engine.end_step(under_way)
    assert engine.own.pool.counts().quarantined == waiting, "it had begun before"
    engine.scheduler.finish_requests("runs", RequestStatus.FINISHED_ABORTED)
    assert not engine.step().total_num_scheduled_tokens
    assert engine.own.pool.counts().quarantined == waiting
    engine.ask("computes", PROMPT[:10], tokens=100)
    engine.step()
    counts = engine.own.pool.counts()
    assert (counts.quarantined, counts.filling, counts.ready) == (0, 0, 0)


def test_a_refused_reset_leaves_the_engine_alive(engine: Engine) -> None:
    """vLLM preempts all that runs, then refuses because another request loads. Up to 0.32 it fails
    in the next step if a preempted request loads then."""
    hold(engine)
    engine.forget()
    engine.ask("runs", range(1000, 1140), tokens=100)
    for _ in range(3):  # its chunks are stored
        engine.step()
    engine.ask("loads", PROMPT[:140], tokens=2)
    loading = engine.begin_step()
    assert "loads" not in loading.num_scheduled_tokens
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        with_all_that_runs(engine)
    engine.end_step(loading)
    engine.run()
    assert ready(engine) == 0


class TestWeightsInPlace:
    """vLLM keeps its own cache, as those who change weights between two steps want it to."""

    @pytest.mark.parametrize(
        "call",
        [
            lambda core: core.collective_rpc("reload_weights", kwargs={"weights_path": "/tuned"}),
            lambda core: core.collective_rpc(method="update_weights", args=({},)),
            lambda core: core.collective_rpc(lambda worker: worker.model.half()),
            lambda core: core.set_weight_version("step 7"),
        ],
        ids=["reload_weights", "update_weights", "a function", "set_weight_version"],
    )
    def test_no_row_from_before_is_loaded(
        self, engine: Engine, call: Callable[[EngineCore], object]
    ) -> None:
        hold(engine)
        call(engine.core)
        assert ready(engine) == 0
        assert computed(engine, "hit") < len(PROMPT), "vLLM still has the old blocks"
        assert stored(engine) == 0, "and what follows them is of neither"
        engine.ask("other", range(1000, 1300), tokens=2)
        assert stored(engine) == 2
        assert with_the_connector(engine)
        assert computed(engine, "after") == len(PROMPT)
        assert stored(engine) == 2

    def test_a_request_that_goes_on_stores_nothing_of_its_prompt(self, engine: Engine) -> None:
        assert computed(engine, "runs", tokens=100) == len(PROMPT)
        engine.core.collective_rpc("reload_weights")
        assert stored(engine) == 0

    def test_a_call_that_only_reads_costs_nothing(self, engine: Engine) -> None:
        hold(engine)
        engine.core.model_executor.collective_rpc.return_value = ["of a worker"]
        name = "compute_weight_checksums"  # vLLM 0.31 has no method for it
        read = getattr(engine.core, name, partial(engine.core.collective_rpc, name))
        assert read() == ["of a worker"]
        assert ready(engine) == 2

    def test_their_name_is_that_of_the_namespace(self, engine: Engine) -> None:
        engine.core.set_weight_version("step 7")
        assert engine.core.get_weight_version() == "step 7"
        assert engine.own.tier.weights_versions == ["step 7"]
