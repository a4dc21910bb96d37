"""Imports that run: `make lint` only reads them."""

import subprocess
import sys
from pathlib import Path

import xinference_xavier

PACKAGE = "xinference_xavier"
ROOT = Path(xinference_xavier.__file__).parent


def test_tracker_and_serving_load_where_torch_and_vllm_are_absent() -> None:
    """The supervisor's processes may run on a machine that has neither."""
    modules = [
        ".".join((PACKAGE, *file.relative_to(ROOT).with_suffix("").parts))
        for part in ("tracker", "serving")
        for file in sorted((ROOT / part).rglob("*.py"))
        if file.stem != "__init__"
    ]
    assert len(modules) > 4
    program = "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n" + "".join(
        f"import {module}\n" for module in modules
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
