"""The changes that we propose to xinference and xoscar, against the versions that are installed."""

import re
import site
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[1] / "docs" / "upstream"


def hunks(patch: str) -> Iterator[tuple[str, str]]:
    """Each file, and the lines that a hunk expects there."""
    for part in re.split(r"^--- a/", patch, flags=re.M)[1:]:
        for hunk in re.split(r"^@@.*\n", part, flags=re.M)[1:]:
            lines = takewhile(lambda line: line[0] in " +-\\\n", hunk.splitlines(keepends=True))
            yield part.split()[0], "".join(line[1:] or line for line in lines if line[0] in " -\n")


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda patch: patch.stem)
def test_a_proposal_applies(patch: Path) -> None:
    found = [*hunks(patch.read_text())]
    assert len(found) == len(re.findall("^@@", patch.read_text(), re.M)) > 0
    for file, expected in found:
        assert expected in (Path(site.getsitepackages()[0]) / file).read_text(), file
