"""`docs/options.md` describes the launch options that exist, with defaults and values that hold."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from xinference_xavier.config import BACKEND, ENABLE, XavierConfig, take_launch_options
from xinference_xavier.options import PARSERS

ROOT = Path(__file__).parents[1]
FIELD = re.compile(r"^- (?P<name>Type|Default|Range|Such as): (?P<text>.+)$", re.MULTILINE)
EVERY_OPTION = [ENABLE, BACKEND, *PARSERS]

OF_THE_LAUNCH = {ENABLE: "false", BACKEND: "extension"}
"""The defaults of those that are no field of a configuration."""


class Option(NamedTuple):
    default: str
    such_as: list[str]


def options() -> dict[str, Option]:
    found = {}
    for section in re.split(r"^### ", (ROOT / "docs" / "options.md").read_text(), flags=re.M)[1:]:
        fields = {match["name"]: match["text"] for match in FIELD.finditer(section)}
        name = section.splitlines()[0].strip("`")
        found[name] = Option(fields["Default"], re.findall(r"`([^`]+)`", fields["Such as"]))
    return found


def test_the_page_has_every_option_and_no_other() -> None:
    assert options().keys() == {*EVERY_OPTION}


def test_the_readme_names_no_other() -> None:
    named = set(re.findall(r"\b(?:enable_xavier|xavier_\w+)", (ROOT / "README.md").read_text()))
    assert ENABLE in named
    assert named <= set(EVERY_OPTION)


def test_defaults_are_those_of_the_code() -> None:
    config = XavierConfig(model_uid="m", tracker_address="10.0.0.1:1")
    for name, option in options().items():
        value = OF_THE_LAUNCH.get(name) or getattr(config, name[len("xavier_") :])
        if match := re.fullmatch(r"`([^`]+)`", option.default):
            assert match[1] == shown(value)
        else:
            assert value is None, f"the default of {name} is {value!r}"


def shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_values_that_the_page_allows_are_accepted(name: str) -> None:
    option = options()[name]
    assert option.such_as
    for value in option.such_as:
        take_launch_options({ENABLE: True} | {name: value})
