"""The error that ends an engine's start reaches the model's tracker."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from xinference_xavier.config import XAVIER, XavierConfig
from xinference_xavier.engine import plugin, process
from xinference_xavier.errors import ConfigError
from xinference_xavier.vllm_versions import SHARES, UNTESTED

CONFIG = XavierConfig("model", "10.0.0.1:9999")
ENGINE, WORKER = process._LOGGERS


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[XavierConfig, str]]]:
    """What the tracker gets, as (configuration, text)."""
    errors: list[tuple[XavierConfig, str]] = []
    monkeypatch.setattr(
        process,
        "report_startup_error",
        lambda config, error: errors.append((config, str(error))),
    )
    process.install()
    process.install()  # vLLM may do so more than once
    yield errors
    for name in process._LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [
            handler for handler in logger.handlers if not isinstance(handler, process._Listener)
        ]


def fail(logger: str, message: str, extra: dict[str, Any] | None) -> None:
    """An engine process fails to start, in vLLM's way."""

    def start(vllm_config: object) -> None:
        raise RuntimeError("no memory")

    transfer = None if extra is None else SimpleNamespace(kv_connector_extra_config=extra)
    try:
        start(SimpleNamespace(kv_transfer_config=transfer))
    except RuntimeError:
        logging.getLogger(logger).exception(message)


def test_vllm_finds_the_plugin() -> None:
    (ours,) = (
        handler
        for handler in entry_points(group="vllm.general_plugins")
        if handler.name == "xavier"
    )
    assert ours.load() is plugin.install


def test_where_nothing_is_shared_it_imports_next_to_nothing() -> None:
    """vLLM calls it in each of its processes."""
    program = (
        "import sys\n"
        "from xinference_xavier.engine.plugin import install\n"
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
    plugin.install()
    monkeypatch.setenv(SHARES, "1")
    with pytest.raises(ConfigError, match=r"vllm='0\.40\.0' .* sharing needs 0\.31 to 0\.33"):
        plugin.install()


def test_where_it_may_be_untested_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, reported: list[tuple[XavierConfig, str]]
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    monkeypatch.setenv(SHARES, UNTESTED)
    plugin.install()
    fail(ENGINE, "EngineCore failed to start.", {XAVIER: CONFIG.to_dict()})
    assert reported == [(CONFIG, "no memory")]


@pytest.mark.parametrize(
    ("logger", "message"),
    [(ENGINE, "EngineCore failed to start."), (WORKER, "WorkerProc failed to start.")],
)
def test_the_error_that_ends_a_start_is_reported_once(
    reported: list[tuple[XavierConfig, str]], logger: str, message: str
) -> None:
    fail(logger, message, {XAVIER: CONFIG.to_dict()})
    assert reported == [(CONFIG, "no memory")]


@pytest.mark.parametrize("extra", [None, {}, {"spec_name": "other"}])
def test_engines_that_share_nothing_are_left_alone(
    reported: list[tuple[XavierConfig, str]], extra: dict[str, Any] | None
) -> None:
    fail(ENGINE, "EngineCore failed to start.", extra)
    assert reported == []


def test_an_error_after_the_start_is_not_reported(
    reported: list[tuple[XavierConfig, str]],
) -> None:
    fail(ENGINE, "EngineCore encountered a fatal error.", {XAVIER: CONFIG.to_dict()})
    logging.getLogger(ENGINE).error("EngineCore failed to start.")  # without an exception
    assert reported == []
