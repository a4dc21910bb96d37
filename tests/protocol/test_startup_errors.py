"""The cause of a failed start, on its way from a dying engine to its launcher."""

from __future__ import annotations

import asyncio

import pytest

from tests.logged import messages
from tests.tracker_pools import MODEL
from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import ConfigError
from xinference_xavier.protocol.startup_errors import (
    pop_startup_error,
    replica_name,
    report_startup_error,
    without_rank,
)

ERROR = ConfigError("xavier_pool_bytes", 1, "is too little", "use more")


async def test_the_first_cause_is_passed_on_once(
    stoppable_tracker: tuple[asyncio.subprocess.Process, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XINFERENCE_MODEL_UID", "model-rep1")
    _, address = stoppable_tracker
    config = XavierConfig(MODEL, address)
    report_startup_error(config, ERROR)
    report_startup_error(config, RuntimeError("a worker failed"))  # a consequence
    assert await pop_startup_error(config, "model-rep0") is None, "it is another replica's"
    assert await pop_startup_error(config, "model-rep1") == str(ERROR)
    assert await pop_startup_error(config, "model-rep1") is None
    report_startup_error(config, ModuleNotFoundError("No module named 'x'"))
    assert (
        await pop_startup_error(config, "model-rep1") == "ModuleNotFoundError: No module named 'x'"
    )


async def test_without_xinference_nothing_is_sent(
    stoppable_tracker: tuple[asyncio.subprocess.Process, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("XINFERENCE_MODEL_UID", raising=False)
    report_startup_error(XavierConfig(MODEL, stoppable_tracker[1]), ERROR)
    assert messages(caplog) == []


async def test_without_a_tracker_there_is_no_cause_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XINFERENCE_MODEL_UID", "model-rep0")
    config = XavierConfig(MODEL, "127.0.0.1:1")
    report_startup_error(config, ERROR)
    assert await pop_startup_error(config, "model-rep0") is None


@pytest.mark.parametrize(
    ("replica", "engine_id", "name"),
    [
        ("model-rep1", "2f6a_dp0", "model-rep1_dp0"),
        ("model-rep1", "2f6a_dp11", "model-rep1_dp11"),
        ("model-rep1", "2f6a", "model-rep1"),
        ("", "2f6a_dp0", ""),
    ],
)
def test_each_engine_of_a_replica_has_a_name(
    monkeypatch: pytest.MonkeyPatch, replica: str, engine_id: str, name: str
) -> None:
    monkeypatch.setenv("XINFERENCE_MODEL_UID", replica)
    assert replica_name(engine_id) == name
    assert without_rank(name) == replica


def test_without_xinference_a_replica_has_the_name_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XINFERENCE_MODEL_UID", raising=False)
    assert replica_name("2f6a", None) == ""
    assert replica_name("2f6a", "a") == "a"
    assert replica_name("2f6a_dp1", "a") == "a_dp1"
    monkeypatch.setenv("XINFERENCE_MODEL_UID", "model-rep1")
    assert replica_name("2f6a", "a") == "model-rep1"
