"""vLLM's ``kv_transfer_config`` dictionary, the only thing that serving hands to the engine.

xinference logs it, so it holds no secret. xinference may use it again for a launch on another
worker, so each launch derives the worker's values from those that the supervisor wrote.
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
    """The dictionary with which vLLM loads our connector and offloading spec."""
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
    """``value`` as a dictionary if it is ours, perhaps as JSON text; else None."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if isinstance(value, dict) and value.get("kv_connector_module_path") == _MODULE:
        return value
    return None


def configuration(transfer: Mapping[str, Any]) -> XavierConfig:
    """The configuration in ``transfer``. Raises ConfigError."""
    return XavierConfig.from_dict(transfer[_EXTRA][XAVIER])


def for_worker(
    transfer: Mapping[str, Any],
    *,
    worker_address: str,
    supervisor_address: str | None,
    number: int = -1,
    engines: int = 1,
) -> dict[str, Any]:
    """A copy for one replica on the worker at ``worker_address``.

    ``supervisor_address`` is the supervisor's address as that worker reaches it. The replica's
    ``number`` decides which of the ``roles`` it has. With data parallelism it has several
    ``engines`` there, which divide its pool's memory.
    """
    extra: dict[str, Any] = dict(transfer[_EXTRA])
    extra.setdefault(_AS_LAUNCHED, extra[XAVIER])
    config = XavierConfig.from_dict(extra[_AS_LAUNCHED])
    local = replace(
        config,
        pool_bytes=(config.pool_bytes or default_pool_bytes(config.replicas_per_host)) // engines,
        tracker_address=reachable_address(config.tracker_address, via=supervisor_address),
        worker_address=reachable_address(worker_address),
        role=dict(enumerate(config.roles or ())).get(number, "any"),
    )
    extra[XAVIER] = local.to_dict()
    return {**transfer, _EXTRA: extra}
