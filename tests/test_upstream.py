"""The changes that we propose to xinference and xoscar, against the versions that are installed."""

import os
import site
import subprocess
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[1] / "docs" / "upstream"


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda patch: patch.stem)
def test_a_proposal_applies(patch: Path) -> None:
    packages = site.getsitepackages()[0]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(packages).parent)}
    command = ["git", "apply", "--check", str(patch)]
    made = subprocess.run(command, cwd=packages, env=environment, capture_output=True, text=True)
    assert not made.returncode, made.stderr
