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
    try:
        module = importlib.import_module(f"xinference_xavier.engine.{_MODULES[name]}")
        faults = _faults() if vllm_versions.is_newer(version) else []
    except ImportError as error:
        raise vllm_versions.refusal(version, f"lacks what sharing uses ({error})") from error
    if faults:
        raise vllm_versions.refusal(version, f"differs where sharing meets it ({faults[0]})")
    return getattr(module, name)


def _faults() -> list[str]:
    from xinference_xavier.engine.seam import faults

    return faults()
