"""What we require lets a resolver choose the vLLM that it would choose without us. Asks PyPI."""

import tomllib
from pathlib import Path

import pytest

from xinference_xavier.serving.launch.environment import resolve

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
HOST = "xinference[vllm]==4.1.0"


def test_beside_xinference_vllm_is_as_new_as_without_us(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise `uv pip install` of both at once gives a server of another year, without a word."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    monkeypatch.chdir(tmp_path)  # this project's own overrides do not count
    alone, together = resolve([HOST], {}), resolve([HOST, *ours], {})
    assert together.versions["vllm"] == alone.versions["vllm"]
    assert together.versions["xinference"] == "4.1.0"
