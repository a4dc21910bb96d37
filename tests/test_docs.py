"""What the documentation says of the tests is true."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
RELIABILITY = TESTS.parent / "docs" / "reliability.md"
FILE = re.compile(r"`([\w/]+/)?(test_\w+\.py)`")
NAME = re.compile(r"`(test_\w+)`")


def test_every_test_that_a_promise_names_exists() -> None:
    """In the file that was named last on the same line."""
    named = 0
    for line in RELIABILITY.read_text().splitlines():
        file = ""
        for word in re.findall(r"`[^`]+`", line):
            if found := FILE.fullmatch(word):
                file = (found[1] or "") + found[2]
                assert (TESTS / file).is_file(), f"there is no {file}"
            elif found := NAME.fullmatch(word):
                source = (TESTS / file).read_text()
                assert re.search(rf"def {found[1]}\b", source), f"{file} has no {found[1]}"
                named += 1
    assert named > 50
