"""What the tests of the manager share."""

from __future__ import annotations

import pytest

from tests.engine.scheduling import Scheduling


@pytest.fixture
def vllm() -> Scheduling:
    return Scheduling()
