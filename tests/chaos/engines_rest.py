"""What must be true of replicas under xinference at rest, after the model and after the cluster."""

from collections.abc import Iterable
from typing import Any

import psutil
import xoscar

from examples.local_cluster import Leftovers
from examples.processes import alive, until
from tests.chaos.engines_fleet import Fleet
from tests.chaos.engines_kinds import EFFECT_TIME, Scene
from tests.chaos.report import Leaks, Report
from tests.faults import Order, withdraw
from tests.harness.processes import ReplicaProcesses, is_transfer, mapped_regions

REST_TIME = 60.0
"""Seconds for requests to end, grants to expire and slow processes to exit."""


def come_to_rest(scene: Scene, report: Report) -> None:
    """Stop sending requests and look until nothing is left of the earlier ones, or time is up."""
    for fault in Order:
        withdraw(scene.orders, fault)
    scene.traffic.pause()
    if not until(lambda: scene.traffic.in_flight == 0, REST_TIME):
        report.problems.append(f"{scene.traffic.in_flight} requests have not ended")
    looks = scene.fleet.looks + 1
    until(lambda: scene.fleet.looks > looks, EFFECT_TIME)
    until(lambda: leaks_of(scene) == Leaks() and not _wrong(scene.fleet), REST_TIME)
    report.leaks = leaks_of(scene)
    report.problems += _wrong(scene.fleet)


def leaks_of(scene: Scene) -> Leaks:
    fleet = scene.fleet
    stats = [fleet.figures[replica.incarnation] for replica in fleet.up()]
    everything = scene.cluster.processes()
    regions = mapped_regions(everything)
    transfers = [process for process in everything if is_transfer(process)]
    return Leaks(
        grants=sum(figures["grants"] for figures in stats),
        filling=_sum(stats, "pool", "filling"),
        pinned=_sum(stats, "pool", "pinned"),
        quarantined=_sum(stats, "pool", "quarantined"),
        bytes=sum(size for inode, size in regions.items() if inode in fleet.dead_regions),
        processes=len(_alive(fleet.dead)) + abs(len(transfers) - len(fleet.up())),
    )


def _sum(stats: list[dict[str, Any]], part: str, name: str) -> int:
    return sum(figures[part][name] for figures in stats)


def _alive(families: Iterable[ReplicaProcesses]) -> list[psutil.Process]:
    return [process for family in families for process in alive(family.all())]


def _wrong(fleet: Fleet) -> list[str]:
    """The members are the replicas that are up, and no fetch ended in an internal error."""
    found = []
    up = {replica.incarnation for replica in fleet.up()}
    if set(fleet.members) != up:
        found.append(f"members are {sorted(fleet.members)}, replicas {sorted(up)}")
    if errors := fleet.rollbacks()["internal error"]:
        found.append(f"{errors} fetches ended in an internal error")
    return found


def look_after_terminate(scene: Scene, report: Report) -> None:
    """Count a tracker and processes of the model as leaks."""
    families = [replica.processes for replica in scene.fleet.up()] + scene.fleet.dead

    until(lambda: not _alive(families), REST_TIME)
    report.leaks.processes += len(_alive(families))
    report.leaks.bytes += sum(mapped_regions(scene.cluster.processes()).values())

    async def exists() -> bool:
        try:
            await scene.fleet.tracker()
        except xoscar.ActorNotExist:
            return False
        return True

    report.leaks.actors += scene.await_(exists(), EFFECT_TIME)


def look_after_stop(leftovers: Leftovers, report: Report) -> None:
    report.leaks.processes += len(leftovers.processes)
    report.leaks.shared_memory += len(leftovers.segments)
