"""The text routes of xinference itself, through the router."""

from __future__ import annotations

import pytest

from tests.serving.text_api import TEXT_ROUTES, TextApi


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_every_route_is_answered_by_the_chosen_replica(
    text_api: TextApi, stream: bool
) -> None:
    for path in TEXT_ROUTES:
        answer = await text_api.ask(path, stream=stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-xavier-replica"] in answer.text
    assert await text_api.serving() == {"m-0": 0, "m-1": 0}
