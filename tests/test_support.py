"""`docs/support.md` lists every tested architecture, and only tests that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.models.architectures import ARCHITECTURES

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "support.md"
FILE = re.compile(r"([\w/]+/test_\w+\.py)")
STATE = re.compile(r"supported|not in vLLM|(.* )?refused", re.DOTALL)


class Row(NamedTuple):
    section: str
    name: str
    state: str
    test: str


def rows() -> Iterator[Row]:
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        for line in re.findall(r"^\| (.+) \|$", section, re.MULTILINE)[1:]:
            cells = line.split(" | ")
            if title == "Models":
                name, _, state = cells
                yield Row(title, name, state, "`models/test_architectures.py`")
            else:
                yield Row(title, *cells)


ROWS = list(rows())


def test_every_architecture_has_a_row_and_no_other() -> None:
    named = [row.name.strip("`") for row in ROWS if row.section == "Models" and row.name != "–"]
    assert named == list(ARCHITECTURES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_a_state_and_a_test(row: Row) -> None:
    assert STATE.match(row.state)
    assert FILE.search(row.test) or row.test == "see [Models](#models)"


def test_every_test_that_is_named_exists() -> None:
    """It is in the file that is named before it."""
    source = ""
    named = 0
    for word in re.findall(r"`([^`\n]+)`", PAGE.read_text()):
        if FILE.fullmatch(word):
            source = (TESTS / word).read_text()
        elif re.fullmatch(r"test_\w+", word):
            assert re.search(rf"def {word}\(", source), word
            named += 1
    assert named > 25
