"""One browser and one stage for all tests of what people see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ui.browser import DESKTOP, Browser, open_browser
from tests.ui.stage import Stage


@pytest.fixture(scope="session")
def window() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def theatre() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.stop()


@pytest.fixture
def stage(theatre: Stage, window: Browser) -> Stage:
    window.open("about:blank")  # the page before must not post to this test's stage
    theatre.reset()
    return theatre


@pytest.fixture
def browser(window: Browser, stage: Stage) -> Browser:
    """Never seen this site before; no complaint may be left from another test."""
    window.resize(DESKTOP)
    window.open(f"{stage.address}/favicon.ico")
    window.complaints()
    return window
