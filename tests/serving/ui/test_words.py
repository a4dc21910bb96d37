"""The page has a sentence for every event, way of routing and reason, in both languages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from xinference_xavier.events import Event
from xinference_xavier.options import Routing
from xinference_xavier.serving.ui import routes
from xinference_xavier.stats.schema import CHOICES

FOLDER = Path(routes.__file__).parent
WORDS = FOLDER / "page" / "words.js"


@pytest.mark.parametrize("event", [kind.__name__ for kind in Event.__subclasses__()])
def test_every_event_has_a_sentence(event: str) -> None:
    for words in languages(WORDS):
        assert re.search(rf"^    {event}: \(e\) =>", words, re.MULTILINE)


def languages(file: Path) -> list[str]:
    """The English words and the Chinese ones."""
    _, *words = re.split(r"^  (?:en|zh): {$", file.read_text(), flags=re.MULTILINE)
    assert len(words) == 2
    return words


def named(beginning: str, words: str) -> set[str]:
    return set(re.findall(rf'\b{beginning}_(\w*): "', words))


def test_every_way_of_routing_and_every_reason_has_a_sentence() -> None:
    for words in languages(WORDS):
        assert named("mode", words) == set(get_args(Routing))
        assert named("how", words) == {*get_args(Routing), ""}
        assert named("choice", words) == set(CHOICES)


def test_the_launch_dialog_names_every_way_of_routing() -> None:
    for words in languages(FOLDER / "dialog" / "words.js"):
        named = re.search(r"^    routings: {(.*)},$", words, re.MULTILINE)
        assert named is not None
        assert tuple(re.findall(r'(\w+): "', named[1])) == get_args(Routing)


@pytest.mark.parametrize("folder", ["page", "dialog"])
def test_every_text_that_is_shown_exists(folder: str) -> None:
    """A heading without one would be empty."""
    shown = {
        name
        for script in (FOLDER / folder).glob("*.js")
        for name in re.findall(r"\b(?:text|language\.words|words\(\))\.(\w+)", script.read_text())
    } - {"focus", "value"}  # of a field
    for words in languages(FOLDER / folder / "words.js"):
        assert shown <= set(re.findall(r"\b(\w+): ", words))
