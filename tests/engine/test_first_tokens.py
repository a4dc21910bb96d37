"""Each source of tokens has a counter of vLLM's. Each wait for a first token counts once, by where
most of the prompt came from, however vLLM schedules the request; and only if somebody waits. Each
prompt counts once by what it has in common with others."""

from typing import Any

import pytest
from vllm.v1.kv_offload.base import OffloadingCounterMetadata
from vllm.v1.request import RequestStatus

from tests.engine.scheduling import CHUNK, Clock, Scheduling, chunks
from tests.engine.vllm_scheduler import Engine, MakeEngine
from xinference_xavier.engine import first_tokens
from xinference_xavier.engine.first_tokens import FirstTokenTimes, definitions, stats_of
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.protocol.load import prefill_id
from xinference_xavier.protocol.prefixes import request_id
from xinference_xavier.stats.schema import HIT_SOURCES, Hits

PROMPT = range(300, 300 + 130)
MAX_STEP = 64  # tokens


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(make_engine: MakeEngine, clock: Clock) -> Engine:
    """The test's requests arrive at time 0."""
    made = make_engine(max_num_batched_tokens=MAX_STEP, max_num_seqs=2)
    made.own.manager.first_tokens = FirstTokenTimes(clock)
    return made


def waited(engine: Engine) -> dict[str, tuple[int, float]]:
    """The number of waits and their sum, by source."""
    by_source = engine.own.manager.stats()["first_tokens"]
    found = {source: (sum(each["counts"]), each["sum"]) for source, each in by_source.items()}
    return {source: each for source, each in found.items() if each[0]}


def test_a_wait_ends_with_the_step_that_answers_the_first_token(
    engine: Engine, clock: Clock
) -> None:
    engine.ask("r", PROMPT, tokens=5)
    for _ in range(2):
        engine.step()
    assert waited(engine) == {}, "the prompt takes three steps"
    clock.now = 3.0
    engine.step()
    assert waited(engine) == {"computed": (1, 3.0)}
    clock.now = 9.0
    engine.run()
    assert waited(engine) == {"computed": (1, 3.0)}


def test_an_answer_of_one_token_counts(engine: Engine, clock: Clock) -> None:
    clock.now = 2.0
    engine.ask("r", PROMPT, tokens=1)
    engine.run()
    assert waited(engine) == {"computed": (1, 2.0)}


def test_prompts_from_the_pool_and_from_vllm_s_own_cache(engine: Engine, clock: Clock) -> None:
    clock.now = 1.0
    for name in ("computed", "vllm", "pool"):
        if name == "pool":
            engine.forget()
        engine.ask(name, PROMPT, tokens=2)
        engine.run()
    assert waited(engine) == dict.fromkeys(("computed", "prefix_cache", "local_pool"), (1, 1.0))


def test_a_request_that_is_preempted_before_its_first_token_counts_once(
    engine: Engine, clock: Clock
) -> None:
    engine.ask("r", PROMPT, tokens=5)
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    clock.now = 4.0
    engine.run()
    assert waited(engine) == {"computed": (1, 4.0)}


def test_a_request_that_is_preempted_after_its_first_token_does_not_count_again(
    engine: Engine, clock: Clock
) -> None:
    engine.ask("r", PROMPT, tokens=50)
    clock.now = 1.0
    for _ in range(3):
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    clock.now = 5.0
    engine.run()
    assert waited(engine) == {"computed": (1, 1.0)}


def test_a_request_whose_client_goes_does_not_count(engine: Engine, clock: Clock) -> None:
    engine.ask("gone", PROMPT, tokens=5)
    engine.step()
    clock.now = 1.0
    engine.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    engine.ask("next", range(900, 910), tokens=1)
    engine.run()
    assert waited(engine) == {"computed": (1, 1.0)}
    assert not engine.own.manager.first_tokens._awaited


@pytest.mark.parametrize("name", [prefill_id("r"), request_id("0123456789abcdef", 1)])
def test_nobody_waits_for_the_tokens_of_prefills_and_of_named_prefixes(
    engine: Engine, name: str
) -> None:
    engine.ask(f"{name}-0123abcd", PROMPT, tokens=1)
    engine.run()
    assert waited(engine) == {}


def test_a_clock_that_was_set_back_makes_no_negative_wait(engine: Engine, clock: Clock) -> None:
    clock.now = -9.0
    engine.ask("r", PROMPT, tokens=1)
    engine.run()
    assert waited(engine) == {"computed": (1, 0.0)}


def test_every_source_of_tokens_has_a_counter_that_vllm_knows() -> None:
    hits = Hits(**dict.fromkeys(HIT_SOURCES, 1))
    counters = XavierSpec.build_metric_definitions({})
    assert stats_of(hits).reduce().keys() == counters.keys() == definitions().keys()
    for counter in counters.values():
        assert isinstance(counter, OffloadingCounterMetadata)
        assert counter.documentation


# -- what prompts have in common ---------------------------------------------------------------


@pytest.fixture
def vllm() -> Scheduling:
    return Scheduling()


def asks(vllm: Scheduling, req_id: str, prompt: str, count: int = 3, **asked: Any) -> None:
    """A request for so many chunks is computed and ends."""
    request = vllm.arrive(req_id, chunks(prompt, count))
    hits = vllm.attempt(request, **asked)
    assert hits is not None
    vllm.schedule(request, hits)
    vllm.manager.on_request_finished(request.context)


def counted(vllm: Scheduling) -> dict[str, int]:
    """What is counted at all."""
    return {name: count for name, count in vllm.manager.stats()["prompts"].items() if count}


def test_a_prompt_is_new_unless_a_replica_holds_its_first_chunk(vllm: Scheduling) -> None:
    vllm.tier.peers_hold(peer=chunks("at a peer", 1))
    asks(vllm, "one", "at a peer")  # which is not worth a fetch
    assert counted(vllm) == {"seen": 1}
    asks(vllm, "other", "nowhere")
    assert counted(vllm) == {"seen": 2, "new": 1}


def test_what_vllm_has_itself_is_reused_and_less_than_a_chunk_is_new(vllm: Scheduling) -> None:
    for name, tokens in (("r", 2 * CHUNK), ("s", CHUNK - 16)):
        request = vllm.arrive(name, chunks(name, 3))
        vllm.manager.begin_lookups(name, tokens)
        vllm.schedule(request, 0)
    assert counted(vllm) == {"seen": 2, "new": 1, "longest": 2 * CHUNK}


def test_a_prompt_shorter_than_a_chunk_is_not_new(vllm: Scheduling) -> None:
    request = vllm.arrive("r", [])
    vllm.attempt(request)
    vllm.manager.count_prompt("r", CHUNK - 1, 0)
    assert counted(vllm) == {"seen": 1, "shorter": 1}


def test_a_salt_is_new_unless_one_of_the_last_thousand_was_equal(
    vllm: Scheduling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_tokens, "LIMIT", 2)
    for number, salt in enumerate([None, "a", "a", "b", "a", "c", "a", "b"]):
        asks(vllm, str(number), "prompt", salt=salt)
    assert vllm.manager.stats()["prompts"]["new_salts"] == len("abcb")


def test_a_request_that_is_scheduled_again_is_one_prompt(vllm: Scheduling) -> None:
    request = vllm.arrive("r", chunks("prompt", 3))
    for _ in range(2):
        vllm.attempt(request)
        vllm.schedule(request, 0)
    assert counted(vllm) == {"seen": 1, "new": 1}
