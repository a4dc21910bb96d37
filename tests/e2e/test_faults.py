"""Faults under xinference: each ends in the right answer, within its deadline, and is counted."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from xinference.client import Client

from examples.local_cluster import Completion, LocalCluster
from tests.e2e.asking import CHUNK, published, question
from tests.e2e.conftest import ARGUMENTS, can_fetch, wait_until
from tests.faults import CORRUPT_ROW, Fault

UID = "faults"
TIMEOUT = 5.0  # xavier_fetch_timeout's default


@pytest.fixture(scope="module")
def model(cluster: LocalCluster) -> Iterator[LocalCluster]:
    transport = "tests.faults:ScriptedGloo"
    launch_by_python_client(cluster, xavier_transport=transport)
    wait_until(lambda: can_fetch(cluster, UID, 2), "both replicas can fetch")
    yield cluster
    cluster.terminate(UID)


def launch_by_python_client(cluster: LocalCluster, **options: Any) -> None:
    """Launch with xinference's Python client, as the README does; other modules use other ways."""
    Client(cluster.endpoint).launch_model(
        model_name="small",
        model_uid=UID,
        model_engine="vLLM",
        model_format="pytorch",
        quantization="none",
        model_size_in_billions=1,
        replica=2,
        n_gpu=None,
        enforce_eager=True,
        tensor_parallel_size=1,
        **ARGUMENTS,
        **options,
    )
    cluster.wait_ready(UID, 2)


def totals(cluster: LocalCluster) -> dict[str, Any]:
    answer: dict[str, Any] = cluster.xavier(UID)["totals"]
    return answer


def test_a_damaged_byte_is_noticed_and_the_answer_is_right(
    model: LocalCluster, fault: Path
) -> None:
    _, cold = published(model, UID, lambda: model.complete(UID, question(200)))
    fault.write_text(Fault.CORRUPT)
    try:
        answer = model.complete(UID, question(200))
    finally:
        fault.write_text(Fault.NONE)
    assert answer.tokens == cold.tokens
    assert answer.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
    after = totals(model)
    assert after["fetches"]["rolled_back"] == {"checksum": 1}
    assert after["hits"]["remote"] == CORRUPT_ROW * CHUNK  # the rows before the damaged one count


def test_a_donor_killed_while_it_serves_costs_a_recomputation(
    model: LocalCluster, fault: Path
) -> None:
    """Last in this module, because it costs a replica."""
    donor, cold = published(model, UID, lambda: model.complete(UID, question(201)))
    engine = psutil.Process(model.members(UID)[donor]["transfer_pid"]).parent()
    assert engine is not None
    fault.write_text(Fault.STALL)
    answers: list[Completion] = []
    asking = threading.Thread(target=lambda: answers.append(model.complete(UID, question(201))))
    begun = totals(model)["fetches"]["started"]
    began = time.monotonic()
    try:
        asking.start()
        wait_until(lambda: totals(model)["fetches"]["started"] > begun, "the fetch is under way")
        engine.send_signal(signal.SIGKILL)
        asking.join()
    finally:
        fault.write_text(Fault.NONE)
    seconds = time.monotonic() - began
    assert answers[0].tokens == cold.tokens
    assert seconds < TIMEOUT + 10 * cold.seconds  # decided by the deadline, then computed
    rolled_back = [r["fetches"]["rolled_back"] for r in model.xavier(UID)["replicas"]]
    assert any(sum(reasons.values()) > reasons.get("checksum", 0) for reasons in rolled_back)
