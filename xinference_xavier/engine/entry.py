"""The classes that vLLM loads by the names in its ``kv_transfer_config``.

A model's environment may hold any vLLM. An untested version is refused here, before our modules
import what it may lack.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from xinference_xavier.errors import ConfigError

OLDEST, NEWEST = (0, 31), (0, 33)
"""Both are supported; `make test-matrix` tests all versions between them."""
_AFTER = (NEWEST[0], NEWEST[1] + 1)
_MODULES = {"XavierConnector": "connector", "XavierSpec": "spec"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    return getattr(importlib.import_module(f"xinference_xavier.engine.{_MODULES[name]}"), name)


def check_version() -> None:
    """Raises ConfigError for a vLLM that is too old or too new.

    Accepts a build from a working tree, which may have any version, or none.
    """
    import vllm

    version = getattr(vllm, "__version__", "dev")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if "dev" in version or numbers is None:
        return
    if not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        raise ConfigError(
            "vllm",
            version,
            f"is what this model's environment has, and sharing needs {_name(OLDEST)} to "
            f"{_name(NEWEST)}",
            f"launch with virtual_env_packages=['vllm>={_name(OLDEST)},<{_name(_AFTER)}'], or "
            "without enable_xavier",
        )


def _name(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
