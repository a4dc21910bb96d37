"""What a request marks is kept, and the request goes on unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.prefixes.test_named_model import GUIDE, HELLO, Model
from xinference_xavier.serving.prefixes.kept_model import KeptModel

TOOLS = [{"name": "look"}]


class Asking:
    def __init__(self, prompt_s: float = 0.0) -> None:
        self.kept: list[tuple[Any, float]] = []
        self.model = KeptModel(Model(), lambda *kept: self.kept.append(kept), prompt_s)


async def test_a_prompt_is_kept() -> None:
    asking = Asking(600.0)
    assert await asking.model.generate("text", {}) == ("text", {}, {})
    await asking.model.generate([1, 2, 3], {})
    assert asking.kept == [({"prompt": "text"}, 600.0)]


async def test_messages_and_tools_are_kept() -> None:
    asking = Asking(600.0)
    assert await asking.model.chat([HELLO], {"tools": TOOLS}) == ([HELLO], {"tools": TOOLS}, {})
    await asking.model.chat([HELLO], {})
    assert asking.kept == [
        ({"messages": [HELLO], "tools": TOOLS}, 600.0),
        ({"messages": [HELLO]}, 600.0),
    ]


@pytest.mark.parametrize(
    ("tools", "kept"),
    [({}, {"tools": TOOLS}), ({"tools": []}, {}), ({"tools": TOOLS}, {"tools": TOOLS})],
)
async def test_a_chat_is_kept_up_to_its_mark(tools: Any, kept: Any) -> None:
    asking = Asking()
    config = {
        "tools": TOOLS,
        "_anthropic_cache_control": {"messages": [GUIDE], "ttl": 300, **tools},
    }
    prepared = await asking.model.prepare_anthropic_request([GUIDE, HELLO], config)
    assert prepared == {"messages": [GUIDE, HELLO], "generate_config": config}
    await asking.model.chat([GUIDE, HELLO], {})
    assert asking.kept == [({"messages": [GUIDE], **kept}, 300.0)]


async def test_without_a_mark_nothing_is_kept() -> None:
    asking = Asking()
    await asking.model.prepare_anthropic_request([HELLO], {})
    await asking.model.chat([HELLO], {})
    await asking.model.generate("text", {})
    assert asking.kept == []
    assert asking.model.uid == "m-0"
