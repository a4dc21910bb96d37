"""vLLM finds our plugin and our classes by name, unless it is one with which they cannot work."""

import ast
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import vllm

from xinference_xavier.engine import entry, process
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.errors import ConfigError
from xinference_xavier.vllm_versions import SHARES, UNTESTED


def test_vllm_finds_the_plugin() -> None:
    (ours,) = (
        handler
        for handler in entry_points(group="vllm.general_plugins")
        if handler.name == "xavier"
    )
    assert ours.load() is entry.install


def test_where_nothing_is_shared_it_imports_next_to_nothing() -> None:
    """vLLM calls it in each of its processes."""
    program = (
        "import sys\n"
        "from xinference_xavier.engine.entry import install\n"
        "install()\n"
        "print({name for name in sys.modules if name.startswith('xinference_xavier.')})\n"
        "print({'pydantic', 'xoscar', 'torch', 'vllm', 'numpy'} & sys.modules.keys())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != SHARES}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    ours, heavy = map(ast.literal_eval, done.stdout.replace("set()", "()").splitlines())
    assert len(ours) <= 5
    assert not heavy


def test_an_untested_vllm_ends_where_it_should_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere it is left alone."""
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    entry.install()
    monkeypatch.setenv(SHARES, "1")
    with pytest.raises(ConfigError, match=r"vllm='0\.40\.0' .* sharing needs 0\.31 to 0\.33"):
        entry.install()


def test_where_it_may_be_untested_failed_starts_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listening: list[bool] = []
    monkeypatch.setattr(process, "report_failed_starts", lambda: listening.append(True))
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    monkeypatch.setenv(SHARES, UNTESTED)
    entry.install()
    assert listening


def test_connector_and_spec_are_found() -> None:
    assert entry.XavierConnector is XavierConnector
    assert entry.XavierSpec is XavierSpec
    with pytest.raises(AttributeError, match="Nothing"):
        entry.Nothing  # noqa: B018


def test_an_old_version_is_refused_before_we_import_what_it_lacks() -> None:
    program = (
        "import sys, types\n"
        "sys.modules['vllm'] = types.ModuleType('vllm')\n"
        "sys.modules['vllm'].__version__ = '0.11.2'\n"
        "sys.modules['torch'] = None\n"
        "from xinference_xavier.engine.entry import XavierConnector\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "vllm='0.11.2' is what this model's environment has" in ended.stderr
