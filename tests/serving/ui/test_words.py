"""Page and launch dialog have all their texts in English and in Chinese."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.serving.ui.scripts import Scripts
from xinference_xavier.errors import ROLLBACKS
from xinference_xavier.events import Event
from xinference_xavier.options import TRANSPORTS, Backend, Routing
from xinference_xavier.peers import IN_PLACE
from xinference_xavier.serving.ui import routes
from xinference_xavier.stats.schema import CHOICES, HIT_SOURCES, PREFIX_STATES

FOLDER = Path(routes.__file__).parent
LANGUAGES = routes.languages()
ENGLISH = LANGUAGES["en"]
PAGE = ENGLISH["page"]


def texts(words: dict[str, Any], above: str = "") -> dict[str, str]:
    """By path, such as `page.title`."""
    flat: dict[str, str] = {}
    for name, word in words.items():
        flat |= texts(word, f"{above}{name}.") if isinstance(word, dict) else {above + name: word}
    return flat


def placeholders(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", text))


@pytest.mark.parametrize("code", LANGUAGES)
def test_every_language_has_the_same_texts_with_the_same_placeholders(code: str) -> None:
    english, other = texts(ENGLISH), texts(LANGUAGES[code])
    assert list(other) == list(english)
    for name, text in other.items():
        assert text.strip() == text != "", name
        assert placeholders(text) == placeholders(english[name]), name


def named(beginning: str) -> set[str]:
    return {name.removeprefix(beginning) for name in PAGE if name.startswith(beginning)}


def test_every_event_has_a_sentence() -> None:
    events = {kind.__name__ for kind in Event.__subclasses__()}
    switched = {"SharingSwitched_on", "SharingSwitched_off"}
    assert (events - {"SharingSwitched"}) | switched == {name for name in PAGE if name[0].isupper()}


def test_every_name_of_the_server_has_a_text() -> None:
    assert named("mode_") == set(get_args(Routing))
    assert named("how_") == {*get_args(Routing), ""}
    assert named("choice_") == set(CHOICES)
    assert named("prefix_") == {*PREFIX_STATES, "cache"}
    assert named("transport_") == {*TRANSPORTS, IN_PLACE} - {"auto"}
    assert ENGLISH["reasons"].keys() == set(ROLLBACKS)
    assert PAGE.keys() >= set(HIT_SOURCES)
    assert tuple(ENGLISH["dialog"]["backends"]) == get_args(Backend)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Language", tuple(LANGUAGES)),
        ("Source", HIT_SOURCES),
        ("Choice", CHOICES),
        ("Routing", get_args(Routing)),
    ],
)
def test_scripts_are_checked_against_what_the_server_has(
    name: str, values: tuple[str, ...]
) -> None:
    declared = re.search(rf"type {name} = (.*);", (FOLDER / "constants.d.ts").read_text())
    assert declared is not None
    assert sorted(re.findall(r'"([^"]+)"', declared[1])) == sorted(values)


@pytest.mark.parametrize(
    ("setting", "browser", "code"),
    [
        ("zh", "en-US", "zh"),
        ("zh-TW", "en-US", "zh"),
        ("ja", "zh-CN", "en"),
        (None, "zh-CN", "zh"),
        (None, "ko-KR", "en"),
    ],
)
def test_the_language_is_that_of_xinferences_pages(
    scripts: Scripts, setting: str | None, browser: str, code: str
) -> None:
    """Without a setting they are in English, except for browsers in Chinese."""
    assert scripts.call("languages.js", "languageOf", setting, browser) == code


def test_placeholders_are_filled(scripts: Scripts) -> None:
    filled = scripts.call("languages.js", "fill", "{a} of {b}, {a} {c}", {"a": 0, "b": "x"})
    assert filled == "0 of x, 0 –", "what is not known is no riddle"
