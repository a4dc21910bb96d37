"""What our connector adds to vLLM's."""

from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_events import MEDIUM_GPU
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import KVCacheConfig

from tests.engine.vllm_scheduler import (
    Engine,
    MakeEngine,
    engine_config,
    request_of,
    slide_one_layer,
)
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.errors import ConfigError


def worker(config: VllmConfig, cache_config: KVCacheConfig) -> XavierConnector:
    return XavierConnector(config, KVConnectorRole.WORKER, cache_config)


@pytest.mark.parametrize(("chunk_tokens", "blocks"), [(None, 4), (256, 8)])
def test_vllm_and_the_spec_get_the_chunk_size(
    model_folder: Path, cache_config: KVCacheConfig, chunk_tokens: int | None, blocks: int
) -> None:
    """vLLM 0.33 and later also derive sliding windows from it, before there is a spec."""
    config = engine_config(model_folder, chunk_tokens)
    for _ in range(2):  # one process may make a worker's connector and a scheduler's
        spec = worker(config, cache_config)._spec()
        assert spec.blocks_per_chunk == spec.config.cache.blocks_per_chunk == blocks
        assert build_offloading_config(config, cache_config).cache.blocks_per_chunk == blocks


def test_a_chunk_size_that_does_not_fit_the_model_is_refused(
    model_folder: Path, cache_config: KVCacheConfig
) -> None:
    with pytest.raises(ConfigError, match=r"xavier_chunk_tokens=100 .* use 128"):
        worker(engine_config(model_folder, chunk_tokens=100), cache_config)


def test_a_chunk_is_not_longer_than_the_sliding_window(
    model_folder: Path, cache_config: KVCacheConfig
) -> None:
    slide_one_layer(cache_config, 100)
    assert worker(engine_config(model_folder), cache_config)._spec().blocks_per_chunk == 3


def test_what_a_spec_has_started_ends_with_the_connector(
    model_folder: Path, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica, on the scheduler's side."""
    closed: list[XavierSpec] = []
    monkeypatch.setattr(XavierSpec, "close", lambda spec: closed.append(spec))
    connector = worker(engine_config(model_folder), cache_config)
    spec = connector._spec()
    connector.shutdown()
    assert closed == [spec]


def test_vllm_s_scheduler_is_asked_only_where_something_happens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine.connector.connector_scheduler
    build = Mock(side_effect=scheduler.build_connector_meta)
    monkeypatch.setattr(scheduler, "build_connector_meta", build)

    def asks(steps: int = 1) -> int:
        before = build.call_count
        for _ in range(steps):
            engine.step()
        return build.call_count - before

    engine.ask("first", range(300, 360), tokens=30)
    assert asks() == 1, "it begins"
    assert asks(4) == 0
    assert asks() == 1, "it gets a third block"
    engine.ask("second", range(400, 460), tokens=30)
    assert asks() == 1
    assert asks() == 0
    engine.connector.reset_cache()
    assert asks() == 1, "the workers must flush"
    engine.run()
    assert build.call_args.args[0].finished_req_ids == {"second"}


def test_a_step_s_end_is_left_out_only_if_it_has_nothing_to_do(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = engine.own.manager
    ended = Mock(side_effect=manager.on_schedule_end)
    monkeypatch.setattr(manager, "on_schedule_end", ended)
    engine.ask("r", range(300, 360), tokens=30)
    engine.step()
    assert ended.call_count == 1
    engine.step()
    assert ended.call_count == 1
    manager.pass_end_is_due = True
    engine.step()
    assert ended.call_count == 2
    engine.step()
    assert ended.call_count == 2


def test_vllm_publishes_events_of_its_own_blocks_and_keeps_no_description_of_the_pool_s(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep the tokens of each chunk until an event says that the chunk is gone."""
    engine = make_engine(
        extra={"self_describing_kv_events": True},
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    publish = Mock()
    monkeypatch.setattr(engine.scheduler.kv_event_publisher, "publish", publish)
    engine.ask("r", range(300, 300 + 300), tokens=2)
    engine.run()
    engine.step()  # in which the last store ends
    assert engine.own.pool.counts().ready == 2
    events = [event for call in publish.call_args_list for event in call.args[0].events]
    assert {event.medium for event in events} == {MEDIUM_GPU}
    assert not engine.connector.connector_scheduler._events_tracker._pending_event_metadata


def test_all_that_is_counted_is_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: Counter[str] = Counter()
    report = engine.connector.get_kv_connector_stats

    def recorded() -> KVConnectorStats | None:
        stats = report()
        reported.update({} if stats is None else stats.reduce())
        return stats

    monkeypatch.setattr(engine.connector, "get_kv_connector_stats", recorded)
    for req_id in ("first", "again"):
        engine.ask(req_id, range(300, 430), tokens=5)
        engine.run()
        engine.forget()
    assert reported["vllm:xavier_computed_tokens"] == 130 + 2
    assert reported["vllm:xavier_local_pool_tokens"] == 128
    assert engine.connector.get_kv_connector_stats() is None


@pytest.mark.parametrize("window", [None, 128])
def test_vllm_stores_as_much_without_requests_that_go_on_within_their_blocks(
    make_engine: MakeEngine,
    cache_config: KVCacheConfig,
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
) -> None:
    """Prompts and answers end everywhere in a chunk, and one request is preempted."""
    if window is not None:
        slide_one_layer(cache_config, window)
    preempted: set[str] = set()

    def stored() -> tuple[list[bytes], list[int]]:
        engine = make_engine()
        for number, (prompt, answer) in enumerate([(127, 100), (128, 9), (129, 129), (20, 150)]):
            engine.ask(f"r{number}", range(300 * number, 300 * number + prompt), answer)
            for _ in range(number * 3):
                preempted.update(engine.step().preempted_req_ids or ())
        while engine.scheduler.has_requests():
            preempted.update(engine.step().preempted_req_ids or ())
        keys = [row.key for row in engine.own.tier.stored_rows]
        return sorted(keys), sorted(engine.stored_blocks)

    without = stored()
    assert preempted
    monkeypatch.setattr(f"{XavierConnector.__module__}.is_steady_decode", lambda step: False)
    monkeypatch.setattr(f"{XavierConnector.__module__}.drop_unchanged_requests", lambda step: step)
    assert stored() == without


@pytest.mark.parametrize("answer", [55, 56, 57])
def test_the_slot_of_the_last_answered_token_is_not_stored(engine: Engine, answer: int) -> None:
    """Nobody computes it. An answer of 56 tokens ends on the edge of the second chunk."""
    engine.ask("r", range(300, 500), answer)
    engine.run()
    computed = 200 + answer - 1
    assert len(engine.stored_blocks) == computed // 128 * 4


def test_a_prompt_of_tokens_and_embeddings_is_not_shared(engine: Engine) -> None:
    """vLLM's keys do not tell which of its positions are embeddings. If this fails because they do,
    such prompts can be shared."""
    embeddings = {"prompt_embeds": torch.rand(300, 8)}
    tokens = {"prompt_is_token_ids": [True] * 300}
    one, other = (
        request_of(
            "r", [0] * 300, 1, engine.hasher, **embeddings, prompt_is_token_ids=[is_token] * 300
        )
        for is_token in (True, False)
    )
    assert one.block_hashes == other.block_hashes
    engine.ask("mixed", [0] * 300, 2, **embeddings, **tokens)
    engine.run()
    engine.step()
    assert engine.own.pool.counts().ready == 0
    engine.forget()
    engine.ask("embeddings", [0] * 300, 2, **embeddings)
    engine.run()
    engine.step()
    assert engine.own.pool.counts().ready == 2
    engine.forget()
    engine.ask("mixed again", [0] * 300, 2, **embeddings, **tokens)
    assert engine.step().num_scheduled_tokens == {"mixed again": 300}
