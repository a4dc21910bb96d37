"""One scene for all tests that look at replicas from outside."""

from __future__ import annotations

import pytest

from tests.monitor.scene import COUNTED, Scene
from tests.pair import Pair


@pytest.fixture
def scene(pair: Pair) -> Scene:
    for replica in (pair.first, pair.second):
        replica.count(COUNTED)
    return Scene(*pair)
