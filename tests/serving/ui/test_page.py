"""The page `/xavier/` in a real browser: its text in each state, and its updates."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serving.ui.browser import PHONE, TALL, Browser
from tests.serving.ui.reports import (
    HITS,
    POOL,
    history,
    incarnation,
    model,
    named_prefix,
    replica,
    routing,
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
    assert browser.text("#helps").startswith("Yes: ")
    assert len(rows(browser, "waits-now")) == len(HITS) - 1, "no replica has a disk"
    all_tokens = 2 * sum(HITS.values())
    assert browser.text("#reused") == "50%"
    assert browser.text("#from-remote") == "40,000"
    assert browser.text("#saved") == "56,000"
    assert browser.text("#received") == "1.2 GiB"
    assert browser.text("#fetches") == "20"
    everything = browser.text("main")
    assert f"80,000 of {all_tokens:,} tokens" in everything
    assert "about 23.4 s of computing" in everything or "about 23 s of computing" in everything
    assert "4 rolled back" in everything
    assert browser.text("#sources .legend").splitlines() == [
        "Prefix cache 15% (24,000)",
        "Local pool 10% (16,000)",
        "Remote 25% (40,000)",
        "Computed 50% (80,000)",
    ]
    assert rows(browser, "links") == ["m-1 m-0 300 MiB 0 B/s 0", "m-0 m-1 900 MiB 0 B/s 0"]
    assert rows(browser, "outcomes") == ["Committed 20", "Rolled back: timeout 4"]
    shown = " ".join(rows(browser, "replicas"))
    for part in ("m-0", "10.0.0.1:40001", "248 MiB of 512 MiB", "9 pinned, 1 in quarantine",
                 "2,400 tokens/s", "shared_memory", "vLLM 0.32.0"):  # fmt: skip
        assert part in shown, part
    assert "2 replicas, 2 links" in browser.find("#graph").get_attribute("aria-label")


def test_a_disk_is_a_source_where_a_replica_has_one(page: Any, stage: Stage) -> None:
    stage.history = history(time.time())
    disk = {"state": "open", "rows": 3, "limit_bytes": 8 * MIB}
    stage.share(two(disk=disk))
    browser = page()
    browser.wait_text("#replicas", "Disk: 6.0 MiB of 8.0 MiB")
    assert "Disk 0% (0)" in browser.text("#sources .legend")
    assert len(rows(browser, "waits-now")) == len(HITS)
    stage.share(two(disk={**disk, "problem": "OSError: No space left on device"}))
    browser.wait_text("#replicas", "Disk: OSError: No space left on device")
    stage.share(two(disk={**disk, "state": "computed differently"}))
    browser.wait_text("#replicas", "Disk: rows computed differently, not used")


def test_moving_bytes_are_shown(page: Any, stage: Stage) -> None:
    stage.share(two())
    browser = page()
    browser.wait_text("#links", "900 MiB")
    assert not browser.has("#graph .link.live")
    sent = 900 * MIB

    def moving() -> bool:
        nonlocal sent
        sent += 20 * MIB
        stage.share(two(to_b=sent, fetching={A: 12}))
        return browser.has("#graph .link.live") and "0 B/s 12" not in browser.text("#links")

    browser.wait(moving, "an arrow moves")
    assert browser.find("#graph .link.live text").text.endswith("iB/s")
    # Nothing moves in the other direction.
    assert len(browser.driver.find_elements(By.CSS_SELECTOR, "#graph .link.live")) == 1


def test_where_requests_go(page: Any, stage: Stage) -> None:
    stage.share(two() | routing())
    browser = page()
    browser.wait_text("#routing", "the replica that will answer it first")
    assert rows(browser, "routes") == ["m-0 75% 30 50 ms 1", "m-1 25% 10 12 s 3"]
    assert rows(browser, "choices") == [
        "It holds as much of the prompt as any other 75% 30",
        "It fetches the beginning of the prompt from another 15% 6",
        "It computes what another holds, because that is faster 0% 0",
        "No replica holds any of the prompt: it is the least busy 10% 4",
        "It fetches the prompt while a prefill replica computes it 0% 0",
    ]
    facts = rows(browser, "routing-facts")
    assert facts[0] == "Waiting now, with all replicas at their limit 0"
    assert facts[1] == "Waited so far 4, for 750 ms on average"
    assert facts[-1] == "Sent in turn 0"
    assert rows(browser, "first-bytes") == [
        "It holds as much of the prompt as any other 20 35 ms · 47 ms · 50 ms 36 ms · 48 ms · "
        "440 ms 3 ms · 5 ms · 440 ms"
    ]


def test_replicas_that_are_full_and_replicas_that_are_gone(page: Any, stage: Stage) -> None:
    full = {"m-0": {"backlog_s": 0.0, "requests": 8, "accepts": False}}
    stage.share(two() | routing(loads=full, replicas={"m-0": 1, "m-1": 1}, waiting=7))
    browser = page()
    browser.wait_text("#routes", "at its request limit")
    assert rows(browser, "routes")[-1] == "m-1 50% 1 – –"
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
    sentence = "Fetch from m-0 to m-1 rolled back, 3 of 20 chunks kept: timeout"
    browser.wait_text("#events", sentence)
    newest = browser.find("#events li").text
    assert sentence in newest
    # Screen readers announce it, too.
    assert browser.run("return document.getElementById('said').textContent") == sentence
    stage.happen({"event": "SharingSwitched", "time": now, "model_uid": "m", "enabled": False})
    browser.wait_text("#events", "Sharing was switched off")
    stage.happen({"event": "RoutingChanged", "time": now, "model_uid": "m", "routing": "off"})
    browser.wait_text("#events", "Routing was set to off")
    stage.happen({"event": "CacheFlushed", "time": now, "model_uid": "m", "replicas": 2})
    browser.wait_text("#events", "Pools were emptied (replicas: 2)")
    stage.happen({"event": "FromTheFuture", "time": now, "model_uid": "m"})
    browser.wait_text("#events", "FromTheFuture")


def test_plots_of_the_last_hour_by_mouse_and_by_keyboard(page: Any, stage: Stage) -> None:
    stage.history = history(time.time())
    stage.share(two())
    browser = page()
    plot = browser.find("#plot-tokens")
    drawn = plot.find_elements(By.CSS_SELECTOR, "path[fill]")
    assert [path.get_attribute("fill") for path in drawn] == [
        "var(--computed)", "var(--remote)", "var(--local_pool)", "var(--prefix_cache)",
    ]  # fmt: skip
    for name in ("bytes", "fetches"):
        assert browser.has(f"#plot-{name}")
    browser.run("arguments[0].focus()", plot)
    plot.send_keys(Keys.HOME)
    browser.find("#plot-tokens .cursor")
    first = browser.find("#plot-tokens").get_attribute("aria-label")
    plot.send_keys(Keys.ARROW_RIGHT)
    browser.wait(
        lambda: browser.find("#plot-tokens").get_attribute("aria-label") != first,
        "the next sample is read out",
    )
    assert "Remote" in first
    plot.send_keys(Keys.ESCAPE)
    browser.wait(lambda: not browser.has("#plot-tokens .cursor"), "the cursor is gone")


def test_how_long_people_wait_by_what_was_cached(page: Any, stage: Stage) -> None:
    """A line for each source, with a gap where nobody asked."""
    waits, until, samples = FirstTokens(), time.time(), []
    for ago, computed, remote in ((120, 0, 0), (60, 10, 10), (0, 0, 10)):
        for _ in range(computed):
            waits.computed.observe(3.0)
        for _ in range(remote):
            waits.remote.observe(0.15)
        samples.append({"time": until - ago, "first_tokens": asdict(waits)})
    stage.history = {"interval_s": 10, "samples": samples}
    stage.share(model(replica(0, first_tokens=asdict(waits)), replica(1)))
    browser = page()
    plot = browser.find("#plot-first-tokens")

    def read_out(key: str, values: str) -> None:
        plot.send_keys(key)
        browser.wait(lambda: values in str(plot.get_attribute("aria-label")), values)

    browser.run("arguments[0].focus()", plot)
    # Within a bucket, as many people wait for each time.
    read_out(Keys.HOME, "Prefix cache –, Local pool –, Remote 150 ms, Computed 3.5 s.")
    read_out(Keys.ARROW_RIGHT, "Prefix cache –, Local pool –, Remote 150 ms, Computed –.")
    drawn = {
        line.get_attribute("stroke"): re.sub(r"[\d. ]+", "", str(line.get_attribute("d")))
        for line in plot.find_elements(By.CSS_SELECTOR, "path.line")
    }
    assert drawn == {
        "var(--prefix_cache)": "", "var(--local_pool)": "",
        "var(--remote)": "MhL", "var(--computed)": "Mh",
    }  # fmt: skip
    dot = browser.run("return document.querySelector('.line[stroke*=computed]').getBBox().y")
    line = browser.run("return document.querySelector('.line[stroke*=remote]').getBBox().y")
    assert dot < line, "the longer wait is higher"


def test_several_models(page: Any, stage: Stage) -> None:
    stage.share(two())
    other = "a model: mine"
    stage.share(model(replica(0), replica(1), uid=other))
    browser = page()
    browser.wait_text(".head h2", "m")
    browser.find(f"//nav//a[.='{other}']").click()
    browser.wait_text(".head h2", other)
    browser.wait_text("#links, main", "Nothing has been transferred yet.")
    assert browser.find("nav a[aria-current=page]").text == other
    # A link to a model can be bookmarked.
    page("a%20model%3A%20mine")
    browser.wait_text(".head h2", other)


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (model(replica(0)), "There is only one replica, so nothing is shared."),
        (model(), "No replica has joined yet"),
        (two() | {"enabled": False}, "Sharing is switched off"),
        (model(replica(0), replica(1), apart=True), "in 2 namespaces and share only within each"),
        (
            model(*(replica(n, hits=dict.fromkeys(HITS, 0) | {"computed": 9}) for n in (0, 1))),
            "Nothing has been reused yet.",
        ),
        (model(replica(0) | {"stats": {}}, replica(1) | {"stats": {}}), "No prompts yet."),
        (two() | {"tracker": tracker(dropped=1234)}, "no room to list 1,234 chunks"),
        (
            two(comparison={"differing": 1, "peer": A, "layer": "layers.3", "amount": 0.5}),
            "m-1 and m-0 compute different rows (layers.3, by 50%)",
        ),
        (
            two(fetch_decisions={"left_out": {A: "timeout"}}),
            "m-1 fetches nothing from m-0 for now, because its latest fetches failed (timeout)",
        ),
        (two(), "No replica has reported its load yet"),
        (two() | routing(mode="off"), "Requests go to the replicas in turn."),
        (two() | routing(mode="backlog"), "to the replica with the smallest backlog"),
        (model(*map(replica, range(20))), "20 replicas are too many to draw"),
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
    assert "--enable_xavier true" in browser.text("#empty pre")
    link = browser.find("#empty a")
    assert link.get_attribute("href") == f"{stage.address}/launch-model/llm"
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
        browser.wait_text("#live", "Next try in")
        browser.wait_text("#away", "xinference does not answer")
        assert "Data as of" in browser.text("#aged")
        assert browser.text("#from-remote") == "40,000"
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
    stage.change(lambda: None)
    browser.wait_text("#away", "The model's tracker does not answer.")
    assert browser.text("#from-remote") == "40,000"
    stage.unavailable = False
    stage.change(lambda: None)
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
    browser.wait_text("#live", "Next try in 5 s")  # after the third try
    assert stage.wrong_tokens == ["old"]
    browser.run("sessionStorage.token = arguments[0]", TOKEN)
    browser.wait_text("#live", "Live")


def test_without_the_right_to_read(page: Any, stage: Stage) -> None:
    stage.may_read = False
    page().wait_text("#trouble", "lacks the permission models:list")


def test_a_server_without_the_interface(page: Any, stage: Stage) -> None:
    stage.serves = False
    page().wait_text("#trouble", "XINFERENCE_EXTENSIONS=xinference_xavier:extension")


# What it does


def test_the_switch_at_run_time(page: Any, stage: Stage) -> None:
    stage.share(two())
    browser = page()
    browser.find("#enabled").click()
    browser.wait_text("#hint", "Sharing is switched off")
    assert stage.posted == [("/v1/xavier/m", {"enabled": False})]
    assert browser.find("#enabled").get_attribute("aria-checked") == "false"


def test_routing_is_changed_at_run_time(page: Any, stage: Stage) -> None:
    stage.share(two() | routing())
    browser = page()
    assert browser.find("#routing-auto").get_attribute("aria-pressed") == "true"
    browser.find("#routing-off").click()
    browser.wait_text("#routing", "Requests go to the replicas in turn.")
    assert stage.posted == [("/v1/xavier/m", {"routing": "off"})]
    assert browser.find("#routing-off").get_attribute("aria-pressed") == "true"
    assert browser.find("#routing-auto").get_attribute("aria-pressed") == "false"


def test_a_text_is_named_and_forgotten(page: Any, stage: Stage) -> None:
    stage.share(two())
    browser = page()
    browser.find("#name-text summary").click()
    browser.find("#name-text [name=named]").send_keys("guide")
    browser.find("#name-text textarea").send_keys("x")
    browser.find("#name-text button").click()
    browser.wait_text("#name-text .notice", "'guide' has 1 tokens; give a prefix of 128")
    browser.find("#name-text textarea").send_keys(" and much more")
    browser.find("#name-text [name=everywhere]").click()
    browser.find("#name-text button").click()
    browser.wait_text("#prefix-list", "guide")
    assert stage.posted[-1] == (
        "/v1/xavier/m/prefixes",
        {
            "name": "guide", "prompt": "x and much more", "ttl": "1h", "copies": "all",
            "retention": "soft",
        },
    )  # fmt: skip
    assert rows(browser, "prefix-list") == ["guide Kept 1,000 7 / 7 m-0 5 h 29 min Remove"]
    assert browser.find("#name-text textarea").get_attribute("value") == ""
    browser.find("#prefix-list button").click()
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


def explained(*held: str, tokens: int = 3 * 128 + 50) -> dict[str, Any]:
    """Three chunks and a part; `held` names the replicas that hold each chunk, in capitals if on
    their disks."""

    def place(name: str, names: str) -> str:
        return "pool" if name in names else "disk" if name.upper() in names else "none"

    return {
        "prompt_tokens": tokens,
        "chunk_tokens": 128,
        "chunks": [
            {
                "from": number * 128,
                "to": (number + 1) * 128,
                "replicas": {A: place("a", names), B: place("b", names)},
            }
            for number, names in enumerate(held)
        ],
        "reuse": {
            A: {"local_pool": 128, "disk": 128, "remote": 0, "computed": tokens - 256},
            B: {"local_pool": 128, "disk": 0, "remote": 128, "computed": tokens - 256},
        },
    }


def test_explaining_a_prompt_by_keyboard(page: Any, stage: Stage) -> None:
    stage.share(two())
    stage.explanation = explained("ab", "A", "")
    browser = page()
    browser.run("arguments[0].focus()", browser.find("#explain-text"))
    keys = ActionChains(browser.driver)
    keys.send_keys("What is", Keys.ENTER, "this?", Keys.TAB, Keys.TAB, Keys.ENTER).perform()
    sentence = "At least one replica holds 2 of its 3 whole chunks of 128 tokens."
    browser.wait_text("#explained", sentence)
    message = {"role": "user", "content": "What is\nthis?"}
    assert stage.posted == [("/v1/xavier/m/explain", {"messages": [message]})]
    assert rows(browser, "reuse") == ["m-0 2 of 3", "128 128 0 178", "m-1 1 of 3", "128 0 128 178"]
    assert browser.run("return document.getElementById('said').textContent") == sentence
    assert browser.run("return document.activeElement.id") == "explain-ask"
    widths = browser.run(
        "return [...document.querySelectorAll('#reuse tr:first-child .split span')]"
        ".map((span) => [span.className, span.style.width])"
    )
    assert widths == [["local_pool", "29.49%"], ["disk", "29.49%"], ["", "29.49%"]], (
        "the picture is to scale"
    )


def test_a_plain_prompt(page: Any, stage: Stage) -> None:
    stage.share(two())
    stage.explanation = explained(tokens=9)
    browser = page()
    browser.find("#explain-text").send_keys("Once upon")
    browser.find("#explain-chat").send_keys(Keys.SPACE)
    browser.find("#explain-ask").click()
    browser.wait_text("#explained", "9 tokens are less than one chunk of 128")
    assert stage.posted == [("/v1/xavier/m/explain", {"prompt": "Once upon"})]
    stage.explanation = explained("", "", "")
    browser.find("#explain-ask").click()
    browser.wait_text("#explained", "No replica holds any of its 3 chunks")


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("auto", "A request would go to m-1 now, which would answer after about 450 ms."),
        ("off", "Requests go in turn. The first to answer would be m-1, after about 450 ms."),
    ],
)
def test_which_replica_would_answer_first(
    page: Any, stage: Stage, mode: str, sentence: str
) -> None:
    stage.share(two() | routing(mode=mode))
    forecasts = {
        "m-0": {"backlog": 1.8, "fetch": 0, "compute": 0.05},
        "m-1": {"backlog": 0.1, "fetch": 0.3, "compute": 0.05, "prefill": "m-2"},
    }
    stage.explanation = explained("ab", "a", "") | {"routing": forecasts}
    browser = page()
    browser.find("#explain-text").send_keys("What?")
    browser.find("#explain-ask").click()
    browser.wait_text("#first", sentence)
    assert rows(browser, "forecasts") == [
        "m-0 1.8 s 0 s 50 ms 1.9 s",
        "m-1",
        "prefilled by m-2",
        "100 ms 300 ms 50 ms 450 ms",
    ]
    assert browser.text("#forecasts [aria-current] th").split("\n")[0] == "m-1"


def test_explanations_that_fail(page: Any, stage: Stage) -> None:
    stage.share(two())
    stage.explanation = "no tokenizer here"
    browser = page()
    browser.find("#explain-ask").click()
    browser.wait_text("#explained", "Enter a prompt first.")
    assert stage.posted == []
    assert browser.run("return document.activeElement.id") == "explain-text"
    browser.find("#explain-text").send_keys("What?")
    browser.find("#explain-ask").click()
    browser.wait_text("#explained", "Failed: no tokenizer here")
    speak(browser, "zh")
    browser.wait_text("#explained", "操作失败：no tokenizer here")
    stage.may_change = False
    browser.find("#explain-ask").click()
    browser.wait_text("#explained", "需要 models:read 权限")


def test_typed_text_survives_updates(page: Any, stage: Stage) -> None:
    """Updates are notices, new figures, a lost connection and another model."""
    stage.share(two())
    stage.share(model(replica(0), replica(1), uid="other"))
    stage.explanation = explained("ab", "a", "")
    browser = page("m")
    browser.find("#explain-text").send_keys("What?")
    browser.find("#explain-ask").click()
    browser.find("#reuse")
    browser.find("#enabled").click()
    browser.wait_text("#hint", "Sharing is switched off")
    assert browser.find("#explain-text").get_property("value") == "What?"
    stage.stop()
    try:
        browser.find("#away")
        assert browser.find("#explain-text").get_property("value") == "What?"
    finally:
        stage.restart()
    stage.share(two())
    browser.wait_text("#live", "Live")
    browser.find("//nav//a[.='other']").click()
    browser.wait_text(".head h2", "other")
    assert browser.find("#explain-text").get_property("value") == "What?"
    assert not browser.has("#reuse"), "it was about the other model"


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
    assert browser.find("#enabled").get_attribute("aria-checked") == "true"


# For everybody


def test_light_dark_and_chinese_follow_xinference(page: Any, stage: Stage) -> None:
    stage.history = history(time.time())
    stage.share(two())
    browser = page()
    browser.wait_text("#live", "Live")
    browser.resize(TALL)
    stage.explanation = explained("ab", "a", "")
    browser.find("#explain-text").send_keys("Who of these people lives in Lisbon?")
    browser.find("#explain-ask").click()
    browser.find("#reuse")
    browser.screenshot("page-light")
    browser.find("#theme").click()
    browser.wait(
        lambda: browser.run("return localStorage.theme") == "dark", "the setting is stored"
    )
    speak(browser, "zh")
    browser.wait_text("h1", "KV 缓存共享")
    browser.screenshot("page-dark")
    browser.open(f"{stage.address}/launch-model/llm")
    browser.wait_text("nav", "启动模型")
    assert browser.run("return document.documentElement.classList.contains('dark')")
    browser.complaints()  # in dark mode, React logs errors even without us: the export is light


def test_on_a_phone(page: Any, stage: Stage, browser: Browser) -> None:
    """The page fits; wide tables scroll by themselves."""
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
        return [...document.querySelectorAll("#graph text, .plot svg text")].filter((text) =>
          text.textContent && text.getBoundingClientRect().height < 9).map((text) =>
          text.textContent);
        """
    )
    assert small == []


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


@pytest.mark.parametrize("code", LANGUAGES)
def test_it_speaks_the_language_of_xinferences_pages(page: Any, stage: Stage, code: str) -> None:
    """It is chosen there; this page only reads it, also when it changes in another tab."""
    stage.share(two())
    browser = page()
    speak(browser, code)
    browser.wait_text("h1", LANGUAGES[code]["page"]["title"])
    assert browser.run("return document.documentElement.lang") == code
    browser.find("#theme").click()
    browser.wait_text("#theme", LANGUAGES[code]["page"]["light"])
    assert browser.run("return localStorage.app_locale") == code
    assert browser.run("return document.cookie") == ""
