"""The switch in xinference's launch dialog, in a real browser on the pages that it ships."""

from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serving.ui.browser import Browser
from tests.serving.ui.launch_dialog import LaunchDialog
from tests.serving.ui.stage import Stage

pytestmark = pytest.mark.long

# xinference's name for the language.
CHINESE = "zh"


def open_dialog(browser: Browser, stage: Stage, engine: str | None = "vLLM") -> LaunchDialog:
    browser.open(f"{stage.address}/launch-model/llm")
    dialog = LaunchDialog(browser)
    dialog.open("Launch")
    if engine is not None:
        dialog.choose("Model Engine", engine)
    return dialog


def launched(browser: Browser, stage: Stage) -> dict[str, Any]:
    """The body that the dialog sent."""

    def sent() -> dict[str, Any] | None:
        return next((body for path, body in stage.posted if path == "/v1/models"), None)

    return browser.wait(sent, "the launch was sent")


def ours(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if "xavier" in name}


def test_it_sends_what_the_command_line_sends(browser: Browser, stage: Stage) -> None:
    """It is `--enable_xavier true --xavier_pool_bytes 512MiB`, and no more."""
    dialog = open_dialog(browser, stage)
    dialog.set_replicas(2)
    assert not dialog.sharing
    dialog.switch.click()
    assert dialog.sharing
    dialog.unfold()
    dialog.pool.send_keys("512MiB")
    browser.screenshot("launch-switch")
    dialog.deploy()
    body = launched(browser, stage)
    assert ours(body) == {"enable_xavier": True, "xavier_pool_bytes": "512MiB"}
    assert (body["replica"], body["model_engine"]) == ("2", "vLLM")
    assert not browser.complaints()


def test_switched_off_it_sends_nothing_and_switched_on_its_options_come_back(
    browser: Browser, stage: Stage
) -> None:
    dialog = open_dialog(browser, stage)
    dialog.switch.click()
    dialog.unfold()
    dialog.pool.send_keys("1GiB")
    dialog.switch.click()
    dialog.switch.click()
    assert dialog.pool.get_attribute("value") == "1GiB"
    dialog.switch.click()
    dialog.deploy()
    assert ours(launched(browser, stage)) == {}


def test_other_parameters_stay_and_typed_ones_move_the_switch(
    browser: Browser, stage: Stage
) -> None:
    """The switch is a view of the additional parameters: it shows what is typed there."""
    dialog = open_dialog(browser, stage)
    dialog.add_parameter("block_size", "128")
    dialog.add_parameter("enable-xavier", "true")
    browser.wait(lambda: dialog.sharing, "the switch shows what was typed")
    dialog.unfold()
    dialog.pool.send_keys("1GiB")
    dialog.deploy()
    body = launched(browser, stage)
    assert body["block_size"] == 128
    assert ours(body) == {"enable-xavier": True, "xavier_pool_bytes": "1GiB"}


def test_launch_history_and_autostart_keep_it(browser: Browser, stage: Stage) -> None:
    dialog = open_dialog(browser, stage)
    dialog.switch.click()
    dialog.autostart()
    dialog.deploy()
    launched(browser, stage)

    def kept(path: str) -> dict[str, Any]:
        return browser.wait(
            lambda: next((body for known, body in stage.posted if known == path), None),
            f"{path} was called",
        )

    assert kept("/v1/launch_history")["data"]["enable_xavier"] is True
    assert kept("/v1/autostart/models")["launch"]["enable_xavier"] is True
    # The next time, the dialog begins with the last launch.
    again = open_dialog(browser, stage, engine=None)
    browser.wait(lambda: again.sharing, "the switch is on from the launch history")


def test_it_needs_two_replicas(browser: Browser, stage: Stage) -> None:
    dialog = open_dialog(browser, stage)
    dialog.set_replicas(0)
    browser.wait(lambda: "First enter the number of replicas" in dialog.note, "it needs a number")
    assert not dialog.switch.is_enabled()
    dialog.set_replicas(1)
    browser.wait(lambda: "uses a prefix" in dialog.note, "it says what sharing is")
    dialog.switch.click()
    assert "shares nothing until" in dialog.note
    dialog.set_replicas(2)
    browser.wait(lambda: "shares nothing until" not in dialog.note, "two are enough")


def test_other_engines_have_no_switch(browser: Browser, stage: Stage) -> None:
    dialog = open_dialog(browser, stage, engine="Transformers")
    assert not dialog.has_switch
    dialog.choose("Model Engine", "vLLM")
    dialog.switch.click()
    dialog.choose("Model Engine", "Transformers")
    browser.wait(lambda: "built into xinference" in dialog.note, "the note says who gets it")
    # With an option of ours the launch would be refused: the note says so.
    dialog.add_parameter("xavier_queue", "3")
    browser.wait(lambda: "Only the vLLM engine can share" in dialog.note, "the note says why not")
    dialog.switch.click()
    browser.wait(lambda: not dialog.has_switch, "once off, the switch is gone")


def test_a_parameter_that_excludes_sharing_is_named(browser: Browser, stage: Stage) -> None:
    dialog = open_dialog(browser, stage)
    dialog.add_parameter("xavier_queue", "3")
    dialog.add_parameter("xavier_gpu_cache_bytes", "1")
    browser.wait(lambda: "xavier_gpu_cache_bytes" in dialog.note, "the note names it")
    assert not dialog.switch.is_enabled()


def test_a_launch_with_options_of_the_built_in_xavier_is_its(
    browser: Browser, stage: Stage
) -> None:
    dialog = open_dialog(browser, stage)
    dialog.add_parameter("xavier_gpu_cache_bytes", "1")
    dialog.switch.click()
    browser.wait(lambda: "built into xinference" in dialog.note, "the note says who gets it")
    dialog.unfold()
    assert "Pool size" not in dialog.section.text
    dialog.deploy()
    assert ours(launched(browser, stage)) == {"enable_xavier": True, "xavier_gpu_cache_bytes": 1}


def test_which_xavier_a_launch_uses_can_be_chosen(browser: Browser, stage: Stage) -> None:
    """The built-in one refuses our options, so that they go."""
    dialog = open_dialog(browser, stage)
    dialog.set_replicas(2)
    dialog.switch.click()
    dialog.unfold()
    dialog.pool.send_keys("1GiB")
    dialog.choose_backend("built into xinference")
    browser.wait(lambda: "built into xinference" in dialog.note, "the note says who gets it")
    dialog.choose_backend("xinference-xavier")
    browser.wait(lambda: "uses a prefix" in dialog.note, "it is ours again")
    dialog.choose_backend("built into xinference")
    dialog.deploy()
    body = launched(browser, stage)
    assert ours(body) == {"enable_xavier": True, "xavier_backend": "builtin"}


def test_an_invalid_pool_size_is_marked(browser: Browser, stage: Stage) -> None:
    dialog = open_dialog(browser, stage)
    dialog.switch.click()
    dialog.unfold()
    dialog.pool.send_keys("4QiB")
    assert dialog.pool.get_attribute("aria-invalid") == "true"
    assert "size like 4GiB" in dialog.section.text
    dialog.pool.send_keys(Keys.BACKSPACE * 3, "GiB")
    assert dialog.pool.get_attribute("aria-invalid") == "false"


def test_it_speaks_chinese_where_the_page_does(browser: Browser, stage: Stage) -> None:
    browser.remember(app_locale=CHINESE)
    browser.open(f"{stage.address}/launch-model/llm")
    dialog = LaunchDialog(browser)
    dialog.open("Launch")  # xinference does not translate this one
    dialog.choose("模型引擎", "vLLM")
    assert dialog.section.text.startswith("副本之间共享 KV 缓存（Xavier）")
    assert browser.text('nav a[href="/xavier/"]') == "KV 缓存共享"


def test_it_survives_react_redrawing_the_dialog(browser: Browser, stage: Stage) -> None:
    """Removed, or shown in a new form, it comes back in the state of the form."""
    dialog = open_dialog(browser, stage)
    dialog.switch.click()
    browser.run("document.querySelector('.xavier-share').remove()")
    browser.wait(lambda: dialog.has_switch and dialog.sharing, "the switch is back")
    dialog.close()
    dialog.open("Launch")
    dialog.choose("Model Engine", "vLLM")
    assert not dialog.sharing
    assert len(browser.driver.find_elements(By.CSS_SELECTOR, ".xavier-share")) == 1


def test_by_keyboard(browser: Browser, stage: Stage) -> None:
    dialog = open_dialog(browser, stage)
    browser.run("arguments[0].focus()", dialog.switch)
    dialog.keys(Keys.SPACE)
    assert dialog.sharing
    dialog.keys(Keys.TAB, Keys.ENTER, Keys.TAB)
    assert browser.run("return document.activeElement.placeholder") == "as large as the KV cache"
    # Enter would submit the form.
    dialog.keys("1GiB", Keys.ENTER)
    assert dialog.pool.get_attribute("value") == "1GiB"
    assert not [path for path, _ in stage.posted if path == "/v1/models"]


def test_the_menu_leads_to_the_page(browser: Browser, stage: Stage) -> None:
    browser.open(stage.address)
    entry = browser.find('nav a[href="/xavier/"]')
    assert entry.text == "KV Cache Sharing"
    entry.click()
    browser.wait_text("h1", "KV Cache Sharing")
    assert browser.driver.current_url == f"{stage.address}/xavier/"


def test_the_menu_entry_follows_a_narrow_menu(browser: Browser, stage: Stage) -> None:
    browser.open(stage.address)
    browser.find('nav a[href="/xavier/"]')
    browser.find("button[aria-label=Collapse]").click()
    browser.wait(lambda: browser.find('nav a[href="/xavier/"]').text == "", "only its icon is left")
    assert browser.find('nav a[href="/xavier/"]').get_attribute("title") == "KV Cache Sharing"
