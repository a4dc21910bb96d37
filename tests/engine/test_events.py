"""What routers learn of the pool, as vLLM's own events."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import Medium, OffloadKey

from tests.engine import test_adapters
from tests.engine.scheduling import Scheduling, chunks, waiting
from tests.engine.vllm_scheduler import BLOCK_TOKENS, Engine, MakeEngine, engine_config
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.pool.pool import flush


@pytest.fixture
def vllm() -> Scheduling:
    return Scheduling(slots=8, events=True)


class Events:
    """Chunks that were reported since the last look."""

    def __init__(self, vllm: Scheduling) -> None:
        stored: list[OffloadKey] = []
        removed: list[OffloadKey] = []
        for event in vllm.manager.take_events():
            assert (event.medium, event.locality, event.ownership) == (Medium.CPU, None, None)
            (removed if event.removed else stored).extend(event.keys)
        assert not vllm.manager.has_events or vllm.manager.has_pending_work()
        assert len({*stored}) == len(stored)
        assert len({*removed}) == len(removed)
        self.stored, self.removed = {*stored}, {*removed}


class TestManager:
    def test_nothing_is_collected_unless_vllm_publishes_events(self) -> None:
        vllm = Scheduling(slots=4)
        vllm.fill(chunks("prompt", 4))
        vllm.fill(chunks("other", 4))
        flush(vllm.pool)
        assert not vllm.manager.has_events
        assert [*vllm.manager.take_events()] == []

    def test_chunks_are_stored_once_they_are_complete(self, vllm: Scheduling) -> None:
        storing = vllm.ask(3)
        begun = vllm.begin_store(storing, storing.keys)
        assert not vllm.manager.has_events
        vllm.stored(storing, begun)
        assert vllm.manager.has_events
        events = Events(vllm)
        assert (events.stored, events.removed) == ({*storing.keys}, set())
        assert not vllm.manager.has_events

    def test_chunks_that_a_store_evicts_are_removed(self, vllm: Scheduling) -> None:
        first, second = chunks("first", 6), chunks("second", 6)
        vllm.fill(first)
        assert Events(vllm).stored == {*first}
        vllm.fill(second)
        events = Events(vllm)
        assert events.stored == {*second}
        assert events.removed == {*vllm.tier.evicted_keys}
        assert len(events.removed) == 4

    def test_chunks_evicted_ahead_are_removed(self) -> None:
        vllm = Scheduling(slots=128, events=True)
        vllm.fill(chunks("prompt", 128))
        assert len(Events(vllm).stored) == 128
        vllm.end_step()
        assert Events(vllm).removed == {*vllm.tier.evicted_keys} != set()

    def test_chunks_that_a_store_lacks_are_removed(self, vllm: Scheduling) -> None:
        """vLLM keeps what it would say of them until then."""
        storing = vllm.ask(3)
        keys = vllm.begin_store(storing, storing.keys)
        vllm.manager.void_store(storing.req_id, keys[2:])
        vllm.stored(storing, keys)
        events = Events(vllm)
        assert (events.stored, events.removed) == ({*keys[:2]}, {*keys[2:]})

    def test_a_flush_removes_them_on_whichever_thread(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 4)
        vllm.fill(keys)
        assert Events(vllm).stored == {*keys}
        flush(vllm.pool)
        assert Events(vllm).removed == {*keys}
        vllm.fill(keys)
        assert Events(vllm).stored == {*keys}

    def test_fetched_chunks_are_stored_once_they_are_looked_up(self, vllm: Scheduling) -> None:
        """vLLM knows their tokens then."""
        asked = waiting(vllm, 4)
        vllm.tier.end(vllm.tier.fetches[0])
        assert Events(vllm).stored == set()
        assert vllm.attempt(asked) == 4
        assert Events(vllm).stored == {*asked.keys}

    def test_chunks_that_did_not_arrive_are_not_stored(self, vllm: Scheduling) -> None:
        asked = waiting(vllm, 4)
        vllm.tier.peers_hold()
        vllm.tier.end(vllm.tier.fetches[0], arrived=2)
        assert vllm.attempt(asked) == 2
        assert Events(vllm).stored == {*asked.keys[:2]}

    def test_chunks_fetched_for_no_request_are_stored_at_once(self, vllm: Scheduling) -> None:
        (row,) = vllm.pool.reserve(chunks("hot", 1), redundant=None).rows
        assert vllm.pool.commit(row, checksum=1)
        assert Events(vllm).stored == {row.key}

    def test_an_adapter_s_chunks_have_vllm_s_keys(self, vllm: Scheduling, tmp_path: Path) -> None:
        vllm.manager.adapters = test_adapters.Loaded(vllm.clock)
        lora = test_adapters.request(test_adapters.adapter(tmp_path / "a"))
        test_adapters.TestRequests.run(vllm, "stores", lora)
        assert Events(vllm).stored == {*chunks("prompt", 4)}
        held = [row.key for row in vllm.tier.stored_rows]
        flush(vllm.pool)
        assert Events(vllm).removed == {*chunks("prompt", 4)}

        fetching = vllm.ask(4, "fetches")
        vllm.tier.peers_hold(a=held)
        assert vllm.attempt(fetching, lora_request=lora) is None
        vllm.tier.end(vllm.tier.fetches[0])
        assert vllm.attempt(fetching, lora_request=lora) == 4
        assert Events(vllm).stored == {*chunks("prompt", 4)}


PROMPT = list(range(300, 300 + 300))
"""Two whole chunks and a bit."""


class Publishing(Engine):
    def __init__(
        self,
        folder: Path,
        caches: KVCacheConfig,
        monkeypatch: pytest.MonkeyPatch,
        *,
        describes: bool,
    ) -> None:
        config = engine_config(
            folder,
            extra={"self_describing_kv_events": describes},
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        super().__init__(config, caches, monkeypatch)
        self._publish = Mock()
        monkeypatch.setattr(self.scheduler.kv_event_publisher, "publish", self._publish)

    def published(self) -> list[KVCacheEvent]:
        batches = [call.args[0] for call in self._publish.call_args_list]
        self._publish.reset_mock()
        return [event for batch in batches for event in batch.events]

    def of_the_pool(self) -> list[BlockStored | BlockRemoved]:
        return [
            event
            for event in self.published()
            if isinstance(event, BlockStored | BlockRemoved) and event.medium == MEDIUM_CPU
        ]

    def compute(self, name: str = "r") -> None:
        self.ask(name, PROMPT, tokens=2)
        self.run()
        self.step()  # in which the last store ends


@pytest.fixture
def engine(
    model_folder: Path, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> Publishing:
    return Publishing(model_folder, cache_config, monkeypatch, describes=True)


def hashes(events: Sequence[BlockStored | BlockRemoved]) -> list[object]:
    return [block for event in events for block in event.block_hashes]


class TestConnector:
    def test_events_say_what_the_chunks_are(self, engine: Publishing) -> None:
        engine.compute()
        # In any order: each says what comes before it.
        first, second = sorted(engine.of_the_pool(), key=lambda event: event.token_ids)
        assert isinstance(first, BlockStored)
        assert isinstance(second, BlockStored)
        assert [*first.token_ids, *second.token_ids] == PROMPT[:256]
        assert first.block_size == BLOCK_TOKENS
        assert second.parent_block_hash == first.block_hashes[-1]

    def test_without_a_description_an_event_names_a_chunk_s_last_block(
        self, model_folder: Path, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM's own tiers do the same."""
        engine = Publishing(model_folder, cache_config, monkeypatch, describes=False)
        engine.compute()
        events = engine.of_the_pool()
        assert [(len(event.block_hashes), event.group_idx) for event in events] == [(1, 0)] * 2

    @pytest.mark.parametrize("refused", [False, True])
    def test_a_reset_removes_every_block_that_was_stored(
        self, engine: Publishing, refused: bool
    ) -> None:
        """vLLM forgets, with a reset, which blocks a chunk has."""
        engine.compute()
        stored = hashes(engine.of_the_pool())
        assert len(stored) == 2 * 4
        if refused:
            engine.ask("runs", range(1000, 1020), tokens=9)
            engine.step()
        assert engine.scheduler.reset_prefix_cache() is not refused
        engine.ask("next", [1, 2, 3], tokens=2)
        engine.step()
        events = engine.published()
        assert any(isinstance(event, AllBlocksCleared) for event in events) is not refused
        removed = [event for event in events if isinstance(event, BlockRemoved)]
        assert sorted(hashes(removed)) == sorted(stored)  # type: ignore[type-var]

    def test_what_was_stored_before_vllm_clears_late_is_reported_again(
        self, engine: Publishing
    ) -> None:
        """vLLM refuses to reset its own prefix cache while anything runs."""
        engine.ask("runs", range(1000, 1020), tokens=9)
        engine.step()
        assert not engine.scheduler.reset_prefix_cache()
        engine.ask("stores", PROMPT, tokens=2)
        while not engine.own.pool.counts().ready:
            engine.step()
        stored = engine.of_the_pool()
        engine.run()
        engine.step()
        cleared, *again = engine.published()[-3:]
        assert isinstance(cleared, AllBlocksCleared)
        assert sorted(hashes(again)) == sorted(hashes(stored))  # type: ignore[arg-type, type-var]

    def test_steps_are_counted_whether_or_not_there_are_events(
        self, engine: Publishing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ended = Mock(wraps=engine.own.manager.steps.end)
        monkeypatch.setattr(engine.own.manager.steps, "end", ended)
        engine.compute()
        taken = ended.call_count
        engine.step()
        assert ended.call_count == taken + 1

    def test_an_error_of_ours_costs_the_events(
        self, engine: Publishing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine.own.manager, "take_events", Mock(side_effect=ArithmeticError))
        engine.compute()
        assert engine.of_the_pool() == []
        assert engine.own.manager.errors.count > 0

    def test_vllm_is_not_asked_where_there_are_none(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine()
        asked = Mock(return_value=())
        monkeypatch.setattr(XavierConnector.__mro__[2], "take_events", asked)
        engine.ask("r", PROMPT, tokens=2)
        engine.run()
        engine.connector.reset_cache()
        engine.step()
        assert not asked.called
