"""A consumer and a donor for the tests of transfer actors."""

from collections.abc import AsyncIterator

import pytest

from tests.transfer.sides import KINDS, NOBODY, Kind, Side, Sides


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    """Gloo, except in the contract of all transports."""
    return KINDS[getattr(request, "param", "gloo")]


@pytest.fixture
async def sides(kind: Kind) -> AsyncIterator[Sides]:
    sides = Sides(kind)
    yield sides
    for side in sides.all:
        await side.actor.close_links_except(NOBODY)
        await side.pool.stop()
        side.region.close()


@pytest.fixture
async def donor(sides: Sides) -> Side:
    return await sides.start("donor")


@pytest.fixture
async def consumer(sides: Sides) -> Side:
    return await sides.start("consumer")
