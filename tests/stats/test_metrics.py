"""A field names the metric that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from xinference_xavier.stats.schema import metric, shown_as


@dataclass
class Stats:
    calls: int = metric("calls_total", "Calls.")
    speed: float | None = metric("speed", "Speed.", default=None)


def test_a_field_has_its_default_and_its_metric() -> None:
    assert Stats() == Stats(0, None)
    shown = [dict(each.metadata) for each in fields(Stats)]
    assert shown == [shown_as("calls_total", "Calls."), shown_as("speed", "Speed.")]


def test_an_object_may_be_shown_as_one_series_per_field() -> None:
    assert shown_as("calls_total", "Calls.")["label"] == ""
    assert shown_as("calls_total", "Calls.", label="way")["label"] == "way"
