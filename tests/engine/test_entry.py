"""vLLM finds our classes by name, and untested versions are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import vllm

from xinference_xavier.engine import entry
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.errors import ConfigError


def test_connector_and_spec_are_found() -> None:
    assert entry.XavierConnector is XavierConnector
    assert entry.XavierSpec is XavierSpec
    with pytest.raises(AttributeError, match="Nothing"):
        entry.Nothing  # noqa: B018


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.33.1rc2", "0.32.0+cu130"])
def test_tested_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    entry.check_version()


@pytest.mark.parametrize("version", ["0.21.0", "0.30.1", "0.34.0", "1.0.0"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    for name in ("XavierConnector", "XavierSpec"):
        with pytest.raises(ConfigError) as refused:
            getattr(entry, name)
        assert str(refused.value) == (
            f"vllm='{version}' is what this model's environment has, and sharing needs 0.31 to "
            "0.33; launch with virtual_env_packages=['vllm>=0.31,<0.34'], or without "
            "enable_xavier"
        )


@pytest.mark.parametrize("version", ["dev", "0.34.1.dev7+g1234", ""])
def test_builds_from_a_working_tree_are_accepted(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    entry.check_version()


def test_an_old_version_is_refused_before_we_import_what_it_lacks() -> None:
    program = (
        "import sys, types\n"
        "sys.modules['vllm'] = types.ModuleType('vllm')\n"
        "sys.modules['vllm'].__version__ = '0.11.2'\n"
        "sys.modules['torch'] = None\n"
        "from xinference_xavier.engine.entry import XavierConnector\n"
    )
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "vllm='0.11.2' is what this model's environment has" in refused.stderr
