"""One scene for all tests that look at replicas from outside."""

import pytest

from tests.harness.api import Pair
from tests.monitor.scene import COUNTED, Scene


@pytest.fixture
def scene(pair: Pair) -> Scene:
    for replica in (pair.first, pair.second):
        replica.count(COUNTED)
    return Scene(*pair)
