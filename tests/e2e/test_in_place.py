"""Engines of one host load each other's rows from where they lie."""

from collections.abc import Iterator

import pytest

from examples.processes import until
from tests.harness.engines import (
    ALWAYS_FETCH,
    CHUNK,
    STEP_TOKENS,
    Completion,
    Fleet,
    Kind,
    Prompts,
)
from xinference_xavier.peers import IN_PLACE

pytestmark = [pytest.mark.process, pytest.mark.engine]

CHUNKS = 12
TOKENS = 8
PROMPTS = Prompts(63)
DEADLINE = 60.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """They schedule a step before they have the output of the previous one, and their workers have
    processes of their own, as on cards."""
    kinds = {
        name: Kind(transport, options=ALWAYS_FETCH, asynchronous=True)
        for name, transport in {"donor": "auto", "near": "auto", "far": "gloo"}.items()
    }
    with Fleet(kinds) as fleet:
        fleet.wait_mapped(("donor", "near"))
        yield fleet


def answers(fleet: Fleet, name: str, prompts: list[list[int]]) -> list[Completion]:
    found: list[Completion] = fleet[name].call("answers", prompts, TOKENS)
    return found


def test_hits_give_the_donors_answer_and_leave_no_copy(fleet: Fleet) -> None:
    """Several at once: the prompts take several steps."""
    prompts = [PROMPTS.fresh(CHUNKS * CHUNK + 7) for _ in range(4)]
    assert len(prompts) * CHUNKS * CHUNK > 2 * STEP_TOKENS
    cold = answers(fleet, "donor", prompts)
    fleet.wait_published("donor", CHUNKS * len(prompts))
    kept = fleet.stats("near")["pool"]["ready"]
    hits = answers(fleet, "near", prompts)
    assert [hit.tokens for hit in hits] == [one.tokens for one in cold]
    assert {hit.cached for hit in hits} == {CHUNKS * CHUNK}
    near = fleet.stats("near")
    assert near["transport"] == IN_PLACE
    assert set(near["fetches"]["by_transport"]) == {IN_PLACE}
    assert near["pool"]["ready"] == kept
    assert until(lambda: fleet.stats("donor")["pool"]["pinned"] == 0, DEADLINE)


def test_a_peer_that_is_no_neighbour_copies_and_what_it_keeps_is_not_fetched_again(
    fleet: Fleet,
) -> None:
    prompt = PROMPTS.fresh(CHUNKS * CHUNK + 7)
    (cold,) = answers(fleet, "donor", [prompt])
    fleet.wait_published("donor", CHUNKS)
    (hit,) = answers(fleet, "far", [prompt])
    assert (hit.tokens, hit.cached) == (cold.tokens, CHUNKS * CHUNK)
    assert set(fleet.stats("far")["fetches"]["by_transport"]) == {"gloo"}


def test_what_a_killed_neighbour_had_is_computed_and_its_memory_is_free(fleet: Fleet) -> None:
    prompt = PROMPTS.fresh(CHUNKS * CHUNK + 7)
    (cold,) = answers(fleet, "donor", [prompt])
    fleet.wait_published("donor", CHUNKS)
    mapped = fleet.stats("near")["mapped_bytes"]
    fleet["donor"].close(0.0)
    assert until(lambda: fleet.stats("near")["mapped_bytes"] < mapped, DEADLINE)
    (computed,) = answers(fleet, "near", [prompt])
    assert (computed.tokens, computed.cached) == (cold.tokens, 0)
