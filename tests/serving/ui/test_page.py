"""The page `/xavier/` in a real browser: its text in each state, and its updates."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serving.ui.browser import DESKTOP, PHONE, Browser
from tests.serving.ui.reports import (
    HITS,
    POOL,
    history,
    incarnation,
    model,
    named_prefix,
    replica,
    routing,
    sample,
)
from tests.serving.ui.stage import TOKEN, Stage
from xinference_xavier.serving.ui.routes import languages
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import FirstTokens, TrackerStats

pytestmark = pytest.mark.long

LANGUAGES = languages()
MIB = 1 << 20
A, B = incarnation(0), incarnation(1)


def two(to_a: int = 300 * MIB, to_b: int = 900 * MIB, **more: Any) -> dict[str, Any]:
    """Two replicas that have fetched from each other."""
    return model(replica(0, received={B: to_a}), replica(1, received={A: to_b}, **more))


def tracker(**stats: Any) -> dict[str, Any]:
    return asdict(read(TrackerStats, stats))


@pytest.fixture
def page(browser: Browser, stage: Stage) -> Iterator[Callable[[], Browser]]:
    """Opens the page, which must not have logged errors at the end."""

    def open_page(model_uid: str = "") -> Browser:
        browser.open(f"{stage.address}/xavier/#{model_uid}")
        return browser

    yield open_page
    unexpected = [line for line in browser.complaints() if "Failed to load resource" not in line]
    assert not unexpected


def rows(browser: Browser, table: str) -> list[str]:
    """The visible rows of a table."""
    return browser.find(f"#{table} tbody").text.splitlines()


def speak(browser: Browser, code: str) -> None:
    """As if the language were chosen on a page of xinference in another tab."""
    browser.remember(app_locale=code)
    browser.run("dispatchEvent(new StorageEvent('storage'))")


# What it shows


def test_the_figures_of_a_model(page: Any, stage: Stage) -> None:
    stage.history = history(time.time())
    stage.share(two())
    browser = page()
    browser.wait_text("#live", "Live")
    sources = [row.split("% ", 1) for row in rows(browser, "source-list")]
    assert [since_start for _, since_start in sources] == [
        "15% (24,000) 35 ms", "10% (16,000) –", "25% (40,000) 350 ms", "50% (80,000) 4.3 sec",
    ], "no replica has a disk"  # fmt: skip
    _, pool, remote, _ = (int(recent.split()[-1]) for recent, _ in sources)
    said = re.match(r"Yes: (\d+)%", browser.text("#helps"))
    assert said is not None
    assert abs(int(said[1]) - pool - remote) <= 1, "what is shared is what the table says, rounded"
    assert browser.text("#saved") == "23 sec"
    assert browser.text("#received") == "1.2 GiB"
    assert browser.text("#fetches") == "20"
    assert "4 rolled back: it took too long (4)" in browser.text("main")
    assert rows(browser, "links") == ["m-0 m-1 900 MiB 0 B/s 0", "m-1 m-0 300 MiB 0 B/s 0"]
    shown = " ".join(rows(browser, "replicas"))
    for part in ("m-0", "10.0.0.1:40001", "248 MiB of 512 MiB", "9 pinned, 1 in quarantine",
                 "2,400 tokens/s", "shared memory", "vLLM 0.32.0"):  # fmt: skip
        assert part in shown, part


def test_a_disk_is_a_source_where_a_replica_has_one(page: Any, stage: Stage) -> None:
    stage.history = history(time.time())
    disk = {"state": "open", "rows": 3, "limit_bytes": 8 * MIB}
    stage.share(two(disk=disk))
    browser = page()
    browser.wait_text("#replicas", "Disk: 6 MiB of 8 MiB")
    assert len(rows(browser, "source-list")) == len(HITS)
    stage.share(two(disk={**disk, "problem": "OSError: No space left on device"}))
    browser.wait_text("#replicas", "Disk: OSError: No space left on device")
    stage.share(two(disk={**disk, "state": "computed differently"}))
    browser.wait_text("#replicas", "Disk: rows computed differently, not used")


def test_moving_bytes_are_shown(page: Any, stage: Stage) -> None:
    stage.share(two())
    browser = page()
    browser.wait_text("#links", "900 MiB")
    sent = 900 * MIB

    def moving() -> bool:
        nonlocal sent
        sent += 20 * MIB
        stage.share(two(to_b=sent, fetching={A: 12}))
        return re.search(r"iB/s 12$", rows(browser, "links")[0]) is not None

    browser.wait(moving, "its rate is shown")
    assert rows(browser, "links")[1] == "m-1 m-0 300 MiB 0 B/s 0", "the other direction rests"


def test_where_requests_go(page: Any, stage: Stage) -> None:
    stage.share(two() | routing())
    browser = page()
    browser.wait_text("#routing", "the replica that will answer it first")
    assert " 40 1 50 ms 35%" in " ".join(rows(browser, "replicas"))
    assert rows(browser, "choices") == [
        "It holds as much of the prompt as any other 75% 30 35 ms · 47 ms · 50 ms "
        "36 ms · 48 ms · 440 ms 3 ms · 5 ms · 440 ms",
        "It fetches the beginning of the prompt from another 15% 6 – – –",
        "No replica holds any of the prompt: it is the least busy 10% 4 – – –",
    ]
    facts = rows(browser, "routing-facts")
    assert facts[0] == "Waiting now, with all replicas at their limit 0"
    assert facts[1] == "Waited so far 4, for 750 ms on average"
    assert facts[-1] == "Sent in turn 0"


def test_replicas_that_are_full_and_replicas_that_are_gone(page: Any, stage: Stage) -> None:
    full = {"m-0": {"backlog_s": 0.0, "requests": 8, "accepts": False}}
    stage.share(two() | routing(loads=full, replicas={"m-0": 1, "m-1": 1}, waiting=7))
    browser = page()
    browser.wait_text("#replicas", "at its request limit")
    assert " 40 – – 35%" in " ".join(rows(browser, "replicas"))
    assert "Waiting now, with all replicas at their limit 7" in rows(browser, "routing-facts")


def test_a_replica_that_drains(page: Any, stage: Stage) -> None:
    loads = {"m-0": {"backlog_s": 0.0, "requests": 3, "accepts": True}}
    drains, stays = replica(0, draining=True), replica(1)
    stage.share(model(drains, stays) | routing(loads=loads))
    browser = page()
    browser.wait_text("#replicas", "draining, 3 requests left: it will be removed")
    happened = {"event": "ReplicaDrained", "replica": "m-0", "requests": 0, "chunks": 12}
    stage.happen({**happened, "model_uid": "m", "time": 1.0})
    browser.wait_text("#events", "m-0 is removed: 0 requests had not ended, and peers got 12")
    stage.share(model(stays) | routing(loads={}))
    browser.wait(lambda: "draining" not in browser.text("#replicas"), "it is removed")


def test_events_as_they_happen(page: Any, stage: Stage) -> None:
    now = time.time()
    stage.events = [
        {"event": "ReplicaJoined", "time": now - 9, "replica": "m-0", "incarnation": A,
         "address": "10.0.0.1:40001", "model_uid": "m"},
    ]  # fmt: skip
    stage.share(two())
    browser = page()
    browser.wait_text("#events", "m-0 joined (10.0.0.1:40001)")
    assert browser.run("return document.getElementById('said').textContent") == ""
    stage.happen(
        {"event": "FetchRolledBack", "time": now, "incarnation": B, "donor": A, "reason": "timeout",
         "rows": 20, "committed": 3, "model_uid": "m"}
    )  # fmt: skip
    sentence = "Fetch from m-0 to m-1 rolled back, 3 of 20 chunks kept: it took too long"
    browser.wait_text("#events", sentence)
    newest = browser.find("#events li").text
    assert sentence in newest
    # Screen readers announce it, too.
    assert browser.run("return document.getElementById('said').textContent") == sentence
    stage.happen({"event": "SharingSwitched", "time": now, "model_uid": "m", "enabled": False})
    browser.wait_text("#events", "Sharing was switched off")
    stage.happen({"event": "RoutingChanged", "time": now, "model_uid": "m", "routing": "off"})
    browser.wait_text("#events", "Routing was set to “In turn”")
    stage.happen({"event": "CacheFlushed", "time": now, "model_uid": "m", "replicas": 2})
    browser.wait_text("#events", "Pools were emptied (replicas: 2)")
    stage.happen({"event": "FromTheFuture", "time": now, "model_uid": "m"})
    browser.wait_text("#events", "FromTheFuture")


def drawn(browser: Browser, plot: str, colour: str) -> list[int]:
    """The first and the last line of pixels in which a plot has the colour of that name."""
    return list(
        browser.run(
            r"""
            const canvas = document.querySelector(`#plot-${arguments[0]} canvas`);
            const style = getComputedStyle(document.documentElement);
            const colour = style.getPropertyValue(`--${arguments[1]}`).match(/\d+/g);
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            const lines = [];
            for (let place = 0; place < data.length; place += 4) {
              const far = colour.map((value, part) => Math.abs(value - data[place + part]));
              if (data[place + 3] > 200 && Math.max(...far) < 12) lines.push(place / 4 / width);
            }
            return lines.length ? [Math.floor(lines[0]), Math.floor(lines.at(-1))] : [];
            """,
            plot,
            colour,
        )
    )


def legend(browser: Browser, plot: str) -> str:
    """The figures below a plot: of its cursor, or the latest."""
    cells = browser.driver.find_elements(By.CSS_SELECTOR, f"#plot-{plot} .u-legend :is(th, td)")
    return " ".join(cell.text for cell in cells if cell.text)


def test_plots_of_the_last_hour_by_keyboard(page: Any, stage: Stage) -> None:
    stage.history = history(time.time())
    stage.share(two())
    browser = page()
    plot = browser.find("#plot-tokens")
    browser.wait(lambda: drawn(browser, "tokens", "computed"), "it is drawn")
    tops = [drawn(browser, "tokens", source)[0] for source in ("prefix_cache", "remote")]
    assert tops[0] < tops[1] < drawn(browser, "tokens", "computed")[1], "one above the other"
    assert drawn(browser, "bytes", "bytes")
    assert drawn(browser, "fetches", "committed")
    browser.run("arguments[0].focus()", plot)
    latest = legend(browser, "tokens")
    plot.send_keys(Keys.HOME)
    browser.wait(lambda: legend(browser, "tokens") != latest, "the first sample")
    first = legend(browser, "tokens")
    assert "Remote" in first
    plot.send_keys(Keys.ARROW_RIGHT)
    browser.wait(lambda: legend(browser, "tokens") not in (first, latest), "the next one")
    plot.send_keys(Keys.ESCAPE)
    browser.wait(lambda: legend(browser, "tokens") == latest, "the latest again")


def test_how_long_people_wait_by_what_was_cached(page: Any, stage: Stage) -> None:
    """On a logarithmic axis: the fast sources are not one line at its bottom."""
    waits, until, samples = FirstTokens(), time.time(), []
    for ago, computed, remote in ((120, 0, 0), (60, 10, 10), (0, 0, 10)):
        for _ in range(computed):
            waits.computed.observe(3.0)
        for _ in range(remote):
            waits.remote.observe(0.15)
        samples.append(sample(until - ago, first_tokens=asdict(waits)))
    stage.history = {"interval_s": 10, "samples": samples}
    stage.share(model(replica(0, first_tokens=asdict(waits)), replica(1)))
    browser = page()
    plot = browser.find("#plot-first-tokens")

    def read_out(key: str, values: str) -> None:
        plot.send_keys(key)
        browser.wait(lambda: legend(browser, "first-tokens").endswith(values), values)

    browser.run("arguments[0].focus()", plot)
    # Within a bucket, as many people wait for each time.
    read_out(Keys.HOME, "Prefix cache – Local pool – Remote 150 ms Computed 3.5 sec")
    read_out(Keys.ARROW_RIGHT, "Prefix cache – Local pool – Remote 150 ms Computed –")
    computed, remote = (drawn(browser, "first-tokens", each) for each in ("computed", "remote"))
    assert computed[1] + 20 < remote[0], "the longer wait is higher"
    assert remote[1] < 140, "the shorter one is not at the bottom"


def test_a_cluster_of_200_replicas(page: Any, stage: Stage) -> None:
    """Replicas that need a look come first, the others are folded."""
    bad = replica(77, comparison={"failed_audits": 1})
    stage.events = [{"event": "TrackerRegained", "time": time.time(), "incarnation": A}]
    stage.share(model(*(replica(n, received={A: n}) for n in range(77)), bad,
                      *map(replica, range(78, 200))))  # fmt: skip
    browser = page()
    browser.wait_text("#replicas tbody tr", "m-77")
    assert browser.run("return document.documentElement.scrollHeight") < 5 * 900
    assert browser.find("#events").location["y"] < 2 * 900
    names = "#replicas tbody th"
    assert len(browser.driver.find_elements(By.CSS_SELECTOR, names)) == 12
    browser.find("#replicas-filter").send_keys("m-19")
    browser.wait(
        lambda: len(browser.driver.find_elements(By.CSS_SELECTOR, names)) == 11, "m-19, m-190 …"
    )
    browser.find("#replicas-filter").clear()
    browser.find("#replicas-filter").send_keys(" ", Keys.BACKSPACE)
    browser.find("#replicas-all").click()
    browser.wait(
        lambda: len(browser.driver.find_elements(By.CSS_SELECTOR, names)) == 200, "all are shown"
    )
    browser.find("#links thead button").click()
    browser.wait_text("#links tbody tr", "m-0 m-76")
    assert browser.find("#links thead th").get_attribute("aria-sort") == "descending"
    browser.resize(PHONE)
    browser.driver.refresh()
    browser.wait(
        lambda: len(browser.driver.find_elements(By.CSS_SELECTOR, names)) == 4, "rows are blocks"
    )
    assert browser.run("return document.documentElement.scrollHeight") < 7 * 844


def test_several_models(page: Any, stage: Stage) -> None:
    stage.share(two())
    other = "a model: mine"
    stage.share(model(replica(0), replica(1), uid=other))
    browser = page()
    browser.wait_text(".head h2", "m")
    browser.find("#models").send_keys(other)
    browser.wait_text(".head h2", other)
    browser.wait_text("main", "Nothing has been transferred yet.")
    # A link to a model can be bookmarked.
    page("a%20model%3A%20mine")
    browser.wait_text(".head h2", other)


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (model(replica(0)), "There is only one replica, so nothing is shared."),
        (model(), "No replica has joined yet"),
        (two() | {"enabled": False}, "Sharing is switched off"),
        (
            model(replica(0), replica(1), apart=True),
            "in 2 namespaces and share only within each. xinference-xavier doctor says why",
        ),
        (
            model(*(replica(n, hits=dict.fromkeys(HITS, 0) | {"computed": 9}) for n in (0, 1))),
            "Nothing has been shared yet.",
        ),
        (two() | {"tracker": tracker(dropped=1234)}, "no room to list 1,234 chunks"),
        (
            two(comparison={"differing": 1, "peer": A, "layer": "layers.3", "amount": 0.5}),
            "m-1 and m-0 compute different rows (layers.3, by 50%)",
        ),
        (
            two(fetch_decisions={"left_out": {A: "timeout"}}),
            "m-1 fetches nothing from m-0 for now, because its latest fetches failed (it took",
        ),
        (two(), "No replica has reported its load yet"),
        (two() | routing(mode="off"), "Requests go to the replicas in turn."),
        (two() | routing(mode="backlog"), "to the replica with the smallest backlog"),
        (
            two(pool=POOL | {"cache_rows": 512, "engines": 2}),
            f"50% of the KV cache that it backs; xavier_pool_bytes={2 << 30} holds all of it",
        ),
        (model(replica(0, stale=True), replica(1)), "no answer: data of its last heartbeat"),
    ],
)
def test_states_with_an_explanation(
    page: Any, stage: Stage, report: dict[str, Any], sentence: str
) -> None:
    stage.share(report)
    page().wait_text("main", sentence)


def test_replicas_that_are_apart_differ_in_something(page: Any, stage: Stage) -> None:
    fields = ({"dtype": "float16", "seed": 0}, {"dtype": "bfloat16", "seed": 0})
    stage.cluster = {"models": {"m": {"self_checks": {
        incarnation(number): {"fingerprint_fields": each} for number, each in enumerate(fields)
    }}}}  # fmt: skip
    stage.share(model(replica(0), replica(1), apart=True))
    page().wait_text("#hint", "in 2 namespaces and share only within each: they differ in dtype.")


def test_what_is_switched_off_does_not_help(page: Any, stage: Stage) -> None:
    stage.history = history(time.time())
    stage.share(two() | {"enabled": False})
    browser = page()
    browser.wait_text("#hint", "Sharing is switched off")
    browser.find("#sources")
    assert not browser.has("#helps")


def test_a_link_to_a_model_that_is_gone(page: Any, stage: Stage) -> None:
    stage.share(two())
    browser = page("nonesuch")
    browser.wait_text("#lost", "nonesuch no longer shares here")
    browser.wait_text(".head h2", "m")


def test_a_failed_audit_is_a_red_line(page: Any, stage: Stage) -> None:
    stage.share(two(comparison={"audits": 9, "failed_audits": 1}))
    browser = page()
    browser.wait_text("#audit", "Rows of m-1 differed from what it computes, and were dropped.")
    assert browser.find("#audit").get_attribute("role") == "alert"
    background = browser.find("#audit").value_of_css_property("background-color")
    red, green, blue = map(int, re.findall(r"\d+", background)[:3])
    assert red > green + blue


def test_before_any_model_shares_it_says_what_to_do(page: Any, stage: Stage) -> None:
    browser = page()
    browser.wait_text("#empty", "No model shares its cache yet")
    assert browser.text("#live") == "No model shares"
    assert "--enable_xavier true" in browser.text("#empty pre")
    links = browser.driver.find_elements(By.CSS_SELECTOR, "#empty a")
    assert [link.get_attribute("href") for link in links] == [
        f"{stage.address}/login", f"{stage.address}/launch-model/llm",
    ]  # fmt: skip
    # A launched model appears at once.
    stage.share(two())
    browser.wait_text("#live", "Live")


# What goes wrong


def test_it_survives_a_restart_of_the_server(page: Any, stage: Stage) -> None:
    """Figures stay, marked as old, and continue by themselves without a reload."""
    stage.share(two())
    browser = page()
    browser.wait_text("#live", "Live")
    stage.stop()
    try:
        browser.wait_text("#live", "No connection")
        browser.wait_text("#away", "xinference does not answer")
        assert "Data as of" in browser.text("#aged")
        assert "40,000" in browser.text("#source-list")
    finally:
        stage.restart()
    stage.share(two(to_b=901 * MIB))
    browser.wait_text("#live", "Live")
    browser.wait_text("#links", "901 MiB")
    assert not browser.has("#away")


def test_a_model_that_is_terminated(page: Any, stage: Stage) -> None:
    stage.share(two())
    browser = page()
    browser.wait_text("#live", "Live")
    stage.change(stage.reports.clear)
    browser.wait_text("#lost", "m no longer shares here")
    browser.wait_text("#empty", "No model shares its cache yet")


def test_a_tracker_that_does_not_answer(page: Any, stage: Stage) -> None:
    stage.share(two())
    browser = page()
    browser.wait_text("#live", "Live")
    stage.unavailable = True
    browser.wait_text("#away", "The model's tracker does not answer.")
    assert "40,000" in browser.text("#source-list")
    browser.driver.refresh()
    browser.wait_text("#trouble", "The model's tracker does not answer.")
    assert browser.text("#live") == "The tracker does not answer"
    stage.unavailable = False
    browser.wait_text("#live", "Live")


def test_nothing_is_shown_without_a_sign_in(page: Any, stage: Stage) -> None:
    stage.share(two())
    stage.needs_token = True
    browser = page()
    browser.wait_text("#trouble", "Please sign in")
    assert "m-0" not in browser.text("body")
    assert browser.find("#trouble a").get_attribute("href") == f"{stage.address}/login"
    # It uses the token of xinference's own pages, and renews it as they do.
    browser.run("sessionStorage.token = 'old'; sessionStorage.refresh_token = 'renew'")
    browser.driver.refresh()
    browser.wait_text("#live", "Live")
    assert browser.run("return sessionStorage.token") == TOKEN


def test_a_refused_token_is_sent_once(page: Any, stage: Stage, browser: Browser) -> None:
    """xinference locks an address out for an hour after ten wrong tokens: an open page must not do
    that to a whole office."""
    stage.share(two())
    stage.needs_token = True
    browser.run("sessionStorage.token = 'old'; sessionStorage.refresh_token = 'used'")
    page()
    browser.wait_text("#trouble", "Please sign in")
    assert browser.text("#live") == "Please sign in"
    for _ in range(3):
        browser.run("dispatchEvent(new Event('online'))")  # it tries again at once
    browser.run("sessionStorage.token = arguments[0]", TOKEN)
    browser.wait_text("#live", "Live")
    assert stage.wrong_tokens == ["old"]


def test_without_the_right_to_read(page: Any, stage: Stage) -> None:
    stage.may_read = False
    page().wait_text("#trouble", "lacks the permission models:list")


def test_a_server_without_the_interface(page: Any, stage: Stage) -> None:
    stage.serves = False
    page().wait_text("#trouble", "XINFERENCE_EXTENSIONS=xinference_xavier:extension")


# What it does


def test_sharing_and_routing_are_changed_at_run_time(page: Any, stage: Stage) -> None:
    stage.share(two() | routing())
    browser = page()
    assert browser.find("#routing-auto").get_attribute("aria-pressed") == "true"
    browser.find("#routing-off").click()
    browser.wait_text("#routing", "Requests go to the replicas in turn.")
    assert browser.find("#routing-off").get_attribute("aria-pressed") == "true"
    assert browser.find("#routing-auto").get_attribute("aria-pressed") == "false"
    browser.find("#enabled").click()
    browser.wait_text("#hint", "Sharing is switched off")
    browser.wait(lambda: not browser.find("#enabled").is_selected(), "the switch is off")
    changes = ({"routing": "off"}, {"enabled": False})
    assert stage.posted == [("/v1/xavier/m", change) for change in changes]


def test_a_name_is_removed(page: Any, stage: Stage) -> None:
    stage.share(two() | {"prefixes": [named_prefix("guide")]})
    browser = page()
    browser.wait_text("#prefix-list", "guide Kept 1,000 7 / 7 m-0 5 hr 29 min")
    browser.find("#prefix-list tbody button").click()
    browser.wait(lambda: not browser.has("#prefix-list"), "the name is forgotten")


def test_a_lost_text_is_seen_to_come_back(page: Any, stage: Stage) -> None:
    kept = named_prefix("guide")
    lost = kept | {"replicas": {"m-0": kept["replicas"]["m-0"] | {"held": 2}}}
    stage.share(two() | {"prefixes": [kept]})
    browser = page()
    browser.wait_text("#prefix-list", "Kept 1,000 7 / 7")
    stage.share(two() | {"prefixes": [lost | {"state": "waiting"}]})
    browser.wait_text("#prefix-list", "Waiting 1,000 2 / 7")
    stage.share(two() | {"prefixes": [lost | {"state": "computing"}]})
    browser.wait_text("#prefix-list", "Being computed 1,000 2 / 7")
    stage.share(two() | {"prefixes": [kept]})
    browser.wait_text("#prefix-list", "Kept 1,000 7 / 7")
    assert "not shown" not in browser.text("#prefixes")
    stage.share(two() | {"prefixes": [kept], "prefix_states": {"kept": 1000, "failed": 2}})
    browser.wait_text("#prefixes", "1,001 more are not shown")


def test_flushing_asks_for_confirmation(page: Any, stage: Stage) -> None:
    stage.share(two())
    browser = page()
    browser.find("#flush").click()
    browser.driver.switch_to.alert.dismiss()
    assert stage.posted == []
    browser.find("#flush").click()
    browser.driver.switch_to.alert.accept()
    browser.wait_text("#notice", "told to empty their pools")
    assert stage.posted == [("/v1/xavier/m/flush", {})]


def test_without_the_right_to_change_it_says_so(page: Any, stage: Stage) -> None:
    stage.share(two())
    stage.may_change = False
    browser = page()
    browser.find("#enabled").click()
    browser.wait_text("#notice", "models:write")
    assert browser.find("#enabled").is_selected()


# For everybody


def test_light_dark_and_chinese_follow_xinference(page: Any, stage: Stage) -> None:
    stage.history = history(time.time())
    stage.share(two())
    browser = page()
    browser.wait_text("#live", "Live")
    width, _ = DESKTOP
    browser.resize((width, browser.run("return document.documentElement.scrollHeight")))
    browser.screenshot("page-light")
    browser.find("#theme").click()
    browser.wait(
        lambda: browser.run("return localStorage.theme") == "dark", "the setting is stored"
    )
    speak(browser, "zh")
    browser.wait_text("h1", "KV 缓存共享")
    assert browser.run("return document.documentElement.lang") == "zh"
    browser.screenshot("page-dark")
    browser.open(f"{stage.address}/launch-model/llm")
    browser.wait_text("nav", "启动模型")
    assert browser.run("return document.documentElement.classList.contains('dark')")
    assert browser.run("return localStorage.app_locale + document.cookie") == "zh"
    browser.complaints()  # in dark mode, React logs errors even without us: the export is light


def test_on_a_phone(page: Any, stage: Stage, browser: Browser) -> None:
    """The page fits: rows of wide tables become blocks."""
    browser.resize(PHONE)
    stage.history = history(time.time())
    stage.share(two())
    page().wait_text("#live", "Live")
    browser.find("#plot-fetches")
    browser.wait(
        lambda: browser.run("return document.documentElement.scrollWidth <= innerWidth"),
        "the page is not wider than the phone",
    )
    small = browser.run(
        """
        return [...document.querySelectorAll("main *")].filter((element) =>
          !element.children.length && element.textContent && !element.closest(".unseen") &&
          element.scrollWidth > element.clientWidth + 1 &&
          getComputedStyle(element).display !== "inline").map((element) => element.textContent);
        """
    )
    assert small == [], "no figure is cut off"
    assert "Backlog now" in browser.run(
        "return getComputedStyle(document.querySelector('#replicas td:nth-child(6)'), '::before')"
        ".content"
    )


def test_by_keyboard(page: Any, stage: Stage) -> None:
    stage.history = history(time.time())
    stage.share(two())
    browser = page()
    browser.wait_text("#live", "Live")
    reached: list[str] = []
    while "plot-tokens" not in reached and len(reached) < 20:
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(
            browser.run("return document.activeElement.id || document.activeElement.className")
        )
    order = ["skip", "home", "theme", "enabled", "flush"]
    assert [name for name in reached if name in order] == order
    focused = browser.driver.switch_to.active_element
    stage.share(two(to_b=950 * MIB))
    browser.wait_text("#links", "950 MiB")
    assert browser.driver.switch_to.active_element == focused, "new figures leave the focus alone"
