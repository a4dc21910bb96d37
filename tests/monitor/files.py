"""The files of `monitor/`, parsed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "monitor"
DASHBOARD = FOLDER / "grafana-dashboard.json"
ALERTS = FOLDER / "alerts.yml"
PROMETHEUS = FOLDER / "prometheus.yml"
DOCUMENT = ROOT / "docs" / "monitoring.md"


class Query(NamedTuple):
    panel: str
    expression: str

    def filled_in(self) -> str:
        """The query as Grafana sends it, for all models and replicas, with short windows."""
        expression = self.expression
        for name, value in {
            "$__rate_interval": "10s",
            "$__range": "30s",
            "$model": ".*",
            "$replica": ".*",
        }.items():
            expression = expression.replace(name, value)
        assert "$" not in expression, f"{self.panel}: {expression}"
        return expression.replace("[5m]", "[10s]")


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel["targets"]:
            yield Query(panel["title"], target["expr"])


def alerts() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
