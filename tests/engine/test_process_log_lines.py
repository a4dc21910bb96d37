"""Our lines are seen in an engine's process, where vLLM sets up its own logger only."""

from __future__ import annotations

import logging

import pytest

from xinference_xavier.engine.process import follow


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.fixture
def ours() -> logging.Logger:
    """Not in pytest's reach, as nothing is in an engine's process."""
    return logging.Logger("ours")


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def vllms(lines: Lines) -> logging.Logger:
    logger = logging.Logger("vllms", logging.INFO)
    logger.addHandler(lines)
    return logger


def test_they_go_where_vllms_go_once(
    ours: logging.Logger, vllms: logging.Logger, lines: Lines
) -> None:
    follow(ours, vllms)
    follow(ours, vllms)
    ours.info("sharing works")
    ours.debug("a detail")
    assert lines.seen == ["sharing works"]


def test_whoever_said_where_they_go_is_obeyed(
    ours: logging.Logger, vllms: logging.Logger, lines: Lines
) -> None:
    mine = Lines()
    ours.addHandler(mine)
    follow(ours, vllms)
    ours.warning("sharing stopped")
    assert (mine.seen, lines.seen) == (["sharing stopped"], [])


def test_where_vllm_sets_up_nothing_nothing_changes(ours: logging.Logger) -> None:
    """`VLLM_CONFIGURE_LOGGING=0`."""
    follow(ours, logging.Logger("vllms"))
    assert (ours.handlers, ours.level) == ([], logging.NOTSET)
