"""The error that ends an engine's start reaches the model's tracker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from xinference_xavier.config import SHARES, XAVIER, XavierConfig
from xinference_xavier.engine import startup_errors
from xinference_xavier.errors import ConfigError

CONFIG = XavierConfig("model", "10.0.0.1:9999")
ENGINE, WORKER = startup_errors._LOGGERS


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[XavierConfig, str]]]:
    """What the tracker gets, as (configuration, text)."""
    errors: list[tuple[XavierConfig, str]] = []
    monkeypatch.setattr(
        startup_errors,
        "report_startup_error",
        lambda config, error: errors.append((config, str(error))),
    )
    startup_errors.install()
    startup_errors.install()  # vLLM may do so more than once
    yield errors
    for name in startup_errors._LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [
            handler
            for handler in logger.handlers
            if not isinstance(handler, startup_errors._Listener)
        ]


def fail(logger: str, message: str, extra: dict[str, Any] | None) -> None:
    """As vLLM does."""

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
    assert ours.load() is startup_errors.install


def test_an_untested_vllm_ends_where_it_should_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere it is left alone."""
    monkeypatch.setattr(vllm, "__version__", "0.21.0")
    startup_errors.install()
    monkeypatch.setenv(SHARES, "1")
    with pytest.raises(ConfigError, match=r"vllm='0\.21\.0' .* sharing needs 0\.31 to 0\.33"):
        startup_errors.install()


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
