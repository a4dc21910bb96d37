"""How much memory this host, or the cgroup this process lives in, can still give. Linux."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class _Controller(NamedTuple):
    """Where one cgroup version keeps its numbers, relative to the mount."""

    folder: str
    limit: str
    used: str
    reclaimable: str


_V2 = _Controller("", "memory.max", "memory.current", "inactive_file")
_V1 = _Controller("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory_bytes(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Bytes that may be taken before the host swaps or a cgroup limit kills."""
    free: int = psutil.virtual_memory().available
    for group, controller in _groups(cgroup_root, membership):
        left = _left_in(group, controller)
        if left is not None:
            free = min(free, left)
    return free


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, _Controller]]:
    """Our cgroup and all above it, up to the mount: each may have a limit of its own."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = ["0::/", "0:memory:/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            controller = _V2
        elif "memory" in controllers.split(","):
            controller = _V1
        else:
            continue
        mount = root / controller.folder
        relative = Path(path.lstrip("/"))
        # In a container the path may be the host's and not exist below our mount: its end does.
        yield mount, controller
        while relative != Path("."):
            yield mount / relative, controller
            relative = relative.parent


def _left_in(group: Path, controller: _Controller) -> int | None:
    """Bytes below the group's limit; None where it has none. Cache that can be dropped is free."""
    try:
        limit = (group / controller.limit).read_text().strip()
        used = int((group / controller.used).read_text())
        statistics = (group / "memory.stat").read_text()
    except OSError:
        return None
    if limit == "max":
        return None
    for line in statistics.splitlines():
        name, _, value = line.partition(" ")
        if name == controller.reclaimable:
            used -= int(value)
    return max(0, int(limit) - max(0, used))
