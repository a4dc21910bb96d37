"""In a browser, on real software: sharing is switched on, and the page shows a remote hit."""

from collections.abc import Iterator

import pytest

from examples.local_cluster import LAUNCH_TIMEOUT, LocalCluster
from tests.e2e.asking import CHUNK, published, question
from tests.e2e.conftest import ARGUMENTS
from tests.serving.ui.browser import Browser, open_browser
from tests.serving.ui.launch_dialog import LaunchDialog

pytestmark = pytest.mark.long

UID = "by-switch"
# On a CPU, the small model needs these besides the switch.
PARAMETERS = {
    "dtype": ARGUMENTS["dtype"],
    "max_model_len": ARGUMENTS["max_model_len"],
    "block_size": ARGUMENTS["block_size"],
    "enforce_eager": "true",
    "tensor_parallel_size": 1,
}


@pytest.fixture
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def xinference(cluster: LocalCluster) -> Iterator[LocalCluster]:
    yield cluster
    if any(model["id"] == UID for model in cluster.call("GET", "/v1/models")["data"]):
        cluster.terminate(UID)


def launch_by_the_switch(browser: Browser, address: str) -> None:
    browser.open(f"{address}/launch-model/custom")
    dialog = LaunchDialog(browser)
    dialog.open("Launch")
    dialog.choose("Model Engine", "vLLM")
    dialog.type_into("Model UID", UID)
    dialog.set_replicas(2)
    dialog.switch.click()
    dialog.unfold()
    dialog.pool.send_keys(str(ARGUMENTS["xavier_pool_bytes"]))
    for name, value in PARAMETERS.items():
        dialog.add_parameter(name, str(value))
    dialog.deploy()


def test_launched_by_the_switch_it_shows_the_remote_hit(
    xinference: LocalCluster, browser: Browser
) -> None:
    address = xinference.endpoint.replace("0.0.0.0", "127.0.0.1")
    launch_by_the_switch(browser, address)
    browser.wait(
        lambda: "/running-model" in browser.driver.current_url,
        "the launch is done and the dialog is closed",
        LAUNCH_TIMEOUT,
    )
    xinference.wait_ready(UID, 2)
    browser.find('nav a[href="/xavier/"]').click()
    browser.wait_text("#live", "Live")
    browser.wait_text(".head h2", UID)
    names = [replica["replica"] for replica in xinference.xavier(UID)["replicas"]]
    assert len(names) == 2
    for name in names:
        browser.wait_text("#replicas", name)
        browser.wait_text("#events", f"{name} joined")
    browser.wait_text("#source-list", "Remote")
    assert not browser.has("#links")
    browser.find("#routing-off").click()  # or the second request would follow the first
    browser.wait(
        lambda: browser.find("#routing-off").get_attribute("aria-pressed") == "true",
        "replicas answer in turn",
    )

    _, first = published(xinference, UID, lambda: xinference.complete(UID, question(400)))
    whole = first.prompt_tokens // CHUNK
    second = xinference.complete(UID, question(400))
    assert second.cached_tokens == whole * CHUNK

    # The page updates by itself.
    browser.wait_text("#source-list", f"({whole * CHUNK:,})")
    link = browser.text("#links tbody")
    assert any(link.startswith(f"{donor} {consumer} ") for donor, consumer in (names, names[::-1]))
    assert "MiB" in link
    browser.wait_text("#fetches", "1")
    browser.wait_text("#helps", "Yes")
    browser.run("scrollTo(0, 0)")
    browser.screenshot("page-hit")
    assert not browser.complaints()

    # Another browser finds the switch on: the server keeps the launch history.
    browser.open(f"{address}/launch-model/custom")
    browser.forget()
    browser.open(f"{address}/launch-model/custom")
    again = LaunchDialog(browser)
    again.open("Launch")
    browser.wait(lambda: again.sharing, "the switch is on from the launch history")
