"""An API with xinference's own text routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.serving.text_api import TextApi
from tests.serving.text_models import ModelProcess


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
