"""Fixtures for tests of the manager and its parts."""

from __future__ import annotations

import pytest

from tests.engine.scheduling import Scheduling


@pytest.fixture
def vllm() -> Scheduling:
    return Scheduling()
