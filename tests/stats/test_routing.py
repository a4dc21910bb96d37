"""The figures of routing: each request and each forecast counts once."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import asdict

from xinference_xavier.routing import choice
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import CHOICES, KnownLoad, ModelStatus, RoutingStats

STATUS = {"model_uid": "m", "enabled": True, "replicas": [], "totals": {}}


def test_requests_by_reason_and_by_replica() -> None:
    stats = RoutingStats()
    for reason, replica in (("local", "m-0"), ("local", "m-1"), ("backlog", "m-0")):
        stats.sent(reason, replica)
    assert stats.choices == {"local": 2, "backlog": 1}
    assert stats.replicas == {"m-0": 2, "m-1": 1}


def test_errors_of_forecasts_do_not_cancel_out() -> None:
    stats = RoutingStats()
    stats.answered(predicted=1.0, actual=3.0)
    stats.answered(predicted=4.0, actual=3.0)
    assert (stats.forecasts, stats.predicted_s, stats.actual_s, stats.error_s) == (2, 5.0, 6.0, 3.0)


def test_every_reason_of_a_choice_is_known() -> None:
    source = ast.parse(textwrap.dedent(inspect.getsource(choice._reason)))
    returned = [each.value for each in ast.walk(source) if isinstance(each, ast.Return)]
    texts = {each.value for value in returned if value for each in ast.walk(value)
             if isinstance(each, ast.Constant) and isinstance(each.value, str)}  # fmt: skip
    assert texts == set(CHOICES)


def test_a_client_reads_what_a_router_reports() -> None:
    stats = RoutingStats(mode="auto", loads={"m-0": KnownLoad(1.5, 3, False)}, waiting=2)
    stats.sent("fetch", "m-0")
    assert read(ModelStatus, STATUS | {"routing": asdict(stats)}).routing == stats


def test_a_server_that_does_not_route_has_no_mode() -> None:
    status = read(ModelStatus, STATUS)
    assert status.routing == RoutingStats()
    assert status.routing.mode == ""
