"""What must be true of a cluster at rest: without faults or requests, after a moment to settle."""

import os
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from examples.processes import until
from tests.chaos import disk
from tests.chaos.cluster import Cluster
from tests.chaos.node import Node
from tests.chaos.report import Leaks
from tests.faults import Order
from tests.harness.processes import is_transfer, mapped_regions
from xinference_xavier.protocol.tracker import SHORT_KEY
from xinference_xavier.transfer.transports.gloo import MAX_WITHDRAWN

REST_TIME = 20.0
"""Seconds: grants expire after two fetch timeouts, leases after one lease."""
DEFAULT_EXECUTOR = min(32, (os.cpu_count() or 1) + 4)
"""Threads of an event loop's default executor, which starts them on demand and keeps them: a
process may have this many more than after its warm-up."""
LOST_SOCKETS = 2 * MAX_WITHDRAWN
"""Sockets that two Gloo devices may keep of links that failed."""
SECOND_DEVICE = 5
"""Descriptors of one more Gloo device, which also has one more thread."""
RSS_GROWTH = 96 << 20
"""Bytes by which a process's memory may grow: its statistics, its caches and its pool's pages."""


class Size(NamedTuple):
    """The sizes of a replica's two processes."""

    engine_threads: int
    engine_descriptors: int
    engine_rss: int
    transfer_threads: int
    transfer_descriptors: int
    names: str
    """The threads, connections and files of both."""


class Findings(NamedTuple):
    problems: list[str]
    leaks: Leaks
    sizes: dict[str, Size]


def come_to_rest(cluster: Cluster, before: dict[str, Size] | None = None) -> Findings:
    """Pause all requests and look until everything is right, or time is up.

    `before` are the sizes after the warm-up, which no process may exceed.
    """
    problems = _deaths(cluster) or _end_requests(cluster)
    if problems:
        return Findings(problems, Leaks(), {})
    for node in cluster.nodes.values():
        node.call("flush")
    found = _look(cluster, before)
    deadline = time.monotonic() + REST_TIME
    # Slow processes get time; a permanent fault is still there afterwards.
    while (found.problems or found.leaks != Leaks()) and time.monotonic() < deadline:
        threading.Event().wait(0.3)
        found = _look(cluster, before)
    found.problems.extend(f"the hard name {lost}" for lost in cluster.names.missing())
    return found


def _deaths(cluster: Cluster) -> list[str]:
    """A scheduler that died answers no command."""
    return [
        f"the scheduler of {node.incarnation} died: {_last_line(node.folder / 'died')}"
        for node in cluster.everybody()
        if (node.folder / "died").exists()
    ]


def _end_requests(cluster: Cluster) -> list[str]:
    for node in cluster.nodes.values():
        node.call("pause", True)
    busy = [
        node.incarnation
        for node in cluster.nodes.values()
        if not until(lambda node=node: node.call("is_idle"), REST_TIME)  # type: ignore[misc]
    ]
    return [f"{incarnation} still has requests" for incarnation in busy]


def _look(cluster: Cluster, before: dict[str, Size] | None = None) -> Findings:
    nodes = cluster.nodes.values()
    audits = {node.incarnation: node.call("audit") for node in nodes}
    problems = [
        *_about_rows(audits),
        *_about_membership(cluster, audits),
        *_about_indexes(audits),
        *_about_neighbours(cluster, audits),
        *_about_causes(cluster),
    ]
    sizes = {node.incarnation: _size(node, audits[node.incarnation]) for node in nodes}
    leaks = Leaks(
        grants=sum(audit["grants"] for audit in audits.values()),
        filling=sum(audit["filling"] for audit in audits.values()),
        pinned=sum(audit["pinned"] for audit in audits.values()),
        quarantined=sum(audit["quarantined"] for audit in audits.values()),
        bytes=_bytes_of_the_dead(cluster),
        processes=_strange_processes(cluster),
        shared_memory=sum(_shared_memory(pid) for pid in _pids(cluster)),
        actors=len(cluster.tracker.call("actors")) - 1,
    )
    if before:
        problems += _growth(before, sizes, leaks)
    return Findings(problems, leaks, sizes)


def _about_rows(audits: dict[str, Any]) -> list[str]:
    found = []
    for incarnation, audit in audits.items():
        if audit["wrong_rows"]:
            found.append(f"{incarnation} holds {audit['wrong_rows']} rows with wrong bytes")
        if audit["tasks"]:
            found.append(f"{audit['tasks']} tasks of {incarnation}'s fetches have not ended")
    return found


def _about_membership(cluster: Cluster, audits: dict[str, Any]) -> list[str]:
    found = []
    members = set().union(*cluster.members().values())
    if members != set(audits):
        found.append(f"members are {sorted(members)}, replicas {sorted(audits)}")
    for incarnation, audit in audits.items():
        if not audit["connected"]:
            found.append(f"{incarnation} has no tracker")
        if audit["namespace"] != f"namespace@{cluster.weights}":
            found.append(f"{incarnation} is in {audit['namespace']}, not that of the weights")
        if audit["peers"] != set(audits) - {incarnation}:
            found.append(f"{incarnation} knows the peers {sorted(audit['peers'])}")
        if audit["serving"] != audit["peers"]:
            found.append(f"{incarnation} would ask none but {sorted(audit['serving'])}")
    return found


def _about_indexes(audits: dict[str, Any]) -> list[str]:
    """Each index must have the other replicas' holdings."""
    held = {name: {key[-SHORT_KEY:] for key in audit["held"]} for name, audit in audits.items()}
    found = []
    for incarnation, audit in audits.items():
        for other in audits.keys() - {incarnation}:
            if wrong := len(held[other] ^ audit["listed"].get(other, set())):
                found.append(f"the index of {incarnation} is wrong about {wrong} chunks")
    return found


def _about_neighbours(cluster: Cluster, audits: dict[str, Any]) -> list[str]:
    found = []
    for incarnation, audit in audits.items():
        if audit["lent"]:
            found.append(f"{incarnation} has {audit['lent']} rows that are lent to it")
        if audit["mapped"] != cluster.neighbours(incarnation):
            found.append(f"{incarnation} has mapped {sorted(audit['mapped'])}")
    return found


def _about_causes(cluster: Cluster) -> list[str]:
    """Nothing may be rolled back, expire or die without a fault that explains it."""
    found = _deaths(cluster)
    if lost := cluster.total(lambda figures: figures["lost_chunks"]):
        found.append(f"{lost} chunks of hard names were evicted")
    found += [f"{name} expired but was never absent" for name in cluster.unexplained_expiries()]
    found += [
        f"{node.incarnation} ended by itself ({node.process.exitcode})"
        for node in cluster.nodes.values()
        if not node.process.is_alive()
    ]
    rollbacks, happened = cluster.rollbacks(), cluster.taken()
    damages = happened[Order.DAMAGE] + happened[Order.SWAP]
    # A replica that leaves its peers, or believes them gone, revokes its grants: it may reuse the
    # slots while rows are under way, and the checksum catches it.
    excused = cluster.partings * len(cluster.nodes)
    if rollbacks["checksum"] > damages + excused:
        found.append(f"{rollbacks['checksum']} rows arrived damaged, {damages} were damaged")
    of_disk = disk.rollbacks(cluster)
    if of_disk["checksum"] and not cluster.damaged_disks and not cluster.dead:
        found.append(f"{of_disk['checksum']} rows on the disk were damaged, but nobody did it")
    if rollbacks["internal error"] + of_disk["internal error"]:
        found.append(f"{rollbacks['internal error']} fetches ended in an internal error")
    return found


def _last_line(path: Path) -> str:
    return path.read_text().strip().rpartition("\n")[2]


def _size(node: Node, audit: dict[str, Any]) -> Size:
    transfer = node.transfer()
    both = [psutil.Process(node.pid), *([] if transfer is None else [transfer])]
    return Size(
        len(audit["threads"]),
        audit["descriptors"],
        audit["rss"],
        transfer.num_threads() if transfer is not None else 0,
        transfer.num_fds() if transfer is not None else 0,
        "; ".join(map(_names, both)),
    )


def _names(process: psutil.Process) -> str:
    """Threads, connections and files."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/comm")
    names = Counter(comm.read_text().strip() for comm in threads)
    connections = process.net_connections("all")
    names.update(f"{each.type.name} {each.status}" for each in connections)
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            names[descriptor.readlink().name.partition(":")[0]] += 1
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))


def _growth(before: dict[str, Size], after: dict[str, Size], leaks: Leaks) -> list[str]:
    """Count in `leaks` the threads and descriptors above the largest size after the warm-up."""
    most = Size(*map(max, zip(*before.values(), strict=True)))
    problems = []
    for incarnation, now in after.items():
        threads = max(0, now.engine_threads - most.engine_threads - DEFAULT_EXECUTOR) + max(
            0, now.transfer_threads - most.transfer_threads - DEFAULT_EXECUTOR - 1
        )
        descriptors = max(0, now.engine_descriptors - most.engine_descriptors) + max(
            0, now.transfer_descriptors - most.transfer_descriptors - SECOND_DEVICE - LOST_SOCKETS
        )
        leaks.threads += threads
        leaks.file_descriptors += descriptors
        if threads or descriptors:
            problems.append(f"{incarnation} has grown from at most {most} to {now}: {now.names}")
        if incarnation in before and now.engine_rss > before[incarnation].engine_rss + RSS_GROWTH:
            problems.append(f"the memory of {incarnation} has grown: {before[incarnation]}, {now}")
    return problems


def _pids(cluster: Cluster) -> list[int]:
    transfers = [node.transfer() for node in cluster.nodes.values()]
    return [
        *(node.pid for node in cluster.nodes.values()),
        *(transfer.pid for transfer in transfers if transfer is not None),
    ]


def _strange_processes(cluster: Cluster) -> int:
    """Each replica must have one child, its transfer process; the dead must have none."""
    strange = 0
    for node in cluster.nodes.values():
        strange += abs(len(psutil.Process(node.pid).children(recursive=True)) - 1)
    gone = {pid for node in cluster.dead for pid in cluster.transfer_pids.get(node.incarnation, ())}
    return strange + sum(
        process.pid in gone and is_transfer(process) for process in psutil.process_iter()
    )


def _shared_memory(pid: int) -> int:
    return sum("/dev/shm" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def _bytes_of_the_dead(cluster: Cluster) -> int:
    """Bytes of dead incarnations' regions that any process still maps."""
    dead = {cluster.regions[node.incarnation] for node in cluster.dead}
    regions = mapped_regions(psutil.process_iter())
    return sum(size for inode, size in regions.items() if inode in dead)
