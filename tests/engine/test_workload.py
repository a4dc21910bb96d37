"""Routers learn what an engine has to compute, and which prompts it computes."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import RequestStatus

from tests.engine.scheduling import (
    CHUNK,
    ROW_BYTES,
    SERVING,
    Request,
    Scheduling,
    chunks,
    layout_of,
)
from tests.engine.vllm_scheduler import BLOCK_TOKENS, NOBODY, Engine, MakeEngine
from xinference_xavier.config import XavierConfig
from xinference_xavier.engine import connector as connector_module
from xinference_xavier.engine import workload as workload_module
from xinference_xavier.engine.facts import serving_of
from xinference_xavier.engine.keys import Group
from xinference_xavier.engine.probes import Probe
from xinference_xavier.engine.workload import (
    _OVERHEAD,
    _SPEED,
    MAX_DECODE_TOKENS,
    Retention,
    Step,
)
from xinference_xavier.peers import IN_PLACE
from xinference_xavier.protocol.load import (
    MAX_KNOWN,
    MAX_REPORTS,
    Elsewhere,
    Load,
    RequestReport,
    Serving,
    check_load,
    check_requests,
    prefill_id,
    with_mark,
)
from xinference_xavier.protocol.prefixes import Keeping, request_id, with_keeping
from xinference_xavier.protocol.tracker import SHORT_KEY, unpack
from xinference_xavier.runtime.aio import take_all
from xinference_xavier.runtime.validate import MAX_IDENTIFIER

SPEED = 1000
"""Tokens per second, once they are measured."""


class Counted(Scheduling):
    """An engine whose work is counted."""

    def __init__(self) -> None:
        super().__init__(slots=64)
        self.workload = self.manager.workload

    def load(self) -> Load:
        """The reported load, after the tracker's checks."""
        return check_load(self.workload.load())

    def prompts(self) -> tuple[RequestReport, ...]:
        return check_requests((*take_all(self.workload.prompts),))

    def answers(self) -> tuple[RequestReport, ...]:
        return check_requests((*take_all(self.workload.answers),))

    def measure(self, depth: float = 0.0, seconds: float = 1.0) -> None:
        self.manager.prefill_rate.add(SPEED, seconds, depth)

    def found(self, request: Request, tokens: int, have: int = 0, salt: str | None = None) -> None:
        self.manager.begin_lookups(request.req_id, have, salt=salt)
        self.workload.found(request.req_id, tokens, have)

    def start(
        self, req_id: str, tokens: int, have: int = 0, keys: Sequence[OffloadKey] = ()
    ) -> Request:
        """A request arrives and is scheduled."""
        request = self.arrive(req_id, keys)
        self.found(request, tokens, have)
        self.manager.count_prompt(req_id, tokens, 0)
        return request

    def step_begins(self, **prompts: int) -> None:
        tokens = sum(prompts.values())
        requests = 1 + len(prompts)
        step = Step(self.clock.now, 1 + tokens, prompts, tokens, requests=requests)
        self.manager.steps.begin(step)

    def step_ends(self) -> None:
        self.manager.steps.end(self.clock.now)

    def step(self, seconds: float = 0.0, **prompts: int) -> None:
        self.step_begins(**prompts)
        self.clock.now += seconds
        self.step_ends()


@pytest.fixture
def engine() -> Counted:
    return Counted()


class TestMissingTokens:
    def test_are_none_in_an_idle_engine(self, engine: Counted) -> None:
        assert engine.load() == Load(SERVING, prefill_tokens=0, prefill_s=None, requests=0)

    def test_are_those_of_all_requests(self, engine: Counted) -> None:
        engine.start("r", 1000)
        engine.start("s", 500, have=100)
        assert engine.load().prefill_tokens == 1400
        engine.step(r=1000, s=200)
        assert engine.load().prefill_tokens == 200

    def test_count_until_their_step_has_ended(self, engine: Counted) -> None:
        """With asynchronous scheduling, the next one has begun by then."""
        engine.start("r", 1000)
        engine.step_begins(r=600)
        engine.step_begins(r=400)
        assert engine.load().prefill_tokens == 1000
        engine.step_ends()
        assert engine.load().prefill_tokens == 400
        engine.step_ends()
        assert engine.load().prefill_tokens == 0

    def test_do_not_change_while_answers_are_computed(self, engine: Counted) -> None:
        engine.start("r", 1000)
        engine.step()
        assert engine.load().prefill_tokens == 1000

    def test_end_with_their_request(self, engine: Counted) -> None:
        request = engine.start("r", 1000)
        engine.step_begins(r=600)
        engine.finish(request)
        assert (engine.load().prefill_tokens, engine.load().requests) == (0, 0)
        engine.step_ends()
        assert engine.load().prefill_tokens == 0

    def test_of_a_prompt_s_end_that_looks_like_an_answer_are_none(self, engine: Counted) -> None:
        """No step says that it computes them."""
        engine.start("r", 1000 + MAX_DECODE_TOKENS)
        engine.step(r=1000)
        assert engine.load().prefill_tokens == 0

    def test_of_a_preempted_request_count_again(self, engine: Counted) -> None:
        """Its answer counts, too. vLLM still has most of it, and now more than the prompt."""
        request = engine.start("r", 1000)
        engine.step(r=1000)
        engine.found(request, 1300, have=1100)
        assert engine.load().prefill_tokens == 200
        engine.manager.count_prompt("r", 1000, 0)
        assert engine.load().prefill_tokens == 200
        engine.step(r=200)
        assert engine.load().prefill_tokens == 0

    def test_of_a_request_that_is_preempted_within_a_step_all_count_again(
        self, engine: Counted
    ) -> None:
        request = engine.start("r", 1000)
        engine.step_begins(r=600)
        engine.found(request, 1000, have=0)
        engine.step_ends()
        assert engine.load().prefill_tokens == 1000


class TestSeconds:
    def test_are_unknown_before_the_first_measurement(self, engine: Counted) -> None:
        engine.start("r", 1000)
        assert engine.load().prefill_s is None
        engine.measure()
        assert engine.load().prefill_s == 1.0

    def test_of_nothing_are_none(self, engine: Counted) -> None:
        engine.measure()
        assert engine.load().prefill_s == 0.0

    def test_are_more_for_deeper_tokens(self, engine: Counted) -> None:
        """A token takes 1 ms, plus 0.1 µs for each token before it."""
        for depth in (500.0, 1500.0, 2500.0, 3500.0):
            engine.measure(depth, 1 + depth / 10_000)
        engine.start("shallow", 1000)
        assert engine.load().prefill_s == pytest.approx(1.05)
        engine.start("deep", 10_000, have=9000)
        assert engine.load().prefill_s == pytest.approx(1.05 + 1.95)

    def test_pass_while_a_step_computes(self, engine: Counted) -> None:
        """It has too few tokens to tell the speed."""
        engine.measure()
        engine.start("r", 300)
        engine.step_begins(r=200)
        engine.clock.now += 0.05
        assert engine.load().prefill_s == pytest.approx(0.25)
        engine.clock.now += 0.05
        engine.step_begins(r=100)
        assert engine.load().prefill_s == pytest.approx(0.2)
        engine.clock.now += 60.0
        assert engine.load().prefill_s == pytest.approx(0.1), "the step takes longer than it should"
        engine.step_ends()
        assert engine.load().prefill_s == pytest.approx(0.1)
        engine.clock.now += 0.05
        assert engine.load().prefill_s == pytest.approx(0.05)

    def test_do_not_pass_while_answers_are_computed(self, engine: Counted) -> None:
        engine.measure()
        engine.start("r", 3000)
        engine.step_begins()
        engine.clock.now += 0.5
        assert engine.load().prefill_s == 3.0

    def test_are_never_negative(self, engine: Counted) -> None:
        engine.measure()
        request = engine.start("r", 1000)
        engine.step_begins(r=1000)
        engine.finish(request)
        engine.clock.now += 0.5
        assert engine.load().prefill_s == 0.0


class TestKnownRequests:
    def test_go_by_the_ids_that_their_clients_know(self, engine: Counted) -> None:
        """vLLM appends to an id, and prepends a number where a request wants several answers."""
        asked: Any = SimpleNamespace(
            request_id="mine", external_req_id=None, params=SamplingParams(n=2)
        )
        InputProcessor.assign_request_id(asked)
        assert asked.request_id != "mine"
        second, _ = ParentRequest(asked).get_child_info(1)
        for req_id in (asked.request_id, second):
            engine.start(req_id, 100)
            assert [prompt.request for prompt in engine.prompts()] == ["mine"]
        assert engine.load().known == ("mine", "mine")

    @pytest.mark.parametrize(
        "name",
        ["mine", "1_mine-not", "5c8a4c7e-90ab-4cde-8f01-23456789abcd", "chatcmpl-7_8", "a-b", "ü"],
    )
    def test_go_by_whatever_their_clients_chose(self, engine: Counted, name: str) -> None:
        engine.start(f"{name}-0123abcd", 100)
        expected = "mine-not" if name == "1_mine-not" else name
        assert engine.load().known == (expected,)

    def test_go_by_the_beginning_of_a_long_id(self, engine: Counted) -> None:
        engine.start("x" * (MAX_IDENTIFIER + 1), 100)
        assert engine.load().known == ("x" * MAX_IDENTIFIER,)

    @pytest.mark.parametrize("name", ["\ud800", "a\nb"])
    def test_are_left_out_if_no_tracker_takes_their_ids(self, engine: Counted, name: str) -> None:
        """A client chooses them, and must not keep the replica from reporting."""
        engine.start(name, 1000)
        engine.start("s", 500)
        load = engine.load()
        assert (load.known, load.requests, load.prefill_tokens) == (("s",), 2, 1500)
        assert [prompt.request for prompt in engine.prompts()] == ["s"]

    def test_are_so_many_that_a_tracker_takes_them(self, engine: Counted) -> None:
        for number in range(MAX_KNOWN + 1):
            engine.start(f"r{number}", 100)
        load = engine.load()
        assert (len(load.known), load.requests) == (MAX_KNOWN, MAX_KNOWN + 1)


class TestRates:
    def test_are_unknown_before_the_first_measurement(self, engine: Counted) -> None:
        assert engine.load().rates is None

    def test_of_an_engine_that_has_fetched_nothing_are_guessed(self, engine: Counted) -> None:
        """If fetches took no time, a replica that holds nothing would be as good as its peer."""
        engine.measure()
        assert engine.load().rates == (1 / SPEED, 0.0, _OVERHEAD, 1 / _SPEED)

    def test_of_fetches_are_the_mean_over_peers(self, engine: Counted) -> None:
        """`a` takes 0.1 s and 10 ms for a row, `b` 0.3 s and 30 ms."""
        engine.measure()
        for peer, scale in {"a": 1, "b": 3}.items():
            for number, count in enumerate((4, 4, 8, 4, 8)):
                keys = chunks(f"prompt {peer} {number}", count)
                engine.tier.only_hold(**{peer: keys})
                request = engine.arrive(f"{peer} {number}", keys)
                engine.fetch_and_finish(request, scale * (0.1 + 0.01 * count))
        rates = engine.load().rates
        assert rates == pytest.approx((1 / SPEED, 0.0, 0.2, 0.02 / ROW_BYTES))

    def test_do_not_count_what_is_loaded_in_place(self, engine: Counted) -> None:
        """Routers know whose chunks a replica loads as its own."""
        engine.measure()
        engine.tier.only_hold(a=[])
        for number in range(3):
            engine.tier.peers.map("a", 1000)
            keys = chunks(f"prompt {number}", 4)
            engine.tier.only_hold(a=keys)
            request = engine.arrive(str(number), keys)
            assert engine.attempt(request) is None
            engine.tier.end(engine.tier.fetches[-1], seconds=5.0, transport=IN_PLACE)
            engine.attempt(request)
            engine.finish(request)
            engine.end_step()
        assert engine.manager.cost_model.rates()
        assert engine.load().rates == (1 / SPEED, 0.0, _OVERHEAD, 1 / _SPEED)


class TestPromptsToKeep:
    def test_are_those_whose_requests_say_so(self, engine: Counted) -> None:
        keeping = Keeping(300.0, 0.5)
        keys = chunks("prompt", 3)
        engine.start(f"0_{with_keeping('r', keeping)}-0123abcd", 3 * CHUNK, keys=keys)
        engine.start("s", 3 * CHUNK, keys=keys)
        assert take_all(engine.workload.marked) == [(keeping, tuple(keys))]
        assert take_all(engine.workload.marked) == []


class TestPrompts:
    def test_are_reported_once_with_the_short_keys_of_their_chunks(self, engine: Counted) -> None:
        keys = chunks("prompt", 3)
        request = engine.arrive("r", keys)
        engine.found(request, 3 * CHUNK + 7)
        assert engine.prompts() == (), "it waits"
        engine.manager.count_prompt("r", 3 * CHUNK + 7, CHUNK)
        (prompt,) = engine.prompts()
        assert (prompt.request, prompt.tokens) == ("r", 3 * CHUNK + 7)
        assert unpack(prompt.keys, SHORT_KEY) == [key[-SHORT_KEY:] for key in keys]
        assert engine.prompts() == ()

    def test_have_no_keys_if_they_have_no_whole_chunk(self, engine: Counted) -> None:
        engine.start("r", 7)
        assert engine.prompts() == (RequestReport("r", 7, b""),)

    def test_of_probes_are_none_of_a_router_s_business(
        self, engine: Counted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        probe = Probe([], frozenset(), 0, salt="secret")
        monkeypatch.setattr(engine.manager.probes, "by_salt", {"secret": probe}.get)
        request = engine.arrive("r", chunks("probe", 1))
        engine.found(request, CHUNK + 1, salt="secret")
        engine.manager.count_prompt("r", CHUNK + 1, 0)
        engine.workload.scheduled("r", CHUNK + 1, 0)
        assert engine.prompts() == ()
        assert engine.load().prefill_tokens == CHUNK + 1, "they are work all the same"

    def test_that_are_not_shared_are_not_reported(self, engine: Counted) -> None:
        request = engine.arrive("r", chunks("prompt", 1))
        engine.manager.requests["r"].excluded = True
        engine.found(request, CHUNK)
        engine.manager.count_prompt("r", CHUNK, 0)
        assert engine.prompts() == ()

    def test_have_as_many_keys_as_a_tracker_takes(
        self, engine: Counted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(workload_module, "MAX_PROMPT_KEYS", 2)
        keys = chunks("prompt", 3)
        engine.start("r", 3 * CHUNK, keys=keys)
        (prompt,) = engine.prompts()
        assert unpack(prompt.keys, SHORT_KEY) == [key[-SHORT_KEY:] for key in keys[:2]]

    def test_beyond_what_a_tracker_takes_replace_the_oldest(self, engine: Counted) -> None:
        for number in range(MAX_REPORTS + 1):
            engine.start(f"r{number}", 100)
        names = [prompt.request for prompt in engine.prompts()]
        assert names == [f"r{number}" for number in range(1, MAX_REPORTS + 1)]


class TestAnswers:
    def test_are_reported_once_with_their_tokens(self, engine: Counted) -> None:
        engine.start("0_r-0123abcd", 300)
        engine.workload.answered("0_r-0123abcd", 50)
        assert engine.answers() == (RequestReport("r", 0, b"", answer=50),)
        assert engine.answers() == ()

    def test_are_reported_even_if_nothing_is_shared(self, engine: Counted) -> None:
        engine.start("r", 300)
        engine.manager.requests["r"].excluded = True
        engine.workload.answered("r", 50)
        assert [each.request for each in engine.answers()] == ["r"]

    @pytest.mark.parametrize("name", [prefill_id("r"), request_id("0123456789abcdef", 1), "a\nb"])
    def test_of_what_no_client_waits_for_are_none_of_a_router_s_business(
        self, engine: Counted, name: str
    ) -> None:
        engine.start(name, 300)
        engine.workload.answered(name, 1)
        assert engine.answers() == ()

    def test_of_probes_are_not_reported(
        self, engine: Counted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        probe = Probe([], frozenset(), 0, salt="secret")
        monkeypatch.setattr(engine.manager.probes, "by_salt", {"secret": probe}.get)
        engine.found(engine.arrive("r"), CHUNK + 1, salt="secret")
        engine.workload.answered("r", 1)
        assert engine.answers() == ()


def load_of(engine: Engine) -> Load:
    return check_load(engine.own.manager.workload.load())


def prompts_of(engine: Engine) -> list[str]:
    prompts = check_requests((*take_all(engine.own.manager.workload.prompts),))
    return [prompt.request for prompt in prompts]


def answers_of(engine: Engine) -> dict[str, int | None]:
    """Tokens of ended answers by request."""
    answers = check_requests((*take_all(engine.own.manager.workload.answers),))
    return {each.request: each.answer for each in answers}


class TestVllm:
    @pytest.fixture
    def engine(self, make_engine: MakeEngine) -> Engine:
        """Computes at most four blocks in a step."""
        return make_engine(max_num_batched_tokens=4 * BLOCK_TOKENS, max_num_seqs=4)

    def test_has_to_compute_a_prompt_until_its_steps_have_ended(self, engine: Engine) -> None:
        engine.ask("r", range(300), tokens=3)
        assert (load_of(engine).known, load_of(engine).requests) == ((), 1)
        assert prompts_of(engine) == []
        for missing in (300, 300 - 128, 300 - 256):
            step = engine.begin_step()
            assert load_of(engine).prefill_tokens == missing
            assert load_of(engine).known == ("r",)
            engine.end_step(step)
        assert prompts_of(engine) == ["r"]
        assert (load_of(engine).prefill_tokens, load_of(engine).requests) == (0, 1)
        engine.run()
        assert (load_of(engine).known, load_of(engine).requests) == ((), 0)

    def test_has_to_compute_no_more_of_a_prompt_than_it_misses(self, engine: Engine) -> None:
        engine.ask("first", range(300), tokens=3)
        engine.run()
        engine.ask("longer", range(410), tokens=3)
        step = engine.begin_step()
        assert load_of(engine).prefill_tokens == 410 - 288, "of its own blocks"
        engine.end_step(step)
        engine.run()
        engine.forget()
        engine.ask("again", range(410), tokens=3)
        engine.step()
        assert load_of(engine).prefill_tokens == 410 - 384, "of the pool's chunks"

    def test_has_not_looked_at_requests_for_which_it_has_no_place(
        self, make_engine: MakeEngine
    ) -> None:
        """How much they lack is not known."""
        engine = make_engine(max_num_seqs=1)
        engine.ask("first", range(100), tokens=3)
        engine.ask("second", range(100, 200), tokens=3)
        step = engine.begin_step()
        load = load_of(engine)
        assert (load.known, load.requests, load.prefill_tokens) == (("first",), 2, 100)
        engine.end_step(step)
        engine.run()

    def test_tells_for_how_many_tokens_it_has_free_blocks(self, engine: Engine) -> None:
        assert load_of(engine).free_tokens == load_of(engine).kv_tokens == 15 * BLOCK_TOKENS
        engine.ask("r", range(100), tokens=3)
        engine.step()
        assert load_of(engine).free_tokens == (15 - 4) * BLOCK_TOKENS
        assert load_of(engine).kv_tokens == 15 * BLOCK_TOKENS
        engine.run()
        engine.step()  # in which the last store ends
        assert load_of(engine).free_tokens == 15 * BLOCK_TOKENS

    def test_neither_counts_nor_holds_what_another_replica_prefills(self, engine: Engine) -> None:
        engine.own.tier.peers_hold(a=[])
        engine.ask("reads", range(1000, 1100), tokens=50)
        engine.step()
        key = load_of(engine).serving.mark_key
        engine.ask(with_mark("r", Elsewhere("a", 0.0, 1.0), key), range(300), tokens=3)
        step = engine.step()
        assert [*step.num_scheduled_tokens] == ["reads"]
        load = load_of(engine)
        assert (load.requests, load.prefill_tokens) == (2, 0)
        assert load.free_tokens == (15 - 4) * BLOCK_TOKENS, "its blocks are free"
        engine.own.clock.now += 100.0
        step = engine.begin_step()
        assert load_of(engine).prefill_tokens == 300, "the other one is late"
        engine.end_step(step)

    def test_computes_a_preempted_prompt_again(self, engine: Engine) -> None:
        for number in range(4):
            engine.ask(f"r{number}", range(300 * number, 300 * number + 100), tokens=100)
        resumed: dict[str, int] = {}
        while engine.scheduler.has_requests():
            step = engine.begin_step()
            for req_id in step.scheduled_cached_reqs.resumed_req_ids:
                resumed[req_id] = step.num_scheduled_tokens[req_id]
                assert resumed[req_id] > 100, "also what it has answered"
                assert load_of(engine).prefill_tokens == resumed[req_id] + 100, "and r3 waits"
            engine.end_step(step)
        assert resumed.keys() == {"r2"}
        load = load_of(engine)
        assert (load.prefill_tokens, load.requests) == (0, 0)
        assert sorted(prompts_of(engine)) == ["r0", "r1", "r2", "r3"], "each once"

    def test_tells_of_answers_how_long_they_were(self, engine: Engine) -> None:
        engine.ask("r", range(100), tokens=3)
        engine.ask("s", range(100, 200), tokens=50)
        engine.step()
        engine.step()
        assert answers_of(engine) == {}
        engine.step()
        assert answers_of(engine) == {"r": 3}
        engine.run()
        assert answers_of(engine) == {"s": 50}

    @pytest.mark.parametrize(
        "status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR]
    )
    def test_tells_nothing_of_answers_that_were_cut_off(
        self, engine: Engine, status: RequestStatus
    ) -> None:
        engine.ask("r", range(100), tokens=50)
        engine.step()
        engine.scheduler.finish_requests("r", status)
        engine.run()
        assert answers_of(engine) == {}

    def test_measures_steps_that_only_decode(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each takes 10 ms, and 2 ms for each request. One with a prompt takes a second."""
        now = 0.0
        monkeypatch.setattr(connector_module.time, "monotonic", lambda: now)
        for number, tokens in enumerate((40, 20, 20, 20)):
            engine.ask(f"r{number}", range(100 * number, 100 * number + 20), tokens)
        while engine.scheduler.has_requests():
            step = engine.begin_step()
            if requests := len(step.num_scheduled_tokens):
                now += 1.0 if step.scheduled_new_reqs else 0.01 + 0.002 * requests
            engine.end_step(step)
        assert load_of(engine).step == pytest.approx((0.01, 0.002))

    def test_counts_chunks_of_the_group_whose_keys_it_reports(self, engine: Engine) -> None:
        assert load_of(engine).serving._replace(mark_key="") == Serving(
            CHUNK, ROW_BYTES, None, "auto", 100, slots=4
        )
        layout = layout_of(Group(4 * CHUNK, window=1), Group(2 * CHUNK), Group(CHUNK))
        serving = serving_of(XavierConfig("model", NOBODY), layout, ROW_BYTES, slots=4)
        assert (serving.chunk_tokens, serving.chunk_bytes) == (2 * CHUNK, 3 * ROW_BYTES)


def test_a_prefix_cache_keeps_what_it_holds_until_as_much_was_written_again() -> None:
    assert Retention(0).seconds(0.0) == 0.0, "an engine without a prefix cache keeps nothing"
    retention = Retention(1000)
    assert retention.seconds(2.0) == Retention.LONGEST, "nothing was evicted yet"
    for second in range(4, 24, 2):
        retention.wrote(200)  # at 100 tokens per second
        assert retention.seconds(float(second)) == (600.0 if second < 12 else 10.0)
    retention.wrote(5000)
    assert retention.seconds(22.5) == pytest.approx(0.5)
