"""An engine whose parent is killed does not outlive it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection

import psutil
import pytest

from xinference_xavier.engine.process import end_with_parent

PATIENCE = 60.0  # seconds


def engine(pipe: Connection) -> None:
    end_with_parent()
    pipe.send(os.getpid())
    threading.Event().wait()


def engine_that_comes_late(pipe: Connection) -> None:
    pipe.send(os.getpid())
    while os.getppid() == multiprocessing.parent_process().pid:  # type: ignore[union-attr]
        threading.Event().wait(0.01)
    end_with_parent()
    threading.Event().wait()


def parent(pipe: Connection, method: str, late: bool) -> None:
    target = engine_that_comes_late if late else engine
    multiprocessing.get_context(method).Process(target=target, args=(pipe,)).start()
    threading.Event().wait()


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


def test_an_engine_in_the_process_of_its_user_is_left_alone() -> None:
    before = threading.active_count()
    end_with_parent()
    assert threading.active_count() == before
