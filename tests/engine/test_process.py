"""An engine does not outlive its parent, and its process shows our log lines."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection

import psutil
import pytest

from xinference_xavier.engine.process import end_with_parent, follow

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


def parent(pipe: Connection, method: str, late: bool) -> None:
    target = engine_that_starts_late if late else engine
    multiprocessing.get_context(method).Process(target=target, args=(pipe,)).start()
    threading.Event().wait()


@pytest.mark.process
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_ends_when_its_parent_is_killed(method: str, late: bool) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=parent, args=(theirs, method, late))
    process.start()
    child = psutil.Process(ours.recv())
    assert child.is_running()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    child.wait(PATIENCE)


def test_an_engine_in_its_user_s_process_is_left_alone() -> None:
    before = threading.active_count()
    end_with_parent()
    assert threading.active_count() == before


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.fixture
def ours() -> logging.Logger:
    """Detached from the root logger, where pytest listens."""
    return logging.Logger("ours")


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def vllms(lines: Lines) -> logging.Logger:
    logger = logging.Logger("vllms", logging.INFO)
    logger.addHandler(lines)
    return logger


def test_our_lines_go_where_vllm_s_go_once(
    ours: logging.Logger, vllms: logging.Logger, lines: Lines
) -> None:
    follow(ours, vllms)
    follow(ours, vllms)
    ours.info("sharing works")
    ours.debug("a detail")
    assert lines.seen == ["sharing works"]


def test_a_logger_that_is_configured_is_left_alone(
    ours: logging.Logger, vllms: logging.Logger, lines: Lines
) -> None:
    mine = Lines()
    ours.addHandler(mine)
    follow(ours, vllms)
    ours.warning("sharing stopped")
    assert (mine.seen, lines.seen) == (["sharing stopped"], [])


def test_without_vllm_s_handlers_nothing_changes(ours: logging.Logger) -> None:
    """`VLLM_CONFIGURE_LOGGING=0`."""
    follow(ours, logging.Logger("vllms"))
    assert (ours.handlers, ours.level) == ([], logging.NOTSET)
