"""A model's status as people and programs get it: the tracker's, flattened and summed up."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from xinference_xavier.stats.reading import add, read
from xinference_xavier.stats.schema import ReplicaStats, Totals, TrackerStats


def report(status: Mapping[str, Any]) -> dict[str, Any]:
    """What `ModelStatus` is read from; `status` is the tracker's. JSON-able.

    A replica that has not reported yet shows zeros. What a newer one reports beyond `ReplicaStats`
    is passed through.
    """
    replicas = [
        _replica(namespace, entry)
        for namespace, group in status["namespaces"].items()
        for entry in group["replicas"]
    ]
    replicas.sort(key=_by_name)
    totals = Totals()
    for replica in replicas:
        add(totals, read(Totals, replica))
    return {
        "model_uid": status["model_uid"],
        "enabled": status["enabled"],
        "replicas": replicas,
        "totals": asdict(totals),
        "tracker": asdict(read(TrackerStats, status)),
    }


def _by_name(replica: Mapping[str, Any]) -> tuple[int, str, str]:
    """m-2 before m-10."""
    name = str(replica.get("replica", ""))
    return len(name), name, replica["incarnation"]


def _replica(namespace: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    stats = entry["stats"]
    return {
        "stale": False,
        **stats,
        **asdict(read(ReplicaStats, stats)),
        **{name: value for name, value in entry.items() if name != "stats"},
        "namespace": namespace,
    }
