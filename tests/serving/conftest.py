"""A supervisor with a tracker, and an API with xinference's own text routes."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import xoscar as xo

from tests.serving.supervisors import Supervisor
from tests.serving.text_api import TextApi, Told
from tests.serving.text_models import ModelProcess
from tests.tracker_pools import create_tracker
from xinference_xavier.routing.texts import Text


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


@pytest.fixture(scope="session")
def model_process() -> Iterator[ModelProcess]:
    process = ModelProcess()
    yield process
    process.end()


@pytest.fixture
async def start_text_api(
    model_process: ModelProcess,
) -> AsyncIterator[Callable[..., Awaitable[TextApi]]]:
    """Starts a `TextApi`, with the arguments of `TextApi.start`."""
    started: list[TextApi] = []

    async def start(*args: Any, **how: Any) -> TextApi:
        started.append(await TextApi(model_process.address).start(*args, **how))
        return started[-1]

    yield start
    for api in started:
        await api.stop()


@pytest.fixture
async def text_api(start_text_api: Callable[..., Awaitable[TextApi]]) -> TextApi:
    return await start_text_api()


@pytest.fixture
def told(text_api: TextApi, monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """What the router was told of each request so far."""
    route, told = text_api.cluster.router.route, []

    async def note(text: Text, session: str, **how: Any) -> Any:
        told.append(Told(text, session))
        return await route(text, session, **how)

    monkeypatch.setattr(text_api.cluster.router, "route", note)
    return told
