"""A person's first minutes, as `docs/start.md` describes them: `pip install` of the wheel beside
xinference and vLLM, the sign-in and the switch in the web UI, `try`, `doctor` and the page."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from examples.local_cluster import LAUNCH_TIMEOUT, PASSWORD, USER, LocalCluster
from tests.e2e.conftest import ROOT
from tests.e2e.model import Model, question
from tests.matrix.environments import link
from tests.serving.ui.browser import Browser, open_browser
from tests.serving.ui.launch_dialog import LaunchDialog, sign_in

pytestmark = pytest.mark.long

UV = Path(sys.executable).with_name("uv")
MODEL = "small"
ON_A_CPU = {"block_size": "128", "tensor_parallel_size": "1"}
"""What `docs/start.md` adds to a launch."""
ONLY_INSTALLED = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
"""No program finds the package in the clone."""


@pytest.fixture
def lap(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints how long the step that has just ended took."""
    last = time.monotonic()

    def lap(step: str) -> None:
        nonlocal last
        now = time.monotonic()
        with capsys.disabled():
            print(f"\n{now - last:6.1f} s  {step}", end="", flush=True)
        last = now

    return lap


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """What `make dist` builds."""
    here = ("--no-build-isolation", "--python", sys.executable)
    run(UV, "build", "--quiet", "--wheel", *here, "--out-dir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    return wheel


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment that has xinference and vLLM, but not the extension.

    xinference is no link: a model's own environment has what lies beside it.
    """
    python = link(tmp_path / "environment", {"xinference"})
    version = metadata.version("xinference")
    run(UV, "pip", "install", "--quiet", "-p", python, "--no-deps", f"xinference=={version}")
    return python


@pytest.fixture
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


def run(*words: str | Path) -> str:
    environment = os.environ | ONLY_INSTALLED
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    return done.stdout


def launch_by_the_switch(browser: Browser, endpoint: str) -> None:
    browser.open(f"{endpoint}/launch-model/custom")
    dialog = LaunchDialog(browser)
    dialog.open("Launch")
    dialog.choose("Model Engine", "vLLM")
    dialog.set_replicas(2)
    dialog.switch.click()
    for name, value in ON_A_CPU.items():
        dialog.add_parameter(name, value)
    dialog.deploy()
    browser.wait(
        lambda: "/running-model" in browser.driver.current_url,
        "the launch is done and the dialog is closed",
        LAUNCH_TIMEOUT,
    )


def test_from_pip_install_to_a_remote_hit_on_the_page(
    wheel: Path,
    python: Path,
    model_folder: Path,
    browser: Browser,
    lap: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XINFERENCE_HOME", str(tmp_path))  # of the person, not of the server
    run(python, "-m", "pip", "install", wheel)
    lap("pip install")
    log = ROOT / "build" / "test-first-minutes.log"
    with LocalCluster(log, accounts=True, python=python, environment=ONLY_INSTALLED) as xinference:
        program = python.with_name("xinference-xavier")
        endpoint = ("--endpoint", xinference.endpoint)
        lap("xinference starts")

        xinference.register(model_folder, MODEL)
        sign_in(browser, xinference.endpoint, USER, PASSWORD)
        browser.complaints()  # pages have asked without a token
        launch_by_the_switch(browser, xinference.endpoint)
        xinference.wait_ready(MODEL, 2)
        lap("launched by the switch")

        account = ("--username", USER, "--password", PASSWORD)
        run(python.with_name("xinference"), "login", *endpoint, *account)
        tried = run(program, "try", MODEL, *endpoint)
        assert "from: remote" in tried
        lap("xinference-xavier try")

        run(program, "doctor", *endpoint)
        lap("xinference-xavier doctor")

        browser.find('nav a[href="/xavier/"]').click()
        watch_a_hit(browser, Model(xinference, MODEL))
        assert not browser.complaints()
        lap("the page")

        browser.forget()  # another browser finds the switch on: the server keeps the launch history
        sign_in(browser, xinference.endpoint, USER, PASSWORD)
        browser.open(f"{xinference.endpoint}/launch-model/custom")
        again = LaunchDialog(browser)
        again.open("Launch")
        browser.wait(lambda: again.sharing, "the switch is on from the launch history")


def watch_a_hit(browser: Browser, model: Model) -> None:
    """On the page, which updates by itself."""
    browser.wait_text("#live", "Live")
    browser.wait_text(".head h2", MODEL)
    for name in (model.first, model.second):
        browser.wait_text("#replicas", name)
        browser.wait_text("#events", f"{name} joined")
    browser.find("#routing-off").click()
    browser.wait(
        lambda: browser.find("#routing-off").get_attribute("aria-pressed") == "true",
        "replicas answer in turn",
    )
    fetches = int(browser.text("#fetches"))
    model.share(model.first, model.second, question(400))
    browser.wait_text("#fetches", f"{fetches + 1}")
    remote = model.status()["totals"]["hits"]["remote"]
    browser.wait_text("#source-list", f"({remote:,})")
    link = browser.text("#links tbody")
    assert f"{model.first} {model.second} " in link
    assert "MiB" in link
    browser.wait_text("#helps", "Yes")
    browser.run("scrollTo(0, 0)")
    browser.screenshot("page-hit")
