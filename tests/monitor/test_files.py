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
    if family.figure.kind == "histogram"
    for part in ("_bucket", "_sum", "_count")
}
ROW = re.compile(rf"^\| `({PREFIX}\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$", re.MULTILINE)


def named(text: str) -> set[str]:
    return set(re.findall(rf"{PREFIX}\w+", text))


def test_names_follow_the_conventions_of_prometheus() -> None:
    for family in FAMILIES:
        figure = family.figure
        assert family.name.endswith("_total") == (figure.kind == "counter"), family.name
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name)
        assert figure.text.endswith(".")
        unit = family.name.removesuffix("_total").rpartition("_")[2]
        assert figure.unit == (unit if unit in ("bytes", "seconds") else ""), family.name
    assert len(KNOWN) == len(FAMILIES)


def test_the_site_lists_each_metric_with_its_type_and_labels() -> None:
    assert "\n{{ metrics }}\n" in DOCUMENT.read_text()
    substitutions = runpy.run_path(str(DOCUMENT.with_name("conf.py")))["myst_substitutions"]
    rows = ROW.findall(substitutions["metrics"])
    assert rows == [
        (
            f"{PREFIX}{family.name}",
            family.figure.kind,
            ", ".join(f"`{label}`" for label in family.labels),
            family.figure.text,
        )
        for family in FAMILIES
    ]


def test_every_label_is_explained() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", DOCUMENT.read_text().partition("| label |")[2], re.M)
    explained = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(explained) == sorted({label for family in FAMILIES for label in family.labels})


def test_the_document_names_no_other_metrics() -> None:
    assert named(DOCUMENT.read_text()) <= SERIES


def test_the_dashboard_shows_metrics_that_exist_and_the_benefit_first() -> None:
    assert named(DASHBOARD.read_text()) <= SERIES
    first, *_ = queries()
    assert "prompt_tokens_total" in first.expression


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
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert alert["annotations"]["summary"]


def test_each_alert_leads_to_the_section_that_says_what_to_do() -> None:
    described = re.findall(r"^### (Xavier\w+)$", DOCUMENT.read_text(), re.M)
    assert described == [alert["alert"] for alert in alerts()]
    page = DOCUMENT.with_suffix(".html").name
    for alert in alerts():
        assert alert["annotations"]["runbook_url"] == f"{page}#{alert['alert'].lower()}"


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
        assert {target["refId"] for target in panel["targets"]} <= set("ABCDEF")
    for one, other in combinations([panel["gridPos"] for panel in everything], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"{one} and {other} overlap"


def test_every_query_can_be_filled_in() -> None:
    filled = [query.filled_in() for query in queries()]
    assert len(set(filled)) == len(filled)
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "model", "replica"}
