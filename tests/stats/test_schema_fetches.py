"""Each fetch is counted once, by how it ended."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import asdict
from typing import Any

from xinference_xavier.errors import ROLLBACKS
from xinference_xavier.replica import donor, fetcher, transfer_process
from xinference_xavier.stats.schema import FetchStats
from xinference_xavier.transfer import receiver
from xinference_xavier.transfer.receiver import ChecksumError


def told(*ended: tuple[str | None, float, int]) -> dict[str, Any]:
    stats = FetchStats()
    for reason, seconds, size in ended:
        stats.ended(reason, seconds, size)
    as_told: dict[str, Any] = json.loads(json.dumps(asdict(stats)))
    return as_told


def test_time_by_outcome() -> None:
    seconds = told((None, 0.5, 1), (None, 0.25, 1), ("timeout", 5.0, 0))["seconds"]
    assert {outcome: sum(seen["counts"]) for outcome, seen in seconds.items()} == {
        "committed": 2,
        "rolled_back": 1,
    }
    assert {outcome: seen["sum"] for outcome, seen in seconds.items()} == {
        "committed": 0.75,
        "rolled_back": 5.0,
    }


def test_size_of_what_came_whether_all_of_it_did_or_not() -> None:
    size = told((None, 1.0, 100), ("link", 1.0, 50), ("link", 1.0, 0))["bytes"]
    assert (sum(size["counts"]), size["sum"]) == (2, 150)


def test_reasons() -> None:
    assert told((None, 1.0, 1), ("link", 1.0, 0), ("link", 1.0, 0))["reasons"] == {"link": 2}


_BEFORE = r"GrantRefusedError\(|PullResult\(0, |_finish\(fetch, |reason(?:: [^=]+)? = |else "
REASON = re.compile(rf'(?:{_BEFORE})"([a-z ]+)"')


def test_every_reason_is_one_that_metrics_know() -> None:
    """Another would be shown as "other"."""
    given = {
        reason
        for module in (fetcher, receiver, transfer_process, donor)
        for reason in REASON.findall(inspect.getsource(module))
    } | {receiver._reason(error) for error in (ChecksumError(), TimeoutError(), OSError())}
    assert {"timeout", "checksum", "busy", "stopped", "donor gone", "refused", "link"} <= given
    assert given <= set(ROLLBACKS)
