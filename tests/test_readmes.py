"""README.md and README.zh.md are alike: sections, commands and tables."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = "README.md", "README.zh.md"
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def blocks(readme: str) -> list[str]:
    return BLOCK.findall((ROOT / readme).read_text())


def prose(readme: str) -> str:
    return BLOCK.sub("", (ROOT / readme).read_text())


def heading_levels(readme: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(readme), re.MULTILINE)]


def first_cells(readme: str) -> list[str]:
    """What the rows of tables are about, as far as it is code."""
    return re.findall(r"^\| (`[^|]+`) \|", prose(readme), re.MULTILINE)


def code(readme: str) -> set[str]:
    """What is written as code, whatever the order of a sentence's words."""
    return set(re.findall(r"`[^`]+`", prose(readme)))


def test_sections_are_the_same() -> None:
    levels = heading_levels(ENGLISH)
    assert levels == heading_levels(CHINESE)
    assert len(levels) > 5


def test_commands_and_programs_are_the_same() -> None:
    assert blocks(ENGLISH) == blocks(CHINESE)
    assert len(blocks(ENGLISH)) > 4


def test_tables_are_about_the_same() -> None:
    assert first_cells(ENGLISH) == first_cells(CHINESE)
    assert len(first_cells(ENGLISH)) > 10


def test_names_and_values_are_the_same() -> None:
    """An option or a path that only one of them has was forgotten in the other."""
    assert code(ENGLISH) == code(CHINESE)


def test_each_leads_to_the_other() -> None:
    assert f"]({CHINESE})" in (ROOT / ENGLISH).read_text()
    assert f"]({ENGLISH})" in (ROOT / CHINESE).read_text()


def test_what_they_name_exists() -> None:
    for name in re.findall(r"`((?:docs|examples|requirements)/[\w./-]*)`", prose(ENGLISH)):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(((?!http)[^)]+)\)", prose(ENGLISH) + prose(CHINESE)):
        assert (ROOT / name).is_file(), name
    for row in first_cells(ENGLISH):
        if re.fullmatch(r"`[\w-]+(\.py|\.sh|/)`", row):
            assert (ROOT / "examples" / row.strip("`")).exists(), row
