"""A cluster without requests takes next to no processor time, whatever happened before."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from examples.local_cluster import LocalCluster
from tests.e2e.conftest import ROOT
from tests.e2e.model import Model
from tests.harness import processes

pytestmark = pytest.mark.long

UID = "idle"
CANCELLED = 1000
AT_A_TIME = 20
WINDOW = 60.0  # seconds in which processor time is counted
QUIET = 0.05  # of a core, for each process


async def ask_and_leave(endpoint: str, times: int) -> None:
    """Ask for reports without waiting for them; some calls to the tracker are cancelled."""

    async def asker(client: httpx.AsyncClient) -> None:
        for _ in range(times // AT_A_TIME):
            with suppress(httpx.TimeoutException):
                await client.get(f"/v1/xavier/{UID}", timeout=0.02)

    async with httpx.AsyncClient(base_url=endpoint) as client:
        await asyncio.gather(*(asker(client) for _ in range(AT_A_TIME)))


def shares_of_a_core(running: list[psutil.Process]) -> dict[str, float]:
    """Each process's share of a core while there are no requests."""
    before = {process: sum(process.cpu_times()[:2]) for process in running}
    threading.Event().wait(WINDOW)
    return {
        f"{process.pid} {' '.join(process.cmdline())[:60]}": (
            sum(process.cpu_times()[:2]) - seconds
        )
        / WINDOW
        for process, seconds in before.items()
        if process.is_running()
    }


def test_after_cancelled_calls_lost_replicas_and_terminated_models(
    model_folder: Path, record_property: Callable[[str, object], None]
) -> None:
    log = ROOT / "build" / "test-idle.log"
    with LocalCluster(log, host="0.0.0.0", environment={"PYTHONPATH": str(ROOT)}) as cluster:
        cluster.register(model_folder, "small")
        model = Model(cluster, UID)
        model.launch()
        asyncio.run(ask_and_leave(cluster.endpoint, CANCELLED))

        lost = model.replicas()[model.first]["incarnation"]
        processes.kill(processes.of_replica(model.first).model)
        model.wait_until_sharing(without=lost)  # xinference has started it again
        Model(cluster, "terminated").launch(replica=1)
        cluster.terminate("terminated")

        shares = shares_of_a_core(cluster.processes())
        record_property("shares of a core", shares)
        assert {name: share for name, share in shares.items() if share >= QUIET} == {}
