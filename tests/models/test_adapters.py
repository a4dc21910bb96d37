"""LoRA adapters: each shares only with itself, even if another one had its name and path before."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.adapters import write_adapter
from tests.models.architectures import make
from tests.models.sharing import (
    FIRST,
    PLAIN,
    SECOND,
    TOLERANCE,
    Engines,
    difference,
    kind,
    three,
    whole_chunks,
)

pytestmark = pytest.mark.process

PROMPT = 700


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = make("llama", tmp_path_factory.mktemp("base"))
    arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with three(folder, kind(arguments)) as engines:
        yield engines


@pytest.fixture(scope="module")
def base(engines: Engines) -> Path:
    model = engines.model
    assert model is not None
    return model


def load(engines: Engines, lora: dict[str, Any]) -> None:
    """Have all engines load the adapter and read its files, with prompts too short to share."""
    for name in (FIRST, SECOND, PLAIN):
        for _ in range(2):
            engines.ask(name, engines.prompts.fresh(20), lora=lora)


def test_engines_compare_themselves_although_nobody_asks_them_anything(engines: Engines) -> None:
    """So those that get only requests with adapters or images can share, too."""
    for name in (FIRST, SECOND):
        stats = engines.stats(name)
        assert stats["requests"] == 0
        assert (stats["comparison"]["compared"], stats["comparison"]["canaries"]) == (1, 2)
        assert stats["comparison"]["lost_probes"] == 0


def test_each_adapter_shares_with_itself_only(engines: Engines, base: Path, tmp_path: Path) -> None:
    prompt = engines.prompts.fresh(PROMPT)
    answers = [engines.share(prompt)]
    for number in (1, 2):
        folder = write_adapter(tmp_path / str(number), base, seed=number)
        lora = {"lora_name": f"adapter{number}", "lora_int_id": number, "lora_path": str(folder)}
        load(engines, lora)
        answers.append(engines.share(prompt, lora=lora))
        assert answers[-1].first[0].cached == 0
    assert [each.remote for each in answers] == [whole_chunks(PROMPT)] * 3
    assert max(each.error for each in answers) < TOLERANCE
    for one, other in itertools.pairwise(answers):
        assert difference(one.cold, other.cold) > 100 * TOLERANCE


def test_an_adapter_replaced_in_place_shares_nothing_with_the_old_one(
    engines: Engines, base: Path, tmp_path: Path
) -> None:
    prompt = engines.prompts.fresh(PROMPT)
    folder = write_adapter(tmp_path / "replaced", base, seed=3)
    lora = {"lora_name": "replaced", "lora_int_id": 3, "lora_path": str(folder)}
    load(engines, lora)
    old = engines.ask(FIRST, prompt, lora=lora)
    engines.settle()
    write_adapter(folder, base, seed=4)
    lora["load_inplace"] = True
    load(engines, lora)
    del lora["load_inplace"]
    for name in (FIRST, SECOND, PLAIN):
        engines.forget(name)  # vLLM's own cache knows only the adapter's name
    before = engines.hits(SECOND)["remote"]
    new = engines.ask(SECOND, prompt, lora=lora)
    assert (new[0].cached, engines.hits(SECOND)["remote"]) == (0, before)
    cold = engines.ask(PLAIN, prompt, lora=lora)
    assert difference(new, cold) < TOLERANCE
    assert difference(new, old) > 100 * TOLERANCE
    engines.settle()
    again = engines.ask(FIRST, prompt, lora=lora)
    assert again[0].cached == whole_chunks(PROMPT)
    assert difference(again, cold) < TOLERANCE
