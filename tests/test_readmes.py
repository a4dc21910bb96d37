"""README.md is short, and README.zh.md has the same sections, commands, figures and links."""

from __future__ import annotations

import re
from collections.abc import Callable, Sized
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = "README.md", "README.zh.md"
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def blocks(readme: str) -> list[str]:
    return BLOCK.findall((ROOT / readme).read_text())


def prose(readme: str) -> str:
    return BLOCK.sub("", (ROOT / readme).read_text())


def heading_levels(readme: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(readme), re.MULTILINE)]


def figures(readme: str) -> list[list[str]]:
    """The numbers of each row of a table."""
    rows = re.findall(r"^\|.*\d.*\|$", prose(readme), re.MULTILINE)
    return [re.findall(r"\d[\d.,]*", row) for row in rows]


def links(readme: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", prose(readme))


def code(readme: str) -> set[str]:
    """The inline code, in any order."""
    return set(re.findall(r"`[^`]+`", prose(readme)))


@pytest.mark.parametrize(
    ("part", "least"), [(heading_levels, 5), (blocks, 5), (figures, 2), (code, 1)]
)
def test_sections_commands_figures_names_and_values_are_the_same(
    part: Callable[[str], Sized], least: int
) -> None:
    """Code, such as an option or a path, may come in another order."""
    assert part(ENGLISH) == part(CHINESE)
    assert len(part(ENGLISH)) >= least


def test_links_lead_to_the_same_pages_and_each_to_the_other() -> None:
    english, chinese = {*links(ENGLISH)}, {*links(CHINESE)}
    assert english - {CHINESE} == chinese - {ENGLISH}
    assert CHINESE in english
    assert ENGLISH in chinese
    assert len(english) > 15


def test_the_english_one_fits_on_one_screen_of_text() -> None:
    assert len([line for line in prose(ENGLISH).splitlines() if line]) <= 60


def test_files_that_they_name_exist() -> None:
    for name in re.findall(r"`((?:docs|examples|requirements)/[\w./-]*)`", prose(ENGLISH)):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(((?!http)[^)]+)\)", prose(ENGLISH) + prose(CHINESE)):
        assert (ROOT / name).is_file(), name
