"""A vLLM engine finds on the disk what an engine before it has saved there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.engines import CHUNK, Fleet, Kind, Prompts, whole_chunks
from tests.harness.replicas import wait_until

pytestmark = pytest.mark.engine

TOKENS = 2000
CHUNKS = whole_chunks(TOKENS)
OWN = "own"


def life(folder: Path) -> Fleet:
    return Fleet({OWN: Kind(options={"disk": str(folder)})})


def stats(fleet: Fleet) -> dict[str, Any]:
    found: dict[str, Any] = fleet.replicas()[OWN]["stats"]
    return found


def test_a_prompt_that_was_used_twice_is_not_computed_after_a_restart(tmp_path: Path) -> None:
    prompt = Prompts().fresh(TOKENS)
    with life(tmp_path) as fleet:
        computed = fleet[OWN].answer(prompt)
        fleet[OWN].answer(prompt)
        wait_until(lambda: stats(fleet)["disk"]["rows"] >= CHUNKS, "all of it is saved")
    with life(tmp_path) as fleet:
        wait_until(lambda: stats(fleet)["disk"]["rows"] >= CHUNKS, "it is there again")
        answer = fleet[OWN].answer(prompt)
        assert (answer.tokens, answer.cached) == (computed.tokens, CHUNKS * CHUNK)
        wait_until(lambda: stats(fleet)["hits"]["disk"] == CHUNKS * CHUNK, "it came from there")
        assert stats(fleet)["fetches"]["rolled_back"] == {}
