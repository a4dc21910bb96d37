"""A consumer and a donor for the tests of transfer actors."""

from collections.abc import AsyncIterator

import pytest

from tests.transfer.sides import KINDS, Kind, Side, Sides


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    """Gloo, except in the contract of all transports."""
    return KINDS[getattr(request, "param", "gloo")]


@pytest.fixture
async def sides(kind: Kind) -> AsyncIterator[Sides]:
    async with Sides(kind) as sides:
        yield sides


@pytest.fixture
async def donor(sides: Sides) -> Side:
    return await sides.start("donor")


@pytest.fixture
async def consumer(sides: Sides) -> Side:
    return await sides.start("consumer")
