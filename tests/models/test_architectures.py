"""Every kind of model: an engine copies what another one computed, and the answer stays the same.

The answer must equal that of a cold engine without this package, in tokens and log-probabilities.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.models.architectures import ARCHITECTURES, Architecture, make
from tests.models.sharing import (
    CHUNK,
    FIRST,
    PLAIN,
    SECOND,
    Engines,
    difference,
    kind,
    three,
)
from xinference_xavier.errors import NotSharing

pytestmark = pytest.mark.process

TAIL = 80


class Model(NamedTuple):
    architecture: Architecture
    engines: Engines


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if architecture.common else [pytest.mark.long])
        for name, architecture in ARCHITECTURES.items()
        if architecture.runs_here
    ],
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    architecture = ARCHITECTURES[request.param]
    folder = make(request.param, tmp_path_factory.mktemp("models"))
    like = kind(architecture.arguments_for(folder), {"pool_bytes": architecture.pool_bytes})
    with three(folder, like) as engines:
        yield Model(architecture, engines)


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(1000, id="several chunks"),
        pytest.param(6 * CHUNK, id="whole chunks"),
        pytest.param(6 * CHUNK + 1, id="a token more than whole chunks"),
        pytest.param(CHUNK - 1, id="less than a chunk"),
    ],
)
def test_what_another_engine_computed_gives_the_same_answer(model: Model, tokens: int) -> None:
    engines, architecture = model.engines, model.architecture
    prompt = engines.prompts.fresh(tokens)
    shared = engines.share(prompt)
    loadable = tokens if architecture.loads_all else tokens - 1
    expected = loadable // architecture.chunk * architecture.chunk if architecture.shares else 0
    if architecture.all_but_a_token:
        expected = min(expected, tokens - 1)
    assert (shared.remote, shared.second[0].cached) == (expected, expected)
    engines.forget(SECOND)
    again = engines.ask(SECOND, prompt)
    assert again[0].cached >= shared.remote
    assert difference(again, shared.second) < architecture.tolerance
    assert shared.error < architecture.tolerance


def test_a_prompt_longer_than_the_pool(model: Model) -> None:
    engines = model.engines
    engines.flush([FIRST, SECOND])
    shared = engines.share(engines.prompts.fresh(3900))
    assert shared.error < model.architecture.tolerance
    if model.architecture.fills_pool:
        pool = engines.stats(FIRST)["pool"]
        assert pool["ready"] == pool["rows"]


def test_another_prefix_gives_another_answer(model: Model) -> None:
    """Otherwise the tests above would prove nothing."""
    engines = model.engines
    prompt = engines.prompts.fresh(1000)
    other = engines.prompts.fresh(len(prompt) - TAIL) + prompt[-TAIL:]
    answers = [engines.ask(PLAIN, each) for each in (prompt, other)]
    assert difference(*answers) > 100 * model.architecture.tolerance


def test_engines_that_do_not_share_say_why(model: Model) -> None:
    expected = None if model.architecture.shares else NotSharing.NO_PREFIX_CACHING
    for name in (FIRST, SECOND):
        assert model.engines.stats(name)["not_sharing"] == expected
