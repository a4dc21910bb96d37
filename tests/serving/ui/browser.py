"""A real browser: Debian's chromium without a window, driven by selenium."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from selenium.common.exceptions import (
    ElementClickInterceptedException,
    StaleElementReferenceException,
)
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

SCREENSHOTS = "XAVIER_SCREENSHOTS"
"""The environment variable with the folder for screenshots; `docs/images` updates those of the
documentation."""
ROOT = Path(__file__).parents[3]
DESKTOP = (1280, 900)
PHONE = (390, 844)
PATIENCE = 30.0
T = TypeVar("T")
_CHROMIUM = "/usr/bin/chromium"
_CHROMEDRIVER = "/usr/bin/chromedriver"
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # chromium has no sandbox as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--force-device-scale-factor=1",
    "--lang=en-US",
)


class Browser:
    """`with open_browser() as browser:`; one window, whose methods wait for what they look for."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get(address)

    def resize(self, size: tuple[int, int]) -> None:
        """Set the size of the page, which can be narrower than a window."""
        width, height = size
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )

    def remember(self, **settings: str) -> None:
        """Put `settings` into the local storage of the site that is open."""
        for name, value in settings.items():
            self.run("localStorage.setItem(arguments[0], arguments[1])", name, value)

    def forget(self) -> None:
        """Forget the open site, like a browser that has never been there.

        `localStorage.clear()` is not enough: a page's last write may arrive afterwards.
        """
        origin = self.run("sessionStorage.clear(); return location.origin")
        self.driver.execute_cdp_cmd(
            "Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"}
        )

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        """The first visible element of this CSS selector or XPath."""
        by = By.XPATH if selector.startswith(("//", "(")) else By.CSS_SELECTOR

        def seen() -> WebElement | None:
            found = self.driver.find_elements(by, selector)
            return next((element for element in found if element.is_displayed()), None)

        return self.wait(seen, f"{selector} is visible")

    def has(self, selector: str) -> bool:
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return any(element.is_displayed() for element in found)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def wait_text(self, selector: str, part: str) -> str:
        """The element's text, as soon as it contains `part`."""
        last = ""

        def there() -> str | None:
            nonlocal last
            last = self.find(selector).text
            return last if part in last else None

        return self.wait(there, lambda: f"{part!r} is in {selector}, which says {last!r}")

    def wait(
        self,
        look: Callable[[], T | None],
        what: str | Callable[[], str],
        patience: float = PATIENCE,
    ) -> T:
        """The first true value of `look`, which may fail while the page redraws or moves its
        elements."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            try:
                if found := look():
                    return found
            except (ElementClickInterceptedException, StaleElementReferenceException):
                continue
            time.sleep(0.05)
        text = what if isinstance(what, str) else what()
        log = "\n".join(self.complaints())
        self.screenshot("failed")
        raise AssertionError(f"not within {patience:.0f} s: {text}\n{log}")

    def complaints(self) -> list[str]:
        """Errors that the browser has logged since the last call."""
        return [
            entry["message"] for entry in self.driver.get_log("browser")  # type: ignore[no-untyped-call]
            if entry["level"] == "SEVERE"
        ]  # fmt: skip

    def screenshot(self, name: str) -> None:
        folder = Path(os.environ.get(SCREENSHOTS, ROOT / "build" / "screenshots"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(self.driver.get_screenshot_as_png())


@contextmanager
def open_browser() -> Iterator[Browser]:
    for program in (_CHROMIUM, _CHROMEDRIVER):
        assert Path(program).exists(), f"{program} is missing: make system installs it"
    with TemporaryDirectory(prefix="xavier-browser-") as folder:
        options = ChromeOptions()
        options.binary_location = _CHROMIUM
        for option in (*_OPTIONS, f"--user-data-dir={folder}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options=options, service=ChromeService(_CHROMEDRIVER))
        try:
            browser = Browser(driver)
            browser.resize(DESKTOP)
            yield browser
        finally:
            driver.quit()
