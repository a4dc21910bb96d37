"""Reports as `GET /v1/xavier/{model_uid}` returns them, with realistic figures."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from xinference_xavier.stats.report import read, report
from xinference_xavier.stats.schema import Counters, FirstTokens, RoutingStats

ROW_BYTES = 2 << 20
POOL = {
    "rows": 256,
    "ready": 120,
    "filling": 4,
    "pinned": 9,
    "quarantined": 1,
    "row_bytes": ROW_BYTES,
    "cache_rows": 256,
}
HITS = {
    "prefix_cache": 12_000,
    "local_pool": 8_000,
    "disk": 0,
    "remote": 20_000,
    "computed": 40_000,
}


def replica(
    number: int, *, received: Mapping[str, int] | None = None, **more: Any
) -> dict[str, Any]:
    """The tracker's entry for replica `number` of model `m`."""
    received = dict(received or {})
    stats = {
        "hits": HITS,
        "bytes_received": sum(received.values()),
        "received_from": received,
        "fetching": {},
        "fetches": {"started": 12, "committed": 10, "rolled_back": {"timeout": 2}},
        "pool": POOL,
        "requests": 40,
        "transport": "shared_memory",
        "prefill_tokens_per_s": 2_400.0,
        "vllm": "0.32.0",
        "seconds_saved": 11.7,
    }
    return {
        "incarnation": incarnation(number),
        "replica": f"m-{number}",
        "address": f"10.0.0.{number + 1}:40001",
        "holdings": 119,
        "stats": {**stats, **more},
    }


def routing(**more: Any) -> dict[str, Any]:
    """What a process that routes knows of the two replicas of model `m`."""
    stats = {
        "mode": "auto",
        "loads": {
            "m-0": {"backlog_s": 0.05, "requests": 1, "accepts": True},
            "m-1": {"backlog_s": 12.0, "requests": 3, "accepts": True},
        },
        "choices": {"local": 30, "fetch": 6, "backlog": 4},
        "replicas": {"m-0": 30, "m-1": 10},
        "waited": 4,
        "waited_s": 3.0,
    }
    counted = read(RoutingStats, stats | more)
    for number in range(20):
        counted.answered("local", predicted=0.04, actual=0.3 if number == 19 else 0.04)
    return {"routing": asdict(counted)}


def incarnation(number: int) -> str:
    return f"{number:08x}-engine"


def model(
    *replicas: dict[str, Any], uid: str = "m", enabled: bool = True, apart: bool = False
) -> dict[str, Any]:
    """The report of these replicas, in one namespace or each in its own."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, known in enumerate(replicas):
        groups.setdefault(f"ns{number if apart else 0}", []).append(known)
    namespaces = {name: {"replicas": members} for name, members in groups.items()}
    return report({"model_uid": uid, "enabled": enabled, "namespaces": namespaces})


def sample(time: float, **counted: Any) -> dict[str, Any]:
    return {"time": time, **asdict(read(Counters, counted))}


def history(until: float, minutes: int = 55) -> dict[str, Any]:
    """Samples every 10 s until `until` (seconds since 1970), of a load that comes and goes. The
    pool of a replica is asked for nothing in the last half hour."""
    samples: list[dict[str, Any]] = []
    hits = dict.fromkeys(HITS, 0.0)
    received = committed = rolled_back = 0.0
    first_tokens = FirstTokens()
    for step in range(minutes * 6):
        load = 1.2 + math.sin(step / 21) + 0.3 * math.sin(step / 3.1)
        warm = min(1.0, step / 120)
        hits["prefix_cache"] += 900 * load * warm
        hits["local_pool"] += 500 * load * warm
        hits["remote"] += 1400 * load * warm
        hits["computed"] += 2600 * load * (1.15 - 0.7 * warm)
        received += 1400 * load * warm / 128 * ROW_BYTES
        committed += 0.9 * load * warm
        rolled_back += 0.4 if step % 97 < 3 else 0
        first_tokens.prefix_cache.observe(0.03)
        first_tokens.remote.observe(0.15 + 0.1 * load)
        first_tokens.computed.observe(1.0 + 2 * load)
        if step < minutes * 3:
            first_tokens.local_pool.observe(0.08)
        samples.append(
            sample(
                until - 10 * (minutes * 6 - 1 - step),
                hits={name: round(tokens) for name, tokens in hits.items()},
                first_tokens=asdict(first_tokens),
                bytes_received=round(received),
                fetches={
                    "committed": round(committed),
                    "rolled_back": {"any": round(rolled_back)},
                },
            )
        )
    return {"interval_s": 10, "samples": samples}


def named_prefix(name: str) -> dict[str, Any]:
    """One that `m-0` keeps."""
    copy = {"tokens": 1000, "chunks": 7, "held": 7, "firm": False}
    now = time.time()
    return {
        "name": name,
        "state": "kept",
        "reason": "",
        "tokens": 1000,
        "chunks": 7,
        "replicas": {"m-0": copy},
        "ttl": 19_800.0,
        "copies": 1,
        "retention": "soft",
        "created": now,
        "used": now,
        "expires": now + 19_800.0,
    }
