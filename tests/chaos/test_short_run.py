"""The short form of `make chaos`: a few dozen faults without damage."""

import pytest

from tests.chaos.near import AUTO
from tests.chaos.run import run

pytestmark = pytest.mark.process

SEED = 20261121
STEPS = 60


@pytest.mark.parametrize("transport", [AUTO, pytest.param("nixl", marks=pytest.mark.long)])
def test_a_short_run_leaves_no_wrong_byte_no_failed_request_and_nothing_behind(
    transport: str,
) -> None:
    report = run(SEED, 600.0, steps=STEPS, transport=transport)
    assert report.failures() == []
    assert report.faults.total() >= STEPS // 2
    assert len(report.faults) >= 10
    assert report.requests > 100
    assert report.rollbacks.total() > 0
