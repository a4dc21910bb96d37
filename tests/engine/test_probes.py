"""An engine computes probes, whose rows are sampled on another thread, and neither found nor
counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import KVCacheConfig

from tests.engine.scheduling import (
    CHUNK,
    Clock,
    Scheduling,
    assert_nothing_left,
    assert_unused,
    chunks,
)
from tests.engine.vllm_scheduler import BLOCK_TOKENS, Engine, MakeEngine, slide_one_layer
from xinference_xavier.engine.audits import AUDIT_INTERVAL, AUDIT_SHARE
from xinference_xavier.engine.probes import DEEP, OwnRequests, Probe, Probes
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.sketches import Difference, Sketch
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.replica.canary import Audited, Computed, Lost, ProbeResult

VOCABULARY = 999
LONG = (DEEP // CHUNK + 1) * CHUNK
"""The end of the long canary, in tokens."""


class Samples:
    """Samples of rows, all with one value. Each KV-cache group has a layer."""

    def __init__(self, groups: int = 1) -> None:
        self.value = 1.0
        self.sampled = 0
        self.layers = {f"layer {group}" for group in range(groups)}

    def sample(self, rows: Sequence[Row]) -> Sketch:
        self.sampled += len(rows)
        groups = (int.from_bytes(row.key[GROUP]) for row in rows)
        return {f"layer {group}": ("float32", [self.value] * 4) for group in groups}


LAYER: Sketch = {"layer 0": ("float32", [1.0] * 4)}


class Queued:
    """An engine's queue of its own requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], str]] = []
        self.aborted: list[str] = []
        self.error: Exception | None = None
        self.cannot = ""
        self.is_paused = False
        self.salts: list[str] = []

    def ask(self, tokens: Sequence[int], salt: str) -> str | None:
        self.salts.append(salt)
        if self.is_paused:
            return None
        if self.error is not None:
            raise self.error
        self.asked.append((list(tokens), salt))
        return f"probe {len(self.asked)}"

    def abort(self, req_id: str) -> None:
        self.aborted.append(req_id)


class Scene:
    def __init__(
        self, *, audits: bool = True, max_tokens: int = 2 * CHUNK - 1, groups: int = 1
    ) -> None:
        self.samples: Any = Samples(groups)
        self.queued: Any = Queued()
        self.clock = Clock()
        self.computed: float = 0  # tokens; less than none while the engine has something to do
        self.pool = Pool(8)
        self.made = 0  # rows
        self.depth = -1  # of the chunk that is audited, among those that are loaded
        self.probes = Probes(
            lambda tokens: self.computed >= tokens,
            self.queued,
            self.samples,
            self.pool,
            chunk_tokens=CHUNK,
            max_tokens=max_tokens,
            vocabulary=VOCABULARY,
            audits=audits,
            clock=self.clock,
        )
        if self.probes.audits is not None:
            self.probes.audits._choose = lambda ends: ends[self.depth]

    def next(self) -> Probe:
        """The one that the engine asks for now."""
        asked = len(self.queued.asked)
        assert self.probes.work() == []
        assert len(self.queued.asked) == asked + 1
        return self.running()

    def running(self) -> Probe:
        probe = self.probes.by_salt(self.queued.asked[-1][1])
        assert probe is not None
        return probe

    def rows(self, *ends: int, groups: Iterable[int]) -> tuple[list[Row], dict[bytes, int]]:
        """Rows of chunks with these ends, which a worker has just stored."""
        self.made += 1
        found = {
            chunks(f"{self.made}: prompt to {end}", 1, group)[0]: end
            for end in ends
            for group in groups
        }
        by_key = {key[: GROUP.start]: end for key, end in found.items()}
        return self.pool.reserve(found).rows, by_key

    def compute(
        self, probe: Probe, *ends_of_chunks: int, groups: Iterable[int] = (0,)
    ) -> list[ProbeResult]:
        """Compute and store the chunks with these ends; without any, all of the probe's."""
        rows, ends = self.rows(*(ends_of_chunks or probe.layers), groups=groups)
        self.pool.quarantine(*rows)
        self.probes.stored(probe, rows, ends)
        return self.probes.work()

    def load(
        self,
        *ends: int,
        origin: str | None = "peer",
        prompt: int = 0,
        groups: Iterable[int] = (0,),
    ) -> None:
        """`prompt` is its number of tokens, by default one more than its chunks have."""
        rows, by_key = self.rows(*ends, groups=groups)
        for row in rows:
            row.origin = origin
            self.pool.commit(row, pins=1)  # for the request
        assert self.probes.wants_audit()
        self.probes.loaded(range(prompt or max(ends) + 1), rows, by_key)
        self.pool.unpin(rows)

    def after_canaries(self) -> Scene:
        self.compute(self.next())
        self.clock.now += AUDIT_INTERVAL
        self.computed = LONG * AUDIT_SHARE
        return self

    def audits_next(self, *, deep: bool) -> Scene:
        """A prompt of any length, the first chunk alone or a deep one, too."""
        self.after_canaries()
        assert self.probes.audits is not None
        self.probes.audits._max_tokens = 100_000  # without a long canary
        self.probes.audits._deep = deep
        return self


def probing(scene: Scene) -> Scheduling:
    """An engine that computes the scene's probes."""
    vllm = Scheduling()
    assert scene.probes.audits is not None
    scene.pool = scene.probes._pool = scene.probes.audits._pool = vllm.pool
    vllm.manager.probes = scene.probes
    return vllm


class TestCanary:
    def test_it_is_one_chunk_and_equal_everywhere(self) -> None:
        (one, secret), (other, another) = (
            scene.queued.asked[0] for scene in (Scene(), Scene()) if scene.probes.work() == []
        )
        assert one == other
        assert len(one) == CHUNK + 1
        assert all(100 < token < VOCABULARY - 100 for token in one), "special ones are at the ends"
        assert secret != another, "or a client could guess it"

    def test_a_paused_engine_is_asked_again_and_nothing_stays_of_what_it_refused(self) -> None:
        scene = Scene()
        scene.queued.is_paused = True
        for _ in range(3):
            assert scene.probes.work() == []
        assert len(scene.queued.salts) == 3
        assert [scene.probes.by_salt(salt) for salt in scene.queued.salts] == [None] * 3
        scene.queued.is_paused = False
        assert scene.next().req_id

    def test_an_engine_that_cannot_compute_it_is_not_asked(self) -> None:
        scene = Scene()
        scene.queued.cannot = "its model generates nothing"
        assert scene.probes.work() == []
        assert scene.queued.salts == []

    def test_it_is_computed_once(self) -> None:
        scene = Scene()
        probe = scene.next()
        assert scene.probes.work() == []
        assert len(scene.queued.asked) == 1
        (result,) = scene.compute(probe)
        assert result == Computed("canary/128", LAYER)
        assert scene.probes.work() == []
        assert len(scene.queued.asked) == 1
        assert_unused(scene.pool)

    def test_it_ends_when_all_groups_are_sampled(self) -> None:
        """The others could be computed differently. They may be stored one after the other."""
        scene = Scene(groups=2)
        probe = scene.next()
        assert scene.compute(probe) == []
        assert scene.compute(probe, groups=[1]) == [
            Computed("canary/128", {**LAYER, "layer 1": LAYER["layer 0"]})
        ]

    @pytest.mark.parametrize(("seconds", "computed"), [(0, 0), (600, -1)], ids=["idle", "late"])
    def test_a_long_one_follows_when_the_engine_is_idle_or_it_is_late(
        self, seconds: float, computed: float
    ) -> None:
        scene = Scene(max_tokens=100_000)
        scene.computed = -1
        scene.compute(scene.next())
        assert scene.probes.work() == []
        assert len(scene.queued.asked) == 1
        scene.clock.now += seconds
        scene.computed = computed
        (result,) = scene.compute(scene.next())
        tokens, _ = scene.queued.asked[1]
        assert len(tokens) == LONG + 1
        assert isinstance(result, Computed)
        assert result.name == f"canary/{LONG}"

    def test_the_long_one_is_as_long_as_the_engine_allows(self) -> None:
        scene = Scene(max_tokens=5 * CHUNK)
        scene.compute(scene.next())
        assert [len(tokens) for tokens, _ in scene.queued.asked] == [CHUNK + 1, 4 * CHUNK + 1]


class TestLost:
    def test_a_probe_that_is_not_computed_in_time_is_aborted_counted_and_repeated(self) -> None:
        scene = Scene()
        scene.next()
        scene.clock.now += 600
        (result,) = scene.probes.work()
        assert result == Lost()
        assert scene.queued.aborted == ["probe 1"]
        scene.clock.now += 10
        scene.next()

    def test_one_whose_request_ended_early_is_soon_repeated(self) -> None:
        scene = Scene()
        scene.probes.ended(scene.next())
        scene.clock.now += 10
        assert scene.probes.work() == [Lost()]

    def test_rows_that_come_too_late_are_freed_and_not_compared(self) -> None:
        scene = Scene()
        late = scene.next()
        scene.clock.now += 600
        scene.probes.work()
        assert scene.compute(late) == []
        assert_unused(scene.pool)

    def test_an_engine_that_refuses_is_asked_again_later(self) -> None:
        scene = Scene()
        scene.queued.error = RuntimeError("another vLLM")
        assert scene.probes.work() == []
        scene.queued.error = None
        scene.probes.work()
        assert scene.queued.asked == []
        scene.clock.now += 10
        scene.next()


class TestAudit:
    @pytest.fixture
    def scene(self) -> Scene:
        return Scene().audits_next(deep=True)

    def test_the_first_chunk_and_a_deep_one_are_computed_again(self, scene: Scene) -> None:
        scene.load(CHUNK, 5 * CHUNK)
        probe = scene.next()
        tokens, _ = scene.queued.asked[-1]
        assert tokens[: 5 * CHUNK] == list(range(5 * CHUNK))
        assert len(tokens) == 5 * CHUNK + 1
        assert probe.layers.keys() == {CHUNK, 5 * CHUNK}
        (result,) = scene.compute(probe)
        assert result == Audited("peer", None)
        assert_unused(scene.pool)

    def test_a_difference_that_begins_deep_is_found(self, scene: Scene) -> None:
        scene.load(CHUNK, 5 * CHUNK)
        probe = scene.next()
        assert scene.compute(probe, CHUNK) == [], "the first chunk is equal"
        scene.samples.value = 2.0
        assert scene.compute(probe, 5 * CHUNK) == [Audited("peer", Difference("layer 0", 0.5))]

    @pytest.mark.parametrize("origin", ["peer", None])
    def test_a_difference_names_where_the_rows_came_from(
        self, scene: Scene, origin: str | None
    ) -> None:
        scene.load(CHUNK, origin=origin)
        probe = scene.next()
        scene.samples.value = 2.0
        assert scene.compute(probe) == [Audited(origin, Difference("layer 0", 0.5))]

    @pytest.mark.parametrize("groups", [[0], [0, 1]])
    def test_all_that_was_loaded_is_computed_again(self, groups: list[int]) -> None:
        """Groups with a window are loaded for the last chunks only."""
        scene = Scene(groups=2)
        scene.compute(scene.next(), groups=[0, 1])
        scene.clock.now += AUDIT_INTERVAL
        scene.computed = LONG * AUDIT_SHARE
        scene.load(CHUNK, groups=groups)
        probe = scene.next()
        if groups == [0, 1]:
            assert scene.compute(probe) == []
        scene.samples.value = 2.0
        assert scene.compute(probe, groups=groups[-1:]) == [
            Audited("peer", Difference(f"layer {groups[-1]}", 0.5))
        ]

    def test_the_scheduler_thread_samples_nothing(self, scene: Scene) -> None:
        before = scene.samples.sampled
        scene.load(CHUNK)
        assert scene.samples.sampled == before
        assert scene.pool.counts().pinned == 1, "the row stays as it is"
        scene.probes.work()
        assert scene.samples.sampled == before + 1
        assert_unused(scene.pool)

    def test_every_other_one_is_of_the_first_chunk_alone(self) -> None:
        """Deep ones cost so much that an engine may not afford them for long."""
        scene = Scene().audits_next(deep=False)
        found = []
        for _ in range(3):
            scene.load(CHUNK, 5 * CHUNK)
            probe = scene.next()
            found.append(len(probe.layers))
            scene.compute(probe)
            scene.clock.now += AUDIT_INTERVAL
        assert found == [1, 2, 1]

    def test_the_token_behind_the_chunk_is_the_prompts_own(self, scene: Scene) -> None:
        """A drafter's row depends on it."""
        scene.load(CHUNK, prompt=2 * CHUNK)
        assert [*scene.next().tokens] == [*range(CHUNK + 1)]

    @pytest.mark.parametrize("prompt", [2 * CHUNK, 3 * CHUNK])
    def test_chunks_with_answered_tokens_are_not_audited(self, prompt: int) -> None:
        """A request that was preempted loads what it has answered, too."""
        scene = Scene().audits_next(deep=True)
        scene.load(CHUNK, 3 * CHUNK, prompt=prompt)
        assert scene.next().layers.keys() == {CHUNK}

    def test_at_most_one_a_minute(self, scene: Scene) -> None:
        scene.load(CHUNK)
        scene.compute(scene.next())
        asked = len(scene.queued.asked)
        assert not scene.probes.wants_audit()
        scene.probes.work()
        assert len(scene.queued.asked) == asked
        scene.clock.now += AUDIT_INTERVAL
        scene.load(CHUNK)
        scene.next()

    def test_at_most_one_token_for_a_thousand_computed_ones(self, scene: Scene) -> None:
        cost = (3 * CHUNK + 1) * AUDIT_SHARE
        scene.computed = cost - 1
        scene.load(3 * CHUNK)
        scene.probes.work()
        assert len(scene.queued.asked) == 1
        scene.computed = cost
        scene.next()

    def test_a_candidate_that_is_too_long_gives_way_to_a_shorter_one(self, scene: Scene) -> None:
        scene.computed = (CHUNK + 1) * AUDIT_SHARE
        scene.load(3 * CHUNK)
        scene.probes.work()
        scene.clock.now += AUDIT_INTERVAL
        scene.load(CHUNK)
        assert scene.next().layers.keys() == {CHUNK}

    def test_it_can_be_switched_off(self) -> None:
        assert not Scene(audits=False).after_canaries().probes.wants_audit()


class TestReset:
    """The engine's weights may have changed."""

    @pytest.fixture
    def scene(self) -> Scene:
        return Scene()

    @pytest.fixture
    def vllm(self, scene: Scene) -> Scheduling:
        return probing(scene)

    def test_the_canary_is_computed_again(self, scene: Scene, vllm: Scheduling) -> None:
        scene.after_canaries()
        vllm.manager.reset_cache()
        scene.next()
        (one, _), (again, _) = scene.queued.asked
        assert one == again

    def test_what_was_computed_before_is_not_compared(self, scene: Scene, vllm: Scheduling) -> None:
        before = scene.next()
        vllm.manager.reset_cache()
        assert scene.compute(before) == []
        assert_unused(scene.pool)

    @pytest.mark.parametrize("sampled", [False, True])
    def test_rows_from_before_are_not_audited(
        self, scene: Scene, vllm: Scheduling, sampled: bool
    ) -> None:
        scene.after_canaries()
        scene.load(CHUNK)
        if sampled:
            assert scene.probes.audits is not None
            scene.probes.audits.sample()
        vllm.manager.reset_cache()
        scene.compute(scene.next())
        asked = len(scene.queued.asked)
        scene.probes.work()
        assert len(scene.queued.asked) == asked
        assert_unused(scene.pool)


class TestRequest:
    """A probe, as vLLM's scheduler sees it."""

    @pytest.mark.parametrize("overtaken", [False, True])
    def test_it_is_computed_and_leaves_nothing(self, overtaken: bool) -> None:
        """Neither does one that was under way to the scheduler during a reset."""
        scene = Scene()
        vllm = probing(scene)
        probe = scene.next()
        if overtaken:
            vllm.manager.reset_cache()
        request = vllm.ask(1, "probe", a=1)
        keys = request.keys
        assert vllm.attempt(request, salt=probe.salt) == 0
        vllm.schedule(request, 0)
        vllm.stored(request, vllm.begin_store(request, keys))
        vllm.finish(request)
        results = scene.probes.work()
        expected = Computed("canary/128", LAYER)
        assert results == ([] if overtaken else [expected])
        assert vllm.tier.fetches == []
        assert vllm.tier.stored_rows == []
        assert vllm.pool.lookup(keys[0]) is None
        assert_nothing_left(vllm)
        stats = vllm.manager.stats()
        assert (stats["requests"], stats["hits"]["computed"]) == (0, 0)

    def test_only_the_chunks_that_are_compared_are_stored(self) -> None:
        scene = Scene(max_tokens=3 * CHUNK + 1)
        vllm = probing(scene)
        scene.compute(scene.next())
        request = vllm.ask(3, "probe")
        vllm.attempt(request, salt=scene.running().salt)
        assert vllm.begin_store(request, request.keys) == request.keys[-1:]

    @pytest.mark.parametrize("salt", ["xavier-probe-canary", f"xavier-probe-{CHUNK}"])
    def test_a_clients_salt_makes_no_probe(self, salt: str) -> None:
        scene = Scene()
        vllm = probing(scene)
        scene.next()
        request = vllm.ask(1)
        vllm.attempt(request, salt=salt)
        vllm.stored(request, vllm.begin_store(request, request.keys))
        vllm.finish(request)
        assert vllm.pool.lookup(request.keys[0]) is not None
        assert scene.probes.work() == []
        assert vllm.manager.stats()["requests"] == 1

    def test_a_loaded_prompt_is_a_candidate(self) -> None:
        scene = Scene().audits_next(deep=True)
        vllm = probing(scene)
        vllm.fill(chunks("prompt", 3))
        request = vllm.ask(3)
        assert vllm.scan(request) == 3
        vllm.manager.prepare_load(request.keys, request.context)
        tokens = list(range(3 * CHUNK + 1))
        vllm.manager.count_prompt("r", len(tokens), 3 * CHUNK, tokens)
        assert scene.next().layers.keys() == {CHUNK, 3 * CHUNK}
        assert scene.queued.asked[-1][0] == tokens


class Core:
    """What `OwnRequests` needs of vLLM's engine core, over vLLM's own scheduler."""

    def __init__(self, engine: Engine) -> None:
        self.input_queue: Queue[tuple[EngineCoreRequestType, Any]] = Queue()
        self.scheduler = engine.scheduler
        self.request_block_hasher: Any = engine.hasher
        self.mm_receiver_cache = None
        self.preprocess_add_request = partial(EngineCore.preprocess_add_request, self)  # type: ignore[arg-type]

    def take(self) -> Iterable[Any]:
        while not self.input_queue.empty():
            kind, content = self.input_queue.get()
            assert kind is EngineCoreRequestType.ADD
            yield content


class TestEngine:
    """vLLM's own scheduler computes the probes that the engine gives itself."""

    @pytest.fixture(params=[1, 2])
    def engine(
        self, request: pytest.FixtureRequest, make_engine: MakeEngine, cache_config: KVCacheConfig
    ) -> Engine:
        """One of the two groups has a sliding window."""
        cache_config.num_blocks *= request.param
        if request.param == 2:
            slide_one_layer(cache_config, 2 * BLOCK_TOKENS)
        engine = make_engine(chunk_tokens=2 * BLOCK_TOKENS)
        probes, samples = engine.own.manager.probes, Samples(request.param)
        assert probes.audits is not None
        probes._sketcher = probes.audits._sketcher = samples  # type: ignore[assignment]
        return engine

    def work(self, engine: Engine, times: int) -> list[ProbeResult]:
        """Compute so many probes."""
        core, probes = Core(engine), engine.own.manager.probes
        probes._requests = OwnRequests(core)
        found: list[ProbeResult] = []
        for _ in range(times):
            found += probes.work()
            for request, _ in core.take():
                engine.scheduler.add_request(request)
            engine.run()
        return [*found, *probes.work()]

    def test_it_computes_both_canaries_by_itself(self, engine: Engine) -> None:
        found = [each.name for each in self.work(engine, 2) if isinstance(each, Computed)]
        # Half of the KV cache is seven blocks.
        assert found == ["canary/64", "canary/192"]
        assert_nothing_left(engine.own)

    @pytest.mark.parametrize("deep", [False, True])
    def test_it_audits_what_it_has_loaded(self, engine: Engine, deep: bool) -> None:
        self.work(engine, 2)
        audits = engine.own.manager.probes.audits
        assert audits is not None
        audits._next = audits._next_candidate = 0.0
        audits._can_audit, audits._deep, audits._choose = lambda _: True, deep, max
        for name in ("computes", "loads"):
            engine.ask(name, range(300, 500), tokens=2)
            engine.run()
            engine.forget()
        assert self.work(engine, 1) == [Audited(None, None)]
        assert_nothing_left(engine.own)

    def test_it_takes_none_before_it_is_made_or_while_it_is_paused(self, engine: Engine) -> None:
        core = Core(engine)
        requests = OwnRequests(core)
        core.request_block_hasher = None
        assert requests.ask([1], "salt") is None
        core.request_block_hasher = engine.hasher
        core.scheduler = SimpleNamespace(pause_state=SimpleNamespace(name="PAUSED_NEW"))  # type: ignore[assignment]
        assert requests.ask([1], "salt") is None
        assert core.input_queue.empty()
        assert OwnRequests(None, "no queue").ask([1], "salt") is None

    def test_clients_hear_nothing_of_it(self) -> None:
        """The API process gets the output, of a request that it does not know."""
        outputs = OutputProcessor(tokenizer=None, log_stats=True)
        processed = outputs.process_outputs([EngineCoreOutput("xavier-probe-1", [7])], 0.0, None)
        assert (processed.request_outputs, processed.reqs_to_abort) == ([], [])
