"""An engine does not outlive its parent, its process shows our log lines, and the error that ends
its start reaches the model's tracker."""

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.harness.replicas import TrackerProcess
from tests.logged import messages
from tests.tracker_pools import MODEL
from xinference_xavier.config import XAVIER, XavierConfig
from xinference_xavier.engine import process as module
from xinference_xavier.engine.process import end_with_parent, follow, report_startup_error
from xinference_xavier.errors import ConfigError
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.aio import ask
from xinference_xavier.runtime.host import GRACE, await_end

PATIENCE = 60.0  # seconds


def engine(pipe: Connection) -> None:
    end_with_parent()
    pipe.send(os.getpid())
    threading.Event().wait()


def engine_that_starts_late(pipe: Connection) -> None:
    pipe.send(os.getpid())
    while os.getppid() == multiprocessing.parent_process().pid:  # type: ignore[union-attr]
        threading.Event().wait(0.01)
    end_with_parent()
    threading.Event().wait()


def engine_that_ignores_a_signal(pipe: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine(pipe)


def engine_that_ends_already(pipe: Connection) -> None:
    """It tells whether it was let alone while it frees what it has, without vLLM's handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    end_with_parent()
    pipe.send(os.getpid())
    await_end(os.getppid())
    pipe.send(signal.sigtimedwait({signal.SIGTERM}, GRACE / 2) is None)


def engine_that_hangs_in_c(pipe: Connection) -> None:
    """A hang like that of a collective without its other workers: no Python handler runs."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    end_with_parent()
    pipe.send(os.getpid())
    while True:
        ctypes.CDLL(None).sleep(1000)


def engine_that_hangs_with_pythons_lock(pipe: Connection) -> None:
    """No thread of its own runs any more."""
    end_with_parent()
    asyncio.run(hang_with_transfer_process(pipe))


async def hang_with_transfer_process(pipe: Connection) -> None:
    process = TransferProcess(
        Region.create(8, 4096),
        incarnation="a",
        host="127.0.0.1",
        port_range=None,
        transports=("tests.transfer.no_transport:NoTransport",),
    )
    await process.configure(b"secret")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.run())
        await process.ready_changed.wait()
        pipe.send(os.getpid())
        ctypes.PyDLL(None).sleep(1000)


ENGINES: list[tuple[str, Callable[[Connection], None]]] = [
    ("spawn", engine),
    ("fork", engine),
    ("fork", engine_that_starts_late),
    ("fork", engine_that_ignores_a_signal),
    ("fork", engine_that_ends_already),
    ("fork", engine_that_hangs_in_c),
    ("fork", engine_that_hangs_with_pythons_lock),
]


def parent(pipe: Connection) -> None:
    for method, target in ENGINES:
        multiprocessing.get_context(method).Process(target=target, args=(pipe,)).start()
    threading.Event().wait()


@pytest.mark.process
def test_engines_end_when_their_parent_is_killed() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=parent, args=(theirs,))
    process.start()
    engines = [psutil.Process(ours.recv()) for _ in ENGINES]
    helpers = [helper for each in engines for helper in each.children()]
    assert len(helpers) == 1  # a transfer process
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert ours.recv(), "what ends already gets no signal"
    _, alive = psutil.wait_procs(engines + helpers, PATIENCE)
    for each in alive:
        each.kill()
    assert not alive


def test_an_engine_in_its_user_s_process_is_left_alone() -> None:
    before = threading.active_count()
    end_with_parent()
    assert threading.active_count() == before


@pytest.fixture
def ours() -> logging.Logger:
    """Detached from the root logger, where pytest listens."""
    return logging.Logger("ours")


@pytest.fixture
def vllms(caplog: pytest.LogCaptureFixture) -> logging.Logger:
    logger = logging.Logger("vllms", logging.INFO)
    logger.addHandler(caplog.handler)
    return logger


def test_our_lines_go_where_vllm_s_go_once(
    ours: logging.Logger, vllms: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    follow(ours, vllms)
    follow(ours, vllms)
    ours.info("sharing works")
    ours.debug("a detail")
    assert caplog.messages == ["sharing works"]


def test_a_logger_that_is_configured_is_left_alone(
    ours: logging.Logger, vllms: logging.Logger
) -> None:
    mine = logging.NullHandler()
    ours.addHandler(mine)
    follow(ours, vllms)
    assert (ours.handlers, ours.level) == ([mine], logging.NOTSET)


def test_without_vllm_s_handlers_nothing_changes(ours: logging.Logger) -> None:
    """`VLLM_CONFIGURE_LOGGING=0`."""
    follow(ours, logging.Logger("vllms"))
    assert (ours.handlers, ours.level) == ([], logging.NOTSET)


# -- errors at the start ---------------------------------------------------------------------------

CONFIG = XavierConfig("model", "10.0.0.1:9999")
ENGINE, WORKER = module._LOGGERS


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[XavierConfig, str]]]:
    """What the tracker gets, as (configuration, text)."""
    errors: list[tuple[XavierConfig, str]] = []
    monkeypatch.setattr(
        module,
        "report_startup_error",
        lambda config, error: errors.append((config, str(error))),
    )
    module.report_failed_starts()
    module.report_failed_starts()  # vLLM may load the plugin more than once
    yield errors
    for name in module._LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [
            handler for handler in logger.handlers if not isinstance(handler, module._Listener)
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


FAULT = ConfigError("xavier_pool_bytes", 1, "is too little", "use more")


async def test_the_first_cause_is_kept_for_its_replica_until_it_is_asked_for(
    stoppable_tracker: TrackerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XINFERENCE_MODEL_UID", "model-rep1")
    address = stoppable_tracker.address
    config = XavierConfig(MODEL, address)

    async def cause(replica: str) -> str | None:
        found: str | None = await ask(
            PATIENCE, address, tracker_uid(MODEL), "pop_startup_error", replica
        )
        return found

    report_startup_error(config, FAULT)
    report_startup_error(config, RuntimeError("a worker failed"))  # a consequence
    assert await cause("model-rep0") is None, "it is another replica's"
    assert await cause("model-rep1") == str(FAULT)
    report_startup_error(config, ModuleNotFoundError("No module named 'x'"))
    assert await cause("model-rep1") == "ModuleNotFoundError: No module named 'x'"


async def test_without_xinference_nothing_is_sent(
    stoppable_tracker: TrackerProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("XINFERENCE_MODEL_UID", raising=False)
    report_startup_error(XavierConfig(MODEL, stoppable_tracker.address), FAULT)
    assert messages(caplog) == []


def test_without_a_tracker_the_start_fails_as_it_would(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XINFERENCE_MODEL_UID", "model-rep0")
    report_startup_error(XavierConfig(MODEL, "127.0.0.1:1"), FAULT)
    assert messages(caplog) == ["cannot report the cause of the failed start"]
