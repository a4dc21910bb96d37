"""A sign-in on xinference's own page, then our page, in a browser: on xinference's own API, with a
real tracker and real replicas."""

from collections.abc import Iterator

import pytest

from tests.harness.api import Pair
from tests.harness.guarded_api import GuardedApi
from tests.serving.ui.browser import Browser
from tests.serving.ui.launch_dialog import sign_in

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def api(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedApi]:
    api = GuardedApi(pair.api.address, tmp_path_factory.mktemp("xinference"))
    yield api
    api.stop()


def test_the_page_has_the_permissions_of_the_account(window: Browser, api: GuardedApi) -> None:
    reader = api.user("reader", ["models:list"])
    window.open(f"{api.endpoint}/xavier/")
    window.forget()
    window.driver.refresh()
    window.wait_text("#trouble", "Please sign in")
    sign_in(window, api.endpoint, reader.name, reader.password)
    window.open(f"{api.endpoint}/xavier/")
    window.wait_text("#live", "Live")
    window.wait_text("#replicas", "first")
    window.find("#enabled").click()
    window.wait_text("#notice", "models:write")
