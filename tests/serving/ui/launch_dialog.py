"""xinference's form to sign in and its launch dialog, operated like a person."""

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select

from tests.serving.ui.browser import Browser

_DIALOG = "//*[@role='dialog']"
_SECTION = "[role=dialog] .xavier-share"


def sign_in(browser: Browser, endpoint: str, name: str, password: str) -> None:
    browser.open(f"{endpoint}/login")
    browser.find("input:not([type=password])").send_keys(name)
    browser.find("input[type=password]").send_keys(password)
    browser.find("button[type=submit]").click()
    browser.wait(lambda: browser.run("return sessionStorage.getItem('token')"), "a token is stored")


class LaunchDialog:
    """The dialog of the first model on the open page."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def open(self, launch: str) -> None:
        """`launch` is the button's text in the page's language."""
        self._browser.find(f"//main//button[normalize-space()='{launch}']").click()
        self._browser.find(_DIALOG)

    def close(self) -> None:
        self._button("Cancel").click()
        self._browser.wait(lambda: not self._browser.has("[role=dialog]"), "the dialog is closed")

    def choose(self, label: str, value: str) -> None:
        title = f"{_DIALOG}//label[starts-with(normalize-space(), '{label}')]"
        field = f"{title}/following-sibling::div"
        options = f"//span[normalize-space()='{value}']"

        def offered() -> WebElement | None:
            self._browser.find(f"{field}/div").click()
            found = self._browser.driver.find_elements(By.XPATH, options)
            return found[-1] if found else None

        self._browser.wait(offered, f"{label} offers {value}").click()
        self._browser.wait(lambda: value in self._browser.find(field).text, f"{label} is {value}")

    def set_replicas(self, number: int) -> None:
        self.type_into("Replica", str(number))

    def type_into(self, label: str, text: str) -> None:
        field = self._browser.find(f"{_DIALOG}//label[.='{label}']/following-sibling::input")
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text)

    def add_parameter(self, key: str, value: str) -> None:
        """Add one of the engine's additional parameters."""
        if not self._browser.has("[role=dialog] [data-slot=collapsible][data-state=open]"):
            self._button("Advanced Configuration").click()
        title = "Additional Parameters"
        heading = f"{_DIALOG}//span[starts-with(normalize-space(), '{title}')]"
        self._browser.find(f"{heading}/../following-sibling::button").click()
        rows = f"{heading}/ancestor::*[contains(@class, 'space-y-3')][1]"
        for placeholder, text in (("key", key), ("value", value)):
            field = self._browser.find(f"({rows}//input[@placeholder='{placeholder}'])[last()]")
            field.send_keys(text, Keys.TAB)

    def autostart(self) -> None:
        self._browser.find(f"{_DIALOG}//label[contains(., 'Autostart')]//button").click()

    def deploy(self) -> None:
        self._button("Deploy").click()

    def keys(self, *keys: str) -> None:
        """Send keys to the focused element."""
        ActionChains(self._browser.driver).send_keys(*keys).perform()

    # Our section

    @property
    def has_switch(self) -> bool:
        return self._browser.has(_SECTION)

    @property
    def section(self) -> WebElement:
        return self._browser.find(_SECTION)

    @property
    def switch(self) -> WebElement:
        return self._browser.find(f"{_SECTION} [role=switch]")

    @property
    def sharing(self) -> bool:
        return self.switch.get_attribute("aria-checked") == "true"

    @property
    def note(self) -> str:
        return self._browser.text(f"{_SECTION} [role=status]")

    @property
    def pool(self) -> WebElement:
        return self._browser.find(f"{_SECTION} input")

    def unfold(self) -> None:
        """Show the options."""
        self._browser.find(f"{_SECTION} summary").click()

    def choose_backend(self, title: str) -> None:
        Select(self._browser.find(f"{_SECTION} select")).select_by_visible_text(title)

    def _button(self, text: str) -> WebElement:
        return self._browser.find(f"{_DIALOG}//button[normalize-space()='{text}']")
