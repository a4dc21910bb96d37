"""An engine asks for probes to be computed, whose rows are neither found nor counted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.scheduling import CHUNK, Clock, Scheduling, assert_nothing_left, chunks
from xinference_xavier.engine.probes import AUDIT_INTERVAL, AUDIT_SHARE, CANARY, Probes
from xinference_xavier.pool.pool import Row
from xinference_xavier.replica.canary import Sketch

VOCABULARY = 999


class Samples:
    """Samples of rows, all with one value."""

    def __init__(self) -> None:
        self.value = 1.0

    def sample(self, rows: list[Row]) -> Sketch:
        return {"layer": ("float32", [self.value] * 4)} if rows else {}


class Scene:
    def __init__(self, *, audits: bool = True) -> None:
        self.samples: Any = Samples()
        self.clock = Clock()
        self.computed = 0
        self.probes = Probes(
            self.samples,
            chunk_tokens=CHUNK,
            vocabulary=VOCABULARY,
            audits=audits,
            can_audit=lambda tokens: self.computed >= tokens,
            clock=self.clock,
        )

    def after_canary(self) -> Scene:
        canary = self.probes.next()
        assert canary is not None
        self.probes.stored(canary.salt, [Row(b"canary", 0)])
        self.probes.take_results()
        self.clock.now += AUDIT_INTERVAL
        self.computed = CHUNK * AUDIT_SHARE
        return self


class TestCanary:
    def test_it_is_one_chunk_and_equal_everywhere(self) -> None:
        canary, other = Scene().probes.next(), Scene().probes.next()
        assert canary is not None
        assert other is not None
        assert canary.tokens == other.tokens
        assert len(canary.tokens) == CHUNK + 1
        assert canary.salt != other.salt, "or a client could guess it"

    def test_it_has_no_special_tokens(self) -> None:
        """They are at the ends of a vocabulary."""
        canary = Scene().probes.next()
        assert canary is not None
        assert min(canary.tokens) > 100
        assert max(canary.tokens) < VOCABULARY - 100

    def test_it_is_asked_for_until_it_was_computed(self) -> None:
        scene = Scene()
        canary = scene.probes.next()
        assert canary is not None
        assert scene.probes.next() == canary
        scene.probes.stored(canary.salt, [Row(b"hash\0\0\0\1", 0)])
        assert scene.probes.next() is None
        (result,) = scene.probes.take_results()
        assert (result.key, result.sketch) == (CANARY, scene.samples.sample([1]))
        assert scene.probes.take_results() == []


class TestAudit:
    TOKENS = tuple(range(500))

    def audit(self, scene: Scene, origin: str | None = "peer") -> None:
        scene.probes.loaded(self.TOKENS, Row(b"key", 0, origin=origin))

    def test_the_first_chunk_of_a_loaded_prompt_is_computed_again(self) -> None:
        scene = Scene().after_canary()
        self.audit(scene)
        probe = scene.probes.next()
        assert probe is not None
        assert probe.tokens[:CHUNK] == list(self.TOKENS[:CHUNK])
        assert len(probe.tokens) == CHUNK + 1
        scene.probes.stored(probe.salt, [Row(b"again", 1)])
        (result,) = scene.probes.take_results()
        assert (result.key, result.donor, result.difference) == (None, "peer", None)

    @pytest.mark.parametrize("origin", ["peer", None])
    def test_a_difference_names_where_the_rows_came_from(self, origin: str | None) -> None:
        scene = Scene().after_canary()
        self.audit(scene, origin)
        probe = scene.probes.next()
        assert probe is not None
        scene.samples.value = 2.0
        scene.probes.stored(probe.salt, [Row(b"again", 1)])
        (result,) = scene.probes.take_results()
        assert result.donor == origin
        assert result.difference == ("layer", 0.5)

    def test_at_most_one_a_minute(self) -> None:
        scene = Scene().after_canary()
        scene.computed *= 2
        self.audit(scene)
        assert scene.probes.next() is not None
        self.audit(scene)
        assert scene.probes.next() is None
        scene.clock.now += AUDIT_INTERVAL
        self.audit(scene)
        assert scene.probes.next() is not None

    def test_at_most_one_token_for_a_thousand_computed_ones(self) -> None:
        scene = Scene().after_canary()
        scene.computed -= 1
        self.audit(scene)
        assert scene.probes.next() is None
        scene.computed += 1
        assert scene.probes.next() is not None

    def test_it_counts_once_however_many_groups_are_stored(self) -> None:
        scene = Scene().after_canary()
        self.audit(scene)
        probe = scene.probes.next()
        assert probe is not None
        for _ in range(2):
            scene.probes.stored(probe.salt, [Row(b"again", 1)])
        assert len(scene.probes.take_results()) == 1

    def test_it_can_be_switched_off(self) -> None:
        scene = Scene(audits=False).after_canary()
        self.audit(scene)
        assert scene.probes.next() is None


class TestRequest:
    """A probe, as vLLM's scheduler sees it."""

    def test_it_is_computed_and_leaves_nothing(self) -> None:
        vllm = Scheduling()
        scene = Scene()
        vllm.manager.view.probes = scene.probes
        keys = chunks("canary", 1)
        vllm.tier.peers_hold(a=keys)
        request = vllm.arrive("probe", keys)
        canary = scene.probes.next()
        assert canary is not None
        vllm.manager.begin_lookups("probe", 0, salt=canary.salt)
        assert vllm.manager.lookup(keys[0], request.context).name == "MISS"
        vllm.end_step()
        vllm.schedule(request, 0)
        vllm.stored(request, vllm.begin_store(request, keys))
        vllm.finish(request)
        assert vllm.tier.fetches == []
        assert vllm.tier.stored_rows == []
        assert vllm.pool.lookup(keys[0]) is None
        assert_nothing_left(vllm)
        (result,) = scene.probes.take_results()
        assert result.key == CANARY
        stats = vllm.manager.stats()
        assert (stats["requests"], stats["hits"]["computed"]) == (0, 0)

    @pytest.mark.parametrize("salt", ["xavier-probe-canary", f"xavier-probe-{CHUNK}"])
    def test_a_clients_salt_makes_no_probe(self, salt: str) -> None:
        vllm = Scheduling()
        scene = Scene()
        vllm.manager.view.probes = scene.probes
        keys = chunks("prompt", 1)
        request = vllm.arrive("r", keys)
        vllm.manager.begin_lookups("r", 0, salt=salt)
        vllm.end_step()
        vllm.stored(request, vllm.begin_store(request, keys))
        vllm.finish(request)
        assert vllm.pool.lookup(keys[0]) is not None
        assert scene.probes.take_results() == []
        assert scene.probes.next() is not None, "the canary is still to be computed"
        assert vllm.manager.stats()["requests"] == 1

    def test_a_loaded_prompt_is_a_candidate(self) -> None:
        vllm = Scheduling()
        scene = Scene().after_canary()
        vllm.manager.view.probes = scene.probes
        keys = chunks("prompt", 3)
        vllm.fill(keys)
        request = vllm.arrive("r", keys)
        assert vllm.scan(request) == 3
        vllm.manager.prepare_load(keys, request.context)
        tokens = list(range(3 * CHUNK))
        vllm.manager.count_prompt("r", 3 * CHUNK, 3 * CHUNK, tokens)
        probe = scene.probes.next()
        assert probe is not None
        assert probe.tokens[:CHUNK] == tokens[:CHUNK]


class TestReset:
    """The engine's weights may have changed."""

    def test_the_canary_is_computed_again(self) -> None:
        scene = Scene().after_canary()
        assert scene.probes.next() is None
        scene.probes.reset()
        assert scene.probes.next() is not None

    def test_rows_from_before_are_not_audited(self) -> None:
        scene = Scene().after_canary()
        scene.probes.loaded(range(500), Row(b"key", 0))
        scene.probes.reset()
        canary = scene.probes.next()
        assert canary is not None
        scene.probes.stored(canary.salt, [Row(b"key", 0)])
        assert scene.probes.next() is None
