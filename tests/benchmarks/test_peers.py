"""Every way is compared with computing and with the ideal; the page names one that does not run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import peers
from benchmarks.engines import Asked, EngineError
from tests.benchmarks.parts import shown


class Engine:
    """Answers from a list, or fails."""

    def __init__(self, *answers: Asked | EngineError) -> None:
        self._answers = iter(answers)

    def ask(self, prompt: list[int]) -> Asked:
        answer = next(self._answers)
        if isinstance(answer, EngineError):
            raise answer
        return answer


class Fleet:
    def __init__(self, engine: Engine) -> None:
        self.failed: dict[str, str] = {}
        self._engine = engine

    def __getitem__(self, name: str) -> Engine:
        return self._engine


def asked(seconds: float, cached: int) -> Asked:
    return Asked(seconds, (seconds,), cached)


@pytest.mark.parametrize(
    ("answers", "times", "why"),
    [
        ([asked(2.0, 0), asked(0.5, 256)], (2.0, 0.5), None),
        ([asked(2.0, 0), asked(0.5, 128)], (None, None), "128 of 256"),
        ([EngineError("it died")], (None, None), "it died"),
    ],
)
def test_a_way_that_does_not_run_or_reuse_is_not_compared(
    answers: list[Any], times: tuple[float | None, ...], why: str | None
) -> None:
    fleet: Any = Fleet(Engine(*answers))
    assert peers._of_the_example(fleet, [0] * 300, 256) == times
    if why is None:
        assert fleet.failed == {}
    else:
        assert why in fleet.failed["example"]
        assert peers._of_the_example(fleet, [0] * 300, 256) == (None, None)


def test_the_page_leaves_out_what_was_not_measured_and_says_why() -> None:
    whole = peers.Sample(4.0, 0.1, 4.2, 0.2, 5.0, 0.4)
    without = whole._replace(example_cold=None, example=None)
    found = peers.summary(4000, [whole] * 5)
    assert found["ways"]["ours"]["/computed"]["median"] == pytest.approx(0.05)
    assert found["ways"]["example"]["/local"]["median"] == pytest.approx(4)
    text = shown(peers, {"failed": {}, "lengths": [found]})
    assert text.count("| 4000 | ") == 6
    part = {"failed": {"example": "it died"}, "lengths": [peers.summary(4000, [without] * 5)]}
    text = shown(peers, part)
    assert text.count("| 4000 | ") == 4
    assert "could not be measured here: it died." in text
