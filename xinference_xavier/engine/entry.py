"""What vLLM loads by name: a plugin, and the classes of its ``kv_transfer_config``.

vLLM calls the plugin (entry point `vllm.general_plugins`) in each of its processes, wherever this
package is installed. So where nothing is shared, it imports next to nothing.

A model's environment may hold any vLLM. One that is too old is refused here, before our modules
import what it may lack. The connector asks whether a newer one than we have tested was allowed.
"""

import importlib
import os
from typing import Any

from xinference_xavier import vllm_versions
from xinference_xavier.vllm_versions import SHARES, UNTESTED

_MODULES = {"XavierConnector": "connector", "XavierSpec": "spec"}


def install() -> None:
    """The plugin. Raises ConfigError if this process should share and its vLLM is not supported."""
    if (shares := os.environ.get(SHARES)) is None:
        return
    vllm_versions.check(_version(), untested=shares == UNTESTED)
    from xinference_xavier.engine.process import report_failed_starts

    report_failed_starts()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    vllm_versions.check(_version(), untested=True)
    return getattr(importlib.import_module(f"xinference_xavier.engine.{_MODULES[name]}"), name)


def _version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "dev"))
