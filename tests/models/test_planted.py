"""Engines with equal namespaces that compute different rows share nothing, and say why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import planted
from tests.models.architectures import make
from tests.models.planted import tune_between_samples
from tests.models.sharing import FIRST, SECOND, Engines, kind
from xinference_xavier.engine.identity import weights_fingerprint

pytestmark = pytest.mark.process

PROMPT = 700


@pytest.fixture(params=["weights", "layout"])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engines]:
    """The second engine computes other rows than the first."""
    folder = make("llama", tmp_path / "model")
    if request.param == "weights":
        other = tune_between_samples(folder, tmp_path / "tuned")
        assert weights_fingerprint(other) == weights_fingerprint(folder)
        kinds = {FIRST: kind(), SECOND: kind({"model": str(other)})}
    else:
        extension = {"worker_extension_cls": "tests.models.planted.PerhapsReversedPages"}
        reverses = {planted.REVERSED: "1"}
        kinds = {FIRST: kind(extension), SECOND: kind(extension, environment=reverses)}
    with Engines(kinds, model=folder) as engines:
        yield engines


def test_they_share_nothing_and_say_why(engines: Engines) -> None:
    first, second = sorted(engines.tracker.call("status")["namespaces"])
    assert second == f"{first}~1", "their namespaces list equal fields"
    found = [engines.stats(name)["comparison"] for name in (FIRST, SECOND)]
    assert [each["differing"] for each in found] == [1, 1]
    assert {each["peer"] for each in found} == {FIRST, SECOND}
    assert all("layers.0" in each["layer"] for each in found)
    assert all(each["amount"] > 0.1 for each in found)
    prompt = engines.prompts.fresh(PROMPT)
    engines.ask(FIRST, prompt)
    engines.settle()
    assert engines.ask(SECOND, prompt)[0].cached == 0
    assert engines.hits(SECOND)["remote"] == 0
