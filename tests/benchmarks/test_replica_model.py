"""A replica on paper computes prompts and answers in common steps."""

from itertools import pairwise

import pytest

from benchmarks.replica_model import Engine, Job, ReplicaModel, Token
from benchmarks.traces import CHUNK, GROUP, Request

ENGINE = Engine(prefill=10_000, base_s=0.01, slope_s=0.001, batch_tokens=1000)


def request(name: str, answer: int, *, chunks: int = 0, tokens: int = 0) -> Request:
    """A prompt of so many chunks, and `tokens`."""
    keys = [f"{name} {number}".ljust(32).encode() + GROUP for number in range(chunks)]
    return Request(0.0, chunks * CHUNK + tokens, keys, answer)


class Stage:
    """A replica, and when each of its requests had its first and its last token."""

    def __init__(self, engine: Engine = ENGINE) -> None:
        self.replica = ReplicaModel("replica", engine)
        self.found: dict[tuple[str, Token], float] = {}

    def send(self, name: str, asked: Request, now: float) -> None:
        self.wait(now)
        self.replica.receive(Job(name, asked), now)

    def wait(self, now: float = 1e6) -> None:
        events = self.replica.advance(now)
        assert all(one.at <= two.at for one, two in pairwise(events))
        self.found |= {(event.job.name, event.token): event.at for event in events}

    def first(self, name: str) -> float:
        return self.found[name, Token.FIRST]

    def last(self, name: str) -> float:
        return self.found[name, Token.LAST]


def test_each_request_that_decodes_makes_the_steps_of_all_longer() -> None:
    stage = Stage()
    stage.send("a", request("a", 101, tokens=1000), 0.0)
    stage.send("b", request("b", 51, tokens=1), 1.0)
    stage.wait()
    assert stage.first("a") == pytest.approx(0.1)
    alone = 0.9 / 0.011  # steps until b comes
    prefill = 0.0001 + 0.011  # one step for both
    assert stage.first("b") == pytest.approx(1.0 + prefill)
    both = 101 - 1 - alone - 1
    assert stage.last("a") == pytest.approx(1.0 + prefill + both * 0.012)
    assert stage.last("b") == pytest.approx(stage.last("a") + (50 - both) * 0.011)


def test_a_prompt_is_computed_in_equal_parts_and_each_gives_every_answer_a_token() -> None:
    stage = Stage()
    stage.send("a", request("a", 201, tokens=1000), 0.0)
    stage.send("b", request("b", 1, tokens=2500), 1.0)
    stage.wait()
    assert stage.first("b") == stage.last("b") == pytest.approx(1.0 + 0.25 + 3 * 0.011)
    assert stage.last("a") == pytest.approx(0.1 + 200 * 0.011 + 0.25)


def test_context_makes_steps_longer() -> None:
    stage = Stage(ENGINE._replace(context_s=1e-6))
    stage.send("a", request("a", 101, tokens=1000), 0.0)
    stage.wait()
    assert stage.last("a") == pytest.approx(0.1 + 100 * (0.011 + 0.001_050_5))


def test_a_request_waits_for_a_slot() -> None:
    stage = Stage(ENGINE._replace(requests=1))
    stage.send("a", request("a", 101, tokens=1), 0.0)
    stage.send("b", request("b", 1, tokens=1), 0.5)
    stage.wait(0.6)
    assert stage.replica.gauges[:2] == (1, 1)
    stage.wait()
    assert stage.first("b") == pytest.approx(stage.last("a") + 0.0001)


@pytest.mark.parametrize(("name", "waits"), [("a", False), ("b", True)])
def test_a_request_waits_for_memory_unless_running_ones_share_its_prompt(
    name: str, waits: bool
) -> None:
    stage = Stage(ENGINE._replace(kv_tokens=15 * CHUNK))
    stage.send("a", request("a", 101, chunks=10, tokens=1), 0.0)
    stage.send("b", request(name, 101, chunks=10, tokens=1), 1.0)
    stage.wait(1.1)
    state = stage.replica.report(1.1)
    assert (state.waiting, state.running) == ((1, 1) if waits else (0, 2))
    assert state.free_tokens == 5 * CHUNK - 102 * state.running
    stage.wait()
    assert (stage.first("b") > stage.last("a")) is waits
    assert stage.replica.gauges == (0, 0, 0.0)


def test_a_report_tells_the_work_that_is_left_and_whose_it_is() -> None:
    stage = Stage()
    for name in ("a", "b"):
        stage.send(name, request(name, 10, tokens=1000), 0.0)
    stage.wait(0.05)
    state = stage.replica.report(0.05)
    assert state.prefill_s == pytest.approx(0.15)
    assert state.prefill_tokens == 1500
    assert state.known == {"a", "b"}
    assert stage.replica.next_at() == pytest.approx(0.1)
