"""Document, dashboard and alerts use the metrics that exist, and no others."""

import re
import runpy
from itertools import combinations

import yaml

from tests.monitor.files import DASHBOARD, DOCUMENT, alerts, dashboard, panels, queries
from xinference_xavier.serving.metrics import FAMILIES, PREFIX
from xinference_xavier.stats.schema import HIT_SOURCES

RULE_TESTS = "alerts_test.yml"
KNOWN = {f"{PREFIX}{family.name}" for family in FAMILIES}
SERIES = KNOWN | {
    f"{PREFIX}{family.name}{part}"
    for family in FAMILIES
    if family.kind == "histogram"
    for part in ("_bucket", "_sum", "_count")
}
ROW = re.compile(rf"^\| `({PREFIX}\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$", re.MULTILINE)


def named(text: str) -> set[str]:
    return set(re.findall(rf"{PREFIX}\w+", text))


def test_names_follow_the_conventions_of_prometheus() -> None:
    for family in FAMILIES:
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name)
        assert family.help.endswith(".")
        if family.kind == "histogram":
            assert family.name.endswith(("_seconds", "_bytes"))
    assert len(KNOWN) == len(FAMILIES)


def test_the_site_lists_each_metric_with_its_type_and_labels() -> None:
    assert "\n{{ metrics }}\n" in DOCUMENT.read_text()
    substitutions = runpy.run_path(str(DOCUMENT.with_name("conf.py")))["myst_substitutions"]
    rows = ROW.findall(substitutions["metrics"])
    assert rows == [
        (
            f"{PREFIX}{family.name}",
            family.kind,
            ", ".join(f"`{label}`" for label in family.labels),
            family.help,
        )
        for family in FAMILIES
    ]


def test_every_label_is_explained() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", DOCUMENT.read_text().partition("| label |")[2], re.M)
    explained = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(explained) == sorted({label for family in FAMILIES for label in family.labels})


def test_the_document_names_no_other_metrics() -> None:
    assert named(DOCUMENT.read_text()) <= SERIES


def test_the_dashboard_shows_all_metrics_and_no_others() -> None:
    shown = named(DASHBOARD.read_text())
    assert shown <= SERIES
    parts = re.compile(r"_(bucket|sum|count)$")
    assert {name if name in KNOWN else parts.sub("", name) for name in shown} == KNOWN


def test_sources_of_tokens_exist() -> None:
    asked = [query.expression for query in queries()] + [alert["expr"] for alert in alerts()]
    named = {source for each in asked for source in re.findall(r'source="(\w+)"', each)}
    assert {"remote", "computed"} <= named <= set(HIT_SOURCES)
    lines = DOCUMENT.read_text().splitlines()
    explained = next(line for line in lines if line.startswith("| `source`"))
    assert all(f"`{source}`" in explained for source in HIT_SOURCES)


def test_alerts_are_about_metrics_that_exist() -> None:
    for alert in alerts():
        assert named(alert["expr"])
        assert named(alert["expr"]) <= SERIES, alert["alert"]
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"]["summary"]


def test_the_document_says_what_to_do_about_each_alert() -> None:
    described = re.findall(r"\| `(Xavier\w+)` \|", DOCUMENT.read_text())
    assert sorted(described) == sorted(alert["alert"] for alert in alerts())


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    """promtool runs them, in `test_prometheus.py`."""
    tests = yaml.safe_load((DOCUMENT.parents[1] / "tests/monitor" / RULE_TESTS).read_text())
    seen = {
        (case["alertname"], bool(case["exp_alerts"]))
        for test in tests["tests"]
        for case in test["alert_rule_test"]
    }
    assert seen == {(alert["alert"], fires) for alert in alerts() for fires in (True, False)}


def test_every_panel_has_a_source_a_unit_and_a_place() -> None:
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"].endswith(".")
        assert {target["refId"] for target in panel["targets"]} <= set("ABCDE")
    for one, other in combinations([panel["gridPos"] for panel in everything], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"{one} and {other} overlap"


def test_every_query_can_be_filled_in() -> None:
    filled = [query.filled_in() for query in queries()]
    assert len(set(filled)) > 30
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "model", "replica"}
