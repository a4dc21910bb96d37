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
    makefile = (ROOT / "Makefile").read_text()
    (line,) = re.findall(r"-m sphinx --builder html (.*) docs build/docs$", makefile, re.M)
    return shlex.split(line)


def test_each_broken_link_is_reported_and_fails_and_good_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text(PAGE + "\n\n".join(NOWHERE))
    (tmp_path / "other.md").write_text(OTHER)
    words = ["--builder", "dummy", *options(), "--conf-dir", ROOT / "docs"]
    command = [sys.executable, "-m", "sphinx", *words, tmp_path, tmp_path / "out"]
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert built.returncode != 0
    warnings = [line for line in built.stderr.splitlines() if "WARNING" in line]
    for link, goal in NOWHERE.items():
        assert any(goal in line for line in warnings), link
    assert len(warnings) == len(NOWHERE)
