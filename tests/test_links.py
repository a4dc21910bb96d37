"""A broken link in the documentation fails `make docs`."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = """# A page

```{toctree}
other
```

[good](other.md#a-part) and [good](#a-page)
"""
OTHER = "# Another page\n\n## A part\n"
NOWHERE = {
    "[a page](nothing.md)": "nothing.md",
    "[a part of this page](#nothing-here)": "nothing-here",
    "[a part of another page](other.md#nothing-there)": "nothing-there",
    "![a picture](images/nothing.png)": "nothing.png",
    "{py:class}`xinference_xavier.Nothing`": "xinference_xavier.Nothing",
}


def options() -> list[str]:
    """The options of `make docs`, without the builder."""
    (line,) = re.findall(r"-m sphinx --builder html (.*) docs build/docs$", _makefile(), re.M)
    return shlex.split(line)


def _makefile() -> str:
    return (ROOT / "Makefile").read_text()


def build(folder: Path, page: str) -> subprocess.CompletedProcess[str]:
    source = folder / "pages"
    source.mkdir()
    (source / "index.md").write_text(page)
    (source / "other.md").write_text(OTHER)
    words = ["--builder", "dummy", *options(), "--conf-dir", ROOT / "docs", source, folder / "out"]
    command = [sys.executable, "-m", "sphinx", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_good_links_pass(tmp_path: Path) -> None:
    assert build(tmp_path, PAGE).returncode == 0


def test_each_broken_link_is_reported_and_fails(tmp_path: Path) -> None:
    built = build(tmp_path, PAGE + "\n\n".join(NOWHERE))
    assert built.returncode != 0
    warnings = [line for line in built.stderr.splitlines() if "WARNING" in line]
    for link, goal in NOWHERE.items():
        assert any(goal in line for line in warnings), link
    assert len(warnings) == len(NOWHERE)
