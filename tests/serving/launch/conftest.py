"""A supervisor in a real actor pool."""

from typing import Any

import pytest
import xoscar as xo

from tests.serving.launch.launching import AskedTracker, supervisor_class
from xinference_xavier.protocol.tracker import tracker_uid


@pytest.fixture
def supervisor(address: str) -> Any:
    return supervisor_class()(address)


@pytest.fixture
async def tracker(address: str) -> Any:
    """The tracker of model `m`."""
    return await xo.create_actor(AskedTracker, "m", address=address, uid=tracker_uid("m"))
