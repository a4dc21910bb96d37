"""A supervisor with a tracker."""

from typing import Any

import pytest
import xoscar as xo

from tests.serving.supervisors import Supervisor
from tests.tracker_pools import create_tracker


@pytest.fixture
def address(pool: Any) -> str:
    """The address of a pool for the actors of a test."""
    return str(pool.external_address)


@pytest.fixture
async def supervisor(address: str) -> Any:
    """Knows the model `m`."""
    supervisor = await xo.create_actor(Supervisor, address=address, uid="supervisor")
    await supervisor.put("m")
    return supervisor


@pytest.fixture
async def tracker(address: str) -> Any:
    """The tracker of model `m`."""
    return await create_tracker(address, "m")
