"""The page has a sentence for every event, in both languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from xinference_xavier.events import Event
from xinference_xavier.serving.ui import routes

WORDS = Path(routes.__file__).parent / "page" / "words.js"


@pytest.mark.parametrize("event", [kind.__name__ for kind in Event.__subclasses__()])
def test_every_event_has_a_sentence(event: str) -> None:
    _, english, chinese = re.split(r"^  (?:en|zh): {$", WORDS.read_text(), flags=re.MULTILINE)
    for words in (english, chinese):
        assert re.search(rf"^    {event}: \(e\) =>", words, re.MULTILINE)
