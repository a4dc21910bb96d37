"""Routers of other projects follow the pools: real engines publish vLLM's events over ZeroMQ."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash

from tests.e2e.engines import CHUNKS, POOL_ROWS, ROW_BYTES, GatedEngine, prompt
from tests.harness.engines import CHUNK
from tests.harness.replicas import MODEL, TrackerProcess, wait_until
from xinference_xavier.config import XavierConfig
from xinference_xavier.protocol.tracker import unpack

KEY_BYTES = 36
_seeds = itertools.count(1, 2)


class Router:
    """Listens to one engine, and knows what is in its host's memory."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe("")
        self._read = msgspec.msgpack.Decoder(KVEventBatch)
        self.heard = 0  # batches
        self.blocks: set[object] = set()

    def listen(self) -> None:
        """Take what has come."""
        while self._socket.poll(0):
            *_, batch = self._socket.recv_multipart()
            self.heard += 1
            for event in self._read.decode(batch).events:
                match event:
                    case BlockStored(medium=medium) if medium == MEDIUM_CPU:
                        self.blocks.update(event.block_hashes)
                    case BlockRemoved(medium=medium) if medium == MEDIUM_CPU:
                        self.blocks.difference_update(event.block_hashes)

    def forgets(self) -> bool:
        """Whether it has heard that all blocks are gone."""
        self.listen()
        return not self.blocks

    def close(self) -> None:
        self._socket.close(0)


class Publisher:
    """An engine, and a router that listens to it."""

    def __init__(self, name: str, model: Path, tracker: TrackerProcess, folder: Path) -> None:
        endpoint = f"ipc://{folder / name}"
        config = XavierConfig(
            model_uid=MODEL,
            tracker_address=tracker.address,
            pool_bytes=POOL_ROWS * ROW_BYTES,
            min_fetch_tokens=128,
        )
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
        self._tracker = tracker
        gates = folder / f"gates-of-{name}"
        self.engine = GatedEngine(name, model, config, gates, kv_events_config=events)
        self.router = Router(endpoint)

    def held(self) -> set[object]:
        """The blocks that its pool holds, as the tracker has heard."""
        update = self._tracker.call("observe", "", 0, 0, 0.0).update
        own = (each for each in update.changes if each.incarnation == self.engine.name)
        packed = b"".join(each.added for each in own)
        keys = unpack(packed, KEY_BYTES)
        hashes = (BlockHash(get_offload_block_hash(OffloadKey(key))) for key in keys)
        return {*map(maybe_convert_block_hash, hashes)}

    def agrees(self, least: int) -> bool:
        """Whether router and tracker have heard of the same blocks, at least so many."""
        self.router.listen()
        return len(self.router.blocks) >= least and self.router.blocks == self.held()

    def step(self) -> None:
        """Events are published with the engine's steps. Nothing of this request is stored."""
        self.engine.answer([*range(300, 310)], tokens=1)

    def close(self) -> None:
        self.engine.close()
        self.router.close()


@pytest.fixture
def two(model_folder: Path, tmp_path: Path) -> Iterator[list[Publisher]]:
    tracker = TrackerProcess()
    started = [Publisher(name, model_folder, tracker, tmp_path) for name in ("a", "b")]
    try:
        for each in started:
            each.engine.wait_until_ready()
        yield started
    finally:
        for each in started:
            each.close()
        tracker.kill()


def test_a_router_knows_what_each_pool_holds(two: list[Publisher]) -> None:
    """What was stored, fetched, evicted, flushed and reset."""
    one, other = two
    for each in two:

        def heard(each: Publisher = each) -> bool:
            each.engine.answer(prompt(next(_seeds)))
            each.router.listen()
            return each.router.heard > 0

        wait_until(heard, "the router is connected", interval=0.1)
    flush(one)  # they did not listen from the beginning

    def fetches() -> bool:
        asked = prompt(next(_seeds))
        one.engine.answer(asked)
        wait_until(lambda: one.agrees(CHUNKS), "the router knows what was stored")
        return other.engine.answer(asked).cached == CHUNKS * CHUNK

    wait_until(fetches, "the other fetches", interval=0.1)
    wait_until(lambda: other.agrees(CHUNKS), "the router knows what was fetched")

    for _ in range(2 * POOL_ROWS // CHUNKS):
        one.engine.answer(prompt(next(_seeds)))
    wait_until(lambda: one.agrees(POOL_ROWS // 2), "the router knows what was evicted")
    assert len(one.router.blocks) <= POOL_ROWS

    flush(one)
    one.step()
    wait_until(one.router.forgets, "the router knows of the flush")

    other.engine.answer(prompt(next(_seeds)))
    wait_until(lambda: other.agrees(CHUNKS), "the router knows what was stored")
    wait_until(lambda: other.engine.call("reset_prefix_cache"), "no block is in use")
    other.step()
    wait_until(other.router.forgets, "the router knows of the reset")


def flush(publisher: Publisher) -> None:
    """Empty the pools of all engines of the model."""
    assert publisher._tracker.call("flush")["unreachable"] == []
