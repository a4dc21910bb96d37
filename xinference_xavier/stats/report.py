"""The shape in which a model's sharing is reported to people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xinference_xavier.stats.history import HIT_SOURCES


def report(status: Mapping[str, Any]) -> dict[str, Any]:
    """The tracker's status, one flat list of replicas with their statistics, and the sums.

    What a replica's statistics hold beyond the known fields is passed through; a replica that has
    not reported yet shows zeros.
    """
    replicas = [
        _replica(namespace, entry)
        for namespace, group in status["namespaces"].items()
        for entry in group["replicas"]
    ]
    replicas.sort(key=_by_name)
    totals = _counters()
    totals["holdings"] = 0
    for replica in replicas:
        _accumulate(totals, replica)
    return {
        "model_uid": status["model_uid"],
        "enabled": status["enabled"],
        "replicas": replicas,
        "totals": totals,
    }


def _by_name(replica: Mapping[str, Any]) -> tuple[int, str, str]:
    """m-2 before m-10."""
    name = str(replica.get("replica", ""))
    return len(name), name, replica["incarnation"]


def _counters() -> dict[str, Any]:
    return {
        "hits": dict.fromkeys(HIT_SOURCES, 0),
        "bytes_received": 0,
        "bytes_sent": 0,
        "fetches": {"started": 0, "committed": 0, "rolled_back": {}},
        "requests": 0,
        "seconds_saved": 0,
    }


def _replica(namespace: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    membership = {name: value for name, value in entry.items() if name != "stats"}
    return {
        **_counters(),
        "received_from": {},
        "fetching": {},
        "prefill_tokens_per_s": None,
        "vllm": None,
        "pool": {},
        "stale": False,
        **entry["stats"],
        **membership,
        "namespace": namespace,
    }


def _accumulate(totals: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add up what ``totals`` counts already; below ``rolled_back`` every reason counts."""
    for name, value in totals.items():
        other = part.get(name)
        if name == "rolled_back" and isinstance(other, Mapping):
            for reason, count in other.items():
                value[reason] = value.get(reason, 0) + count
        elif isinstance(value, dict) and isinstance(other, Mapping):
            _accumulate(value, other)
        elif isinstance(value, (int, float)) and isinstance(other, (int, float)):
            totals[name] = value + other
