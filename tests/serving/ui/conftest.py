"""One browser and one stage for all tests of pages."""

from collections.abc import Iterator

import pytest

from tests.serving.ui.browser import DESKTOP, Browser, open_browser
from tests.serving.ui.scripts import Scripts
from tests.serving.ui.stage import Stage


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
def stage(theatre: Stage) -> Stage:
    theatre.reset()
    return theatre


@pytest.fixture
def browser(window: Browser, stage: Stage) -> Iterator[Browser]:
    """A browser that has never seen this site, without complaints from another test."""
    window.resize(DESKTOP)
    window.open(f"{stage.address}/favicon.ico")
    window.complaints()
    yield window
    window.open("about:blank")  # its page must not post to the next test's stage


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(tmp_path_factory.mktemp("scripts"))
