"""Two regions, and a link from `there` to `here`. A test module chooses the `transport`."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.transfer.transports.links import Halves, Link, Side
from xinference_xavier.transfer.transports.base import Transport


@pytest.fixture
def here(transport: type[Transport]) -> Iterator[Side]:
    side = Side.make(transport, seed=1)
    yield side
    side.region.close()


@pytest.fixture
def there(transport: type[Transport]) -> Iterator[Side]:
    side = Side.make(transport, seed=2)
    yield side
    side.region.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def halves(here: Side, there: Side, threads: ThreadPoolExecutor) -> Iterator[Halves]:
    """Whatever waits for the other half ends before the `threads` do."""
    halves = Halves.make(here, there)
    yield halves
    halves.withdraw()


@pytest.fixture
def link(here: Side, there: Side, threads: ThreadPoolExecutor) -> Iterator[Link]:
    link = Link.make(here, there, threads)
    yield link
    link.close()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """In an idle process it may not come for ever."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
