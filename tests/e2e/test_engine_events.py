"""Whatever happens to an engine, its answers are those of an engine that shares nothing.

There are two real engines, with caches so small that they are always short of room, and a third
one without sharing that gives the right answers. Gates hold an engine up, so that each event
happens while rows are stored, loaded, fetched or sent; each test checks this before the event.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import CHUNKS, POOL_ROWS, alone, fine_tune, gated, prompt
from tests.e2e.gates import Gate, closed
from tests.harness.engines import ANSWER_PATIENCE, CHUNK, Completion, Engine, Fleet
from tests.harness.remote import RemoteError
from tests.harness.replicas import wait_until

pytestmark = pytest.mark.long

WHOLE = CHUNKS * CHUNK
"""Tokens of a prompt that can come from a pool."""
PREEMPTIONS, CACHED = "vllm:num_preemptions", "vllm:prompt_tokens_cached_by_source"
"""vLLM's own counters."""
_seeds = itertools.count(1, 2)


def fresh(tail: int = 40) -> list[int]:
    """A new prompt of `CHUNKS` chunks and a tail."""
    return prompt(next(_seeds), tail=tail)


class Cluster(Fleet):
    """Engines `a` and `b`, and one engine that shares nothing."""

    def __init__(self, original: Path, folder: Path, *, asynchronous: bool) -> None:
        self.original = original
        self.tuned = fine_tune(original, folder / "tuned")
        self._folder = folder
        kinds = {name: gated(folder / name, asynchronous=asynchronous) for name in ("a", "b")}
        super().__init__({**kinds, "alone": alone()}, model=original)
        self._alone_has = original
        self._right: dict[tuple[Path, int, tuple[int, ...]], tuple[int, ...]] = {}
        self._versions = itertools.count(1)

    @property
    def pair(self) -> list[Engine]:
        return [self["a"], self["b"]]

    def closed(self, engine: Engine, gate: Gate) -> AbstractContextManager[None]:
        return closed(self._folder / engine.name, gate)

    # -- right answers ------------------------------------------------------------------------

    def right(self, asked: Sequence[int], weights: Path, tokens: int = 8) -> tuple[int, ...]:
        """The answer of an engine with these weights that shares nothing."""
        request = (weights, tokens, tuple(asked))
        if request not in self._right:
            if self._alone_has != weights:
                self["alone"].call("load_weights", str(weights))
                self._alone_has = weights
            self._right[request] = self["alone"].answer(asked, tokens).tokens
        return self._right[request]

    def check(self, answer: Completion, asked: Sequence[int], weights: Path) -> Completion:
        assert answer.tokens == self.right(asked, weights, len(answer.tokens))
        return answer

    def ask(self, engine: Engine, asked: Sequence[int], weights: Path) -> Completion:
        return self.check(engine.answer(asked), asked, weights)

    # -- what the tracker knows ---------------------------------------------------------------

    def known(self, engine: Engine) -> dict[str, Any]:
        """Its current status; wait while it is between two namespaces."""
        found: dict[str, Any] = {}

        def look() -> bool:
            found.update(self.tracker.replicas().get(engine.name, {}))
            return bool(found) and "stale" not in found["stats"]

        wait_until(look, f"{engine.name} is a member", interval=0.02)
        return found

    def wait_for_pool(self, engine: Engine, **counts: int) -> None:
        """Wait until the engine's pool has so many rows in these states."""

        def has() -> bool:
            pool = self.known(engine)["stats"]["pool"]
            return all(pool[state] == rows for state, rows in counts.items())

        wait_until(has, f"{engine.name} has {counts}", interval=0.02)

    def wait_for_requests(self, engine: Engine, count: int) -> None:
        wait_until(
            lambda: engine.call("unfinished") == count,
            f"{engine.name} has {count} requests",
            interval=0.02,
        )

    def serves(self, engine: Engine, grants: int = 1) -> None:
        """Wait until the engine has granted rows."""
        wait_until(
            lambda: self.known(engine)["stats"]["grants"] == grants,
            f"{engine.name} has {grants} grants",
            interval=0.02,
        )

    def hold(self, engine: Engine, asked: Sequence[int], weights: Path) -> None:
        """Have `engine` compute the prompt, and wait until the other one knows."""
        held = self.known(engine)["holdings"]
        self.ask(engine, asked, weights)
        (other,) = (each for each in self.pair if each is not engine)
        wait_until(
            lambda: (
                self.known(engine)["holdings"] == held + CHUNKS
                and self.known(other)["stats"]["indexed"] == held + CHUNKS
            ),
            f"{other.name} knows what {engine.name} holds",
            interval=0.02,
        )

    def nothing_is_left(self) -> None:
        """After one more job each, no row is pinned, filling or quarantined, and no grant is
        live."""
        for engine in self.pair:
            engine.answer(fresh())
            self.wait_for_pool(engine, pinned=0, filling=0, quarantined=0)
            self.serves(engine, 0)

    # -- events -------------------------------------------------------------------------------

    def load(self, engine: Engine, weights: Path) -> None:
        """Change the weights in place: vLLM keeps its own cache."""
        before = self.known(engine)["namespace"]
        engine.call("load_weights", str(weights))
        self._wait_until_it_left(engine, before)

    def reset(self, engine: Engine) -> bool:
        """Void everything computed, including running requests' blocks."""
        before = self.known(engine)["namespace"]
        done: bool = engine.call(
            "reset_prefix_cache", reset_running_requests=True, reset_connector=True
        )
        if done:
            self._wait_until_it_left(engine, before)
        return done

    def _wait_until_it_left(self, engine: Engine, namespace: str) -> None:
        """Nobody can set its weights version while it moves."""
        wait_until(
            lambda: self.known(engine)["namespace"] != namespace,
            f"{engine.name} is in a namespace of its own",
            interval=0.02,
        )

    def share_again(self) -> None:
        """Announce that both engines have the same weights, and wait until they share."""
        joined = self.tracker.set_weights_version(f"version {next(self._versions)}")["joined"]
        assert sorted(joined) == ["a", "b"]
        self.wait_until_compared()

    def wait_until_compared(self) -> None:
        """Wait until each engine knows that the other computes as it does, which takes requests of
        their own after each reset."""
        for engine in self.pair:
            wait_until(
                lambda engine=engine: self.known(engine)["stats"]["not_sharing"] is None,
                f"{engine.name} compared itself with its peer",
                interval=0.02,
            )
        a, b = map(self.known, self.pair)
        assert a["namespace"] == b["namespace"]

    def start_over(self) -> None:
        """Give both engines empty caches and the first weights, and let them share."""
        for engine in self.pair:
            self.load(engine, self.original)
            assert self.reset(engine)
        self.share_again()
        for engine in self.pair:
            self.wait_for_pool(engine, ready=0, filling=0)


@pytest.fixture(scope="module", params=["one step at a time", "asynchronous"])
def engines(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("events")
    with Cluster(model_folder, folder, asynchronous=request.param == "asynchronous") as cluster:
        yield cluster


@pytest.fixture
def cluster(engines: Cluster) -> Cluster:
    engines.start_over()
    return engines


class TestReset:
    """The weights change and all caches are reset: nothing from before is used again."""

    def test_while_rows_are_stored(self, cluster: Cluster) -> None:
        """A row that a worker is still writing never becomes a hit, here or elsewhere."""
        a, b, asked = *cluster.pair, fresh()
        with cluster.closed(a, Gate.COPIES):
            cluster.ask(a, asked, cluster.original)
            cluster.wait_for_pool(a, filling=CHUNKS)
            assert cluster.reset(a)
            # The canary may fill another row, behind the gate. Its step waits for it, and so does
            # the engine.
            cluster.wait_for_pool(a, quarantined=CHUNKS)
        assert cluster.ask(a, asked, cluster.original).cached == 0
        assert cluster.ask(b, asked, cluster.original).cached == 0
        cluster.nothing_is_left()

    def test_while_rows_are_fetched(self, cluster: Cluster) -> None:
        """They arrive after the reset and are not used: their request is computed again."""
        a, b, asked = *cluster.pair, fresh()
        cluster.hold(a, asked, cluster.original)
        with cluster.closed(a, Gate.SENDS):
            waiting = b.ask(asked)
            cluster.wait_for_pool(b, filling=CHUNKS)
            cluster.serves(a)
            cluster.load(b, cluster.tuned)
            answer = cluster.check(waiting.result(ANSWER_PATIENCE), asked, cluster.tuned)
            assert answer.cached == 0
            assert cluster.reset(b)  # vLLM refuses it during an asynchronous step
        assert cluster.ask(b, asked, cluster.tuned).cached in (0, WHOLE)
        assert cluster.ask(a, asked, cluster.original).cached == WHOLE
        cluster.nothing_is_left()

    def test_while_rows_are_sent(self, cluster: Cluster) -> None:
        """The donor's slots are overwritten at once. The consumer's answer is still right for its
        own weights, which are the old ones."""
        a, b, asked = *cluster.pair, fresh()
        cluster.hold(a, asked, cluster.original)
        with cluster.closed(a, Gate.SENDS):
            waiting = b.ask(asked)
            cluster.serves(a)
            cluster.load(a, cluster.tuned)
            assert cluster.reset(a)
            for _ in range(POOL_ROWS // CHUNKS):
                cluster.ask(a, fresh(), cluster.tuned)
        cluster.check(waiting.result(ANSWER_PATIENCE), asked, cluster.original)
        assert cluster.ask(a, asked, cluster.tuned).cached == 0
        cluster.ask(b, asked, cluster.original)
        cluster.nothing_is_left()

    def test_while_rows_are_loaded(self, cluster: Cluster) -> None:
        """vLLM refuses the reset while a request loads. The request ends well; then it works."""
        a, asked = cluster["a"], fresh()
        cluster.hold(a, asked, cluster.original)
        a.call("forget")
        with cluster.closed(a, Gate.COPIES):
            loading = a.ask(asked)
            cluster.wait_for_pool(a, pinned=CHUNKS)
            assert not a.call("reset_prefix_cache", reset_connector=True)
        assert (
            cluster.check(loading.result(ANSWER_PATIENCE), asked, cluster.original).cached == WHOLE
        )
        cluster.load(a, cluster.tuned)
        assert cluster.reset(a)
        assert cluster.ask(a, asked, cluster.tuned).cached == 0
        cluster.nothing_is_left()


class TestWeightUpdate:
    @pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
    def test_in_a_pause_under_load(self, cluster: Cluster, mode: str) -> None:
        """Both engines are serving when they are paused, get other weights and resume. From then on
        all answers come from the new weights, and the engines share what they compute."""
        a, b = cluster.pair
        prompts = [fresh() for _ in range(3)]
        for engine, asked in zip(cluster.pair, prompts, strict=False):
            cluster.hold(engine, asked, cluster.original)
        with cluster.closed(a, Gate.SENDS), cluster.closed(b, Gate.SENDS):
            load = [e.ask(asked, 16) for e in cluster.pair for asked in prompts]
            cluster.serves(a)
            cluster.serves(b)
            # A pause waits for fetches in progress.
            pauses = [
                engine.begin("pause_generation", mode=mode, clear_cache=False)
                for engine in cluster.pair
            ]
        for pause in pauses:
            pause.result(ANSWER_PATIENCE)
        for engine in cluster.pair:
            cluster.load(engine, cluster.tuned)
            self.reset_and_resume(cluster, engine, mode)
        cluster.share_again()
        reasons = [request.result(ANSWER_PATIENCE).reason for request in load]
        assert set(reasons) <= ({"abort", "length"} if mode == "abort" else {"length"})
        for asked in prompts:
            for engine in cluster.pair:
                cluster.ask(engine, asked, cluster.tuned)
        asked = fresh()
        cluster.hold(a, asked, cluster.tuned)
        assert cluster.ask(b, asked, cluster.tuned).cached == WHOLE
        cluster.nothing_is_left()

    def reset_and_resume(self, cluster: Cluster, engine: Engine, mode: str) -> None:
        """A request that was paused between its load and its first step prevents a reset. vLLM says
        so, and can be reset after it has run for a moment."""

        def is_reset() -> bool:
            try:
                return cluster.reset(engine)
            except RemoteError as error:
                if "waiting for remote KV transfer" not in str(error):
                    raise
            engine.call("resume_generation")
            engine.call("pause_generation", mode=mode, clear_cache=False)
            return False

        wait_until(is_reset, f"{engine.name} is reset", interval=0.1)
        engine.call("resume_generation")

    def test_of_one_engine_parts_the_two_until_the_other_follows(self, cluster: Cluster) -> None:
        a, b, asked = *cluster.pair, fresh()
        cluster.load(a, cluster.tuned)
        assert cluster.reset(a)
        version = "tuned"
        assert cluster.tracker.set_weights_version(version) == {
            "joined": ["a"], "not_reset": ["b"], "unreachable": [],
        }  # fmt: skip
        cluster.ask(a, asked, cluster.tuned)
        cluster.wait_for_pool(a, ready=CHUNKS, pinned=0)
        assert cluster.ask(b, asked, cluster.original).cached == 0

        cluster.load(b, cluster.tuned)
        assert cluster.reset(b)
        assert cluster.tracker.set_weights_version(version) == {
            "joined": ["b"], "not_reset": ["a"], "unreachable": [],
        }  # fmt: skip
        cluster.wait_until_compared()
        wait_until(lambda: cluster.known(b)["stats"]["indexed"] == CHUNKS, "b knows what a holds")
        assert cluster.ask(b, asked, cluster.tuned).cached == WHOLE
        cluster.nothing_is_left()

    def test_in_place_without_a_reset(self, cluster: Cluster) -> None:
        """Nobody tells vLLM's cache, or an operator. Engines whose weights have the same name in
        vLLM share again."""
        a, b, asked = *cluster.pair, fresh()
        cluster.load(a, cluster.tuned)
        cluster.ask(a, asked, cluster.tuned)
        cluster.wait_for_pool(a, ready=CHUNKS, pinned=0)
        assert cluster.ask(b, asked, cluster.original).cached == 0

        cluster.load(b, cluster.tuned)
        for engine in cluster.pair:
            engine.call("update_weight_version", "tuned")
        cluster.wait_until_compared()
        asked = fresh()
        cluster.hold(a, asked, cluster.tuned)
        assert cluster.ask(b, asked, cluster.tuned).cached == WHOLE
        cluster.nothing_is_left()


class TestSleep:
    def test_while_rows_are_fetched(self, cluster: Cluster) -> None:
        """The engine wakes with other weights and empty caches; its request was aborted."""
        a, b, asked = *cluster.pair, fresh()
        cluster.hold(a, asked, cluster.original)
        with cluster.closed(a, Gate.SENDS):
            waiting = b.ask(asked)
            cluster.wait_for_pool(b, filling=CHUNKS)
            falling_asleep = b.begin("sleep", level=1)
            assert waiting.result(ANSWER_PATIENCE).reason == "abort"
        falling_asleep.result(ANSWER_PATIENCE)
        assert b.call("is_sleeping")
        cluster.load(b, cluster.tuned)
        asked_asleep = b.ask(asked)
        b.call("wake_up")
        assert not b.call("is_sleeping")
        answer = cluster.check(asked_asleep.result(ANSWER_PATIENCE), asked, cluster.tuned)
        assert answer.cached == 0
        cluster.ask(a, asked, cluster.original)
        cluster.nothing_is_left()


class TestShortOfRoom:
    def test_requests_are_preempted(self, cluster: Cluster) -> None:
        """There are more growing requests than blocks in the KV cache: some lose their blocks and
        come back to rows of the pool or of the other engine."""
        prompts = [fresh(tail=CHUNK - 10) for _ in range(4)]
        before = [engine.call("counted", PREEMPTIONS) for engine in cluster.pair]
        orders = ([*prompts, *prompts[::-1]], [*prompts[::-1], *prompts])
        for engine in cluster.pair:
            engine.call(
                "pause_generation", mode="keep", clear_cache=False
            )  # so that all begin together
        answers = [
            [engine.ask(each, 30) for each in order]
            for engine, order in zip(cluster.pair, orders, strict=True)
        ]
        for engine, order in zip(cluster.pair, orders, strict=True):
            cluster.wait_for_requests(engine, len(order))
            engine.call("resume_generation")
        for row, order in zip(answers, orders, strict=True):
            for future, each in zip(row, order, strict=True):
                cluster.check(future.result(ANSWER_PATIENCE), each, cluster.original)
        after = [engine.call("counted", PREEMPTIONS) for engine in cluster.pair]
        assert all(late > early for early, late in zip(before, after, strict=True))
        cluster.nothing_is_left()

    @pytest.mark.parametrize("where", ["own pool", "peer"])
    def test_a_hit_finds_no_blocks(self, cluster: Cluster, where: str) -> None:
        """Three long requests have all blocks. A fourth one's rows arrive long before there are
        blocks for it, and stay until there are."""
        a, b, asked = *cluster.pair, fresh()
        cluster.hold(b if where == "peer" else a, asked, cluster.original)
        a.call("forget")
        long = [fresh() for _ in range(3)]
        running = [a.ask(each, 30) for each in long]
        answer = cluster.check(a.ask(asked).result(ANSWER_PATIENCE), asked, cluster.original)
        assert answer.cached == WHOLE
        for each, request in zip(long, running, strict=True):
            cluster.check(request.result(ANSWER_PATIENCE), each, cluster.original)
        cluster.nothing_is_left()

    def test_the_pools_hold_a_third_of_all_prompts(self, cluster: Cluster) -> None:
        """All requests are served, and none fetches the same rows twice."""
        prompts = [fresh() for _ in range(3 * POOL_ROWS // CHUNKS)]
        orders = (prompts, prompts[len(prompts) // 2 :] + prompts[: len(prompts) // 2])
        started = [cluster.known(engine)["stats"]["fetches"]["started"] for engine in cluster.pair]
        for _ in range(2):
            rounds = [
                [engine.ask(each, 4) for each in order]
                for engine, order in zip(cluster.pair, orders, strict=True)
            ]
            for order, answers in zip(orders, rounds, strict=True):
                for each, answer in zip(order, answers, strict=True):
                    cluster.check(answer.result(ANSWER_PATIENCE), each, cluster.original)
        for engine, before in zip(cluster.pair, started, strict=True):
            fetches = cluster.known(engine)["stats"]["fetches"]["started"] - before
            assert fetches <= 2 * len(prompts)
        cluster.nothing_is_left()


class TestPrefillRate:
    def test_it_agrees_with_the_rate_seen_from_outside(self, cluster: Cluster) -> None:
        """If a step were timed until the next one begins, it would seem ten times as fast."""
        a = cluster["a"]
        seen = []
        for _ in range(12):
            asked = prompt(next(_seeds), chunks=12)
            began = time.monotonic()
            a.answer(asked, tokens=1)
            seen.append(len(asked) / (time.monotonic() - began))
        believed = cluster.known(a)["stats"]["prefill_tokens_per_s"]
        assert 0.5 < believed / statistics.median(seen) < 3


if find_spec("vllm.v1.metrics.cache_hit_source"):  # from 0.32 on

    class TestMetrics:
        def test_vllm_counts_what_a_peer_supplied_as_peer_to_peer(self, cluster: Cluster) -> None:
            """It counts tokens from the own pool as the host's."""
            a, b, asked = *cluster.pair, fresh()
            cluster.hold(a, asked, cluster.original)

            def grown(source: str, by: int) -> None:
                before = b.call("counted", CACHED, "source")
                assert cluster.ask(b, asked, cluster.original).cached == WHOLE
                after = b.call("counted", CACHED, "source")
                assert {name: after[name] - before[name] for name in after} == {
                    **dict.fromkeys(after, 0),
                    source: by,
                }

            grown("p2p", WHOLE)
            b.call("forget")
            grown("host", WHOLE)
            cluster.nothing_is_left()


class TestAtTheSameTime:
    def test_both_fetch_from_each_other(self, cluster: Cluster) -> None:
        """Each is donor and consumer at once; both fetches are whole."""
        a, b = cluster.pair
        of_a, of_b = fresh(), fresh()
        cluster.hold(a, of_a, cluster.original)
        cluster.hold(b, of_b, cluster.original)
        with cluster.closed(a, Gate.SENDS), cluster.closed(b, Gate.SENDS):
            waiting = [(a.ask(of_b), of_b), (b.ask(of_a), of_a)]
            cluster.serves(a)
            cluster.serves(b)
        for answer, asked in waiting:
            assert (
                cluster.check(answer.result(ANSWER_PATIENCE), asked, cluster.original).cached
                == WHOLE
            )
        cluster.nothing_is_left()

    @pytest.mark.parametrize("under_way", ["fetch", "load"])
    def test_all_waiting_requests_are_aborted(self, cluster: Cluster, under_way: str) -> None:
        """The fetch or load that they waited for goes on without them and leaves nothing. A later
        request is served from it."""
        a, b, asked = *cluster.pair, fresh()
        cluster.hold(a if under_way == "fetch" else b, asked, cluster.original)
        held_up, gate = (a, Gate.SENDS) if under_way == "fetch" else (b, Gate.COPIES)
        b.call("forget")
        with cluster.closed(held_up, gate):
            names = [f"{under_way} {number}" for number in range(12)]
            storm = [b.ask(asked, name=name) for name in names]
            cluster.wait_for_requests(b, len(storm))
            state = {"filling": CHUNKS} if under_way == "fetch" else {"pinned": CHUNKS}
            cluster.wait_for_pool(b, **state)
            b.call("abort", names)
            assert {request.result(ANSWER_PATIENCE).reason for request in storm} == {"abort"}
        cluster.wait_for_pool(b, ready=CHUNKS, filling=0, pinned=0)
        assert cluster.ask(b, asked, cluster.original).cached == WHOLE
        cluster.nothing_is_left()

    def test_requests_are_aborted_at_any_moment(self, cluster: Cluster) -> None:
        """Half of the requests are aborted, each when another one's answer arrives; the others are
        served."""
        prompts = [fresh() for _ in range(6)]
        names = itertools.count()
        staying: list[tuple[Future[Completion], list[int]]] = []
        leaving: list[tuple[Engine, str, Future[Completion]]] = []
        for number, asked in enumerate(prompts + prompts):
            for engine in cluster.pair:
                name = f"leaving {next(names)}"
                staying.append((engine.ask(asked, 6), asked))
                leaving.append((engine, name, engine.ask(prompts[number % 4], 20, name)))
        for (answer, asked), (engine, name, gone) in zip(staying, leaving, strict=True):
            cluster.check(answer.result(ANSWER_PATIENCE), asked, cluster.original)
            engine.call("abort", name)
            assert gone.result(ANSWER_PATIENCE).reason in ("abort", "length")
        cluster.nothing_is_left()
