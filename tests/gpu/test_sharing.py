"""Engines on one card share, in each mode of vLLM."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from examples.make_model import make_model
from tests.harness.engines import ALWAYS_FETCH, CHUNK, Completion, Fleet, Kind, Prompts
from xinference_xavier.peers import IN_PLACE

pytestmark = pytest.mark.gpu

CHUNKS = 8
TAIL = 7
"""Tokens after the whole chunks: fewer than a block, so that all hits reuse the same tokens."""
TOKENS = 8
AT_ONCE = 8
PROMPTS = Prompts()
WAYS = {"shared_memory": IN_PLACE, "gloo": "gloo"}
CONSUMERS = tuple(WAYS)
SAME_SHAPE = 1e-3
OTHER_SHAPE = 0.1
"""Tolerances of log-probabilities in bfloat16, computed in steps of the same shape and of other
shapes. One block of wrong bytes changes them by 0.85 and more."""


class Setting(NamedTuple):
    asynchronous: bool
    graphs: bool
    runner: str


SETTINGS = {
    "asynchronous, graphs, V2": Setting(True, True, "1"),
    "asynchronous, eager, V1": Setting(True, False, "0"),
    "one step at a time, graphs, V1": Setting(False, True, "0"),
    "one step at a time, eager, V2": Setting(False, False, "1"),
}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS)
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    setting: Setting = request.param
    arguments = {
        "async_scheduling": setting.asynchronous,
        "enforce_eager": not setting.graphs,
        "block_size": 16,
        "num_gpu_blocks_override": None,
        "gpu_memory_utilization": 0.2,
    }
    environment = {"VLLM_USE_V2_MODEL_RUNNER": setting.runner}
    kinds = {
        name: Kind(transport, arguments, ALWAYS_FETCH, environment=environment)
        for name, transport in {"donor": "auto", **{name: name for name in CONSUMERS}}.items()
    }
    model = make_model(tmp_path_factory.mktemp("model") / "small", tokenizer=False)
    with Fleet(kinds, model=model) as fleet:
        fleet.wait_mapped(("donor", "shared_memory"))
        yield fleet


def answer(fleet: Fleet, name: str, prompt: list[int]) -> Completion:
    (answer,) = fleet[name].call("answers", [prompt], TOKENS)
    return answer  # type: ignore[no-any-return]


def prompt() -> list[int]:
    return PROMPTS.fresh(CHUNKS * CHUNK + TAIL)


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_hits_of_every_kind_give_one_answer(fleet: Fleet, consumer: str) -> None:
    asked = prompt()
    fleet.flush()
    cold = answer(fleet, "donor", asked)
    fleet.wait_published("donor", CHUNKS)
    remote, local = answer(fleet, consumer, asked), answer(fleet, consumer, asked)
    fleet[consumer].call("forget")
    pool = answer(fleet, consumer, asked)
    assert cold.cached == 0
    for hit in (remote, local, pool):
        assert hit.cached == CHUNKS * CHUNK
        assert hit.tokens == local.tokens
        assert hit.chosen == pytest.approx(local.chosen, abs=SAME_SHAPE)
        assert hit.chosen[0] == pytest.approx(cold.chosen[0], abs=OTHER_SHAPE)
    fetches = fleet.stats(consumer)["fetches"]
    assert set(fetches["by_transport"]) == {WAYS[consumer]}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_many_at_once(fleet: Fleet, consumer: str) -> None:
    """Loads, stores and forward passes overlap on the card's streams."""
    asked = [prompt() for _ in range(AT_ONCE)]
    fleet.flush()
    cold = fleet[consumer].call("answers", asked, TOKENS)  # and then drop it
    fleet[consumer].call("forget")
    fleet.flush()
    fleet["donor"].call("answers", asked, TOKENS)
    fleet.wait_published("donor", AT_ONCE * CHUNKS)
    hits = fleet[consumer].call("answers", asked, TOKENS)
    assert {one.cached for one in cold} == {0}
    assert {one.cached for one in hits} == {CHUNKS * CHUNK}
    assert [one.chosen[0] for one in hits] == pytest.approx(
        [one.chosen[0] for one in cold], abs=OTHER_SHAPE
    )


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_what_was_generated_is_shared_too(fleet: Fleet, consumer: str) -> None:
    """The next turn of a chat, at another replica."""
    first = PROMPTS.fresh(CHUNKS * CHUNK - TOKENS // 2)
    fleet.flush()
    (said,) = fleet["donor"].call("answers", [first], CHUNK)
    fleet.wait_published("donor", CHUNKS)
    again = [*first, *said.tokens]
    hit = answer(fleet, consumer, again)
    assert hit.cached == CHUNKS * CHUNK
    fleet[consumer].call("forget")
    fleet.flush()
    cold = answer(fleet, consumer, again)
    assert cold.cached == 0
    assert hit.chosen[0] == pytest.approx(cold.chosen[0], abs=OTHER_SHAPE)
