"""The classes that vLLM loads by the names in its ``kv_transfer_config``.

A model's environment may hold any vLLM. One that is too old is refused here, before our modules
import what it may lack, and a newer one than we have tested if it lacks what we use. The connector
then asks whether a newer one was allowed.
"""

from __future__ import annotations

import importlib
from typing import Any

from xinference_xavier import vllm_versions

_MODULES = {"XavierConnector": "connector", "XavierSpec": "spec"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    version = getattr(vllm, "__version__", "dev")
    vllm_versions.check(version, untested=True)
    if vllm_versions.is_newer(version):
        _check_seam(version)
    return getattr(importlib.import_module(f"xinference_xavier.engine.{_MODULES[name]}"), name)


def _check_seam(version: str) -> None:
    """Raises ConfigError if this vLLM lacks what we use."""
    try:
        from xinference_xavier.engine.seam import faults
    except ImportError as error:
        raise vllm_versions.refusal(version, f"lacks what sharing uses ({error})") from error
    if found := faults():
        raise vllm_versions.refusal(version, f"differs where sharing meets it ({found[0]})")
