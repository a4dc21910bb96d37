"""The one thing serving hands to the engine: vLLM's ``kv_transfer_config`` dictionary.

xinference logs it, keeps it with the launch arguments and replays it, to the same worker or
another, for crash recovery, restarts and added replicas. So it holds no secret, and what depends on
the worker is decided anew at every launch, always from what the supervisor wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xinference_xavier.config import XAVIER, XavierConfig, default_pool_bytes
from xinference_xavier.runtime.addresses import reachable_address

CONNECTOR = "XavierConnector"
_MODULE = "xinference_xavier.engine.entry"
_EXTRA = "kv_connector_extra_config"
_AS_LAUNCHED = "xavier_as_launched"


def kv_transfer_config(config: XavierConfig) -> dict[str, Any]:
    """What makes vLLM load our connector and offloading spec with this configuration."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": _MODULE,
        "kv_role": "kv_both",
        _EXTRA: {
            "spec_name": "XavierSpec",
            "spec_module_path": _MODULE,
            "offload_prompt_only": False,
            XAVIER: config.to_dict(),
        },
    }


def own_transfer_config(value: object) -> dict[str, Any] | None:
    """``value``, also as JSON text, if ``kv_transfer_config`` made it; else None."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if isinstance(value, dict) and value.get("kv_connector_module_path") == _MODULE:
        return value
    return None


def configuration(transfer: Mapping[str, Any]) -> XavierConfig:
    """What the replica launched with ``transfer`` is told."""
    return XavierConfig.from_dict(transfer[_EXTRA][XAVIER])


def for_worker(
    transfer: Mapping[str, Any], *, worker_address: str, supervisor_address: str | None
) -> dict[str, Any]:
    """A copy for one replica launched on the worker at ``worker_address``.

    ``supervisor_address`` is where that worker reaches the supervisor.
    """
    extra: dict[str, Any] = dict(transfer[_EXTRA])
    extra.setdefault(_AS_LAUNCHED, extra[XAVIER])
    config = XavierConfig.from_dict(extra[_AS_LAUNCHED])
    pool_bytes = config.pool_bytes
    if pool_bytes is None:
        pool_bytes = default_pool_bytes(config.replicas_per_host)
    here = replace(
        config,
        pool_bytes=pool_bytes,
        tracker_address=reachable_address(config.tracker_address, via=supervisor_address),
        worker_address=reachable_address(worker_address),
    )
    extra[XAVIER] = here.to_dict()
    return {**transfer, _EXTRA: extra}
