"""vLLM engines find on the disk of their host what an engine before them has saved there."""

from functools import partial
from pathlib import Path

import pytest

from tests.e2e.engines import fine_tune
from tests.harness.engines import CHUNK, Fleet, Kind, Prompts, whole_chunks
from tests.harness.replicas import wait_until

pytestmark = pytest.mark.engine

TOKENS = 2000
CHUNKS = whole_chunks(TOKENS)
OWN, OTHER = "own", "other"


def life(model: Path, folder: Path, *names: str) -> Fleet:
    """Engines of one host, and its disk."""
    kind = Kind(options={"disk": str(folder / "disk")})
    return Fleet(dict.fromkeys(names, kind), model=model)


def can_read(fleet: Fleet, name: str, chunks: int) -> bool:
    rows: int = fleet.stats(name)["disk"]["rows"]
    return rows >= chunks


def hits(fleet: Fleet, name: str) -> dict[str, int]:
    """The hits, once all tokens of the prompt are counted."""
    wait_until(lambda: sum(fleet.stats(name)["hits"].values()) >= TOKENS, "they are counted")
    found: dict[str, int] = fleet.stats(name)["hits"]
    return found


def test_prompts_that_were_used_twice_are_not_computed_after_a_restart(
    model_folder: Path, tmp_path: Path
) -> None:
    """Unless other weights computed them, which the engine got in place."""
    *prompts, of_others = [Prompts(seed).fresh(TOKENS) for seed in (1, 2, 3)]
    with life(model_folder, tmp_path, OWN) as fleet:
        computed = [fleet[OWN].answer(prompt).tokens for prompt in prompts]
        for prompt in prompts:
            fleet[OWN].answer(prompt)
        wait_until(lambda: can_read(fleet, OWN, 2 * CHUNKS), "all of it is saved")
        fleet[OWN].call("load_weights", str(fine_tune(model_folder, tmp_path / "tuned")))
        for _ in range(2):
            fleet[OWN].answer(of_others)
        wait_until(lambda: fleet.stats(OWN)["disk"]["state"] == "closed", "it is closed")
    with life(model_folder, tmp_path, OWN, OTHER) as fleet:
        for name, prompt, expected in zip((OWN, OTHER), prompts, computed, strict=True):
            wait_until(partial(can_read, fleet, name, 2 * CHUNKS), "all of it can be read")
            answer = fleet[name].answer(prompt)
            assert (answer.tokens, answer.cached) == (expected, CHUNKS * CHUNK)
            assert hits(fleet, name)["disk"] == CHUNKS * CHUNK
            assert fleet.stats(name)["fetches"]["rolled_back"] == {}
        assert fleet[OWN].answer(of_others).cached == 0
