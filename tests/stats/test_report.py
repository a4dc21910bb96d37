"""A report has what replicas say of themselves, of this version or a newer one."""

from __future__ import annotations

from xinference_xavier.stats.report import report


def test_what_a_replica_reports_beyond_the_known_is_passed_on() -> None:
    entry = {"incarnation": "a", "holdings": 0, "stats": {"colour": "red", "incarnation": "liar"}}
    status = {"model_uid": "m", "enabled": True, "namespaces": {"ns": {"replicas": [entry]}}}
    (replica,) = report(status)["replicas"]
    assert replica["colour"] == "red"
    assert replica["incarnation"] == "a"
