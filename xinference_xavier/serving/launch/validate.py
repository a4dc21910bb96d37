"""Refuses launches that could never share, before anything is created."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from xinference_xavier.config import BACKEND, ENABLE
from xinference_xavier.errors import ConfigError

logger = logging.getLogger(__name__)


_WITHOUT = f"launch with {BACKEND}=builtin, or without {ENABLE}=true"


def foreign(arguments: Mapping[str, Any]) -> ConfigError | None:
    """Why only the Xavier built into xinference may do something for a launch; None if we can."""
    placements = arguments.get("replica_config") or ()
    engines = [arguments.get("model_engine")]
    engines += [item.model_engine for item in placements if item.model_engine is not None]
    for engine in engines:
        if str(engine).lower() != "vllm":
            remedy = f"use vLLM, or {_WITHOUT}"
            return ConfigError("model_engine", engine, "cannot share its cache", remedy)
    model_type = arguments.get("model_type")
    if str(model_type or "LLM").lower() != "llm":
        return ConfigError("model_type", model_type, "has no prefixes to share", _WITHOUT)
    for item in placements:
        if item.role != "hybrid":
            reason = "splits prefill from decoding, which sharing does not support"
            return ConfigError("role", item.role, reason, _WITHOUT)
    return None


def refuse_unshareable(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Raises ConfigError for a launch that cannot share; warns of a single replica."""
    n_worker = arguments.get("n_worker")
    if str(1 if n_worker is None else n_worker) != "1":
        raise ConfigError(
            "n_worker",
            n_worker,
            "spreads one replica over several workers, which sharing does not support",
            f"use n_worker=1, or {_WITHOUT}",
        )
    if extra.get("kv_transfer_config") is not None:
        raise ConfigError(
            "kv_transfer_config",
            extra["kv_transfer_config"],
            f"is set by {ENABLE}",
            f"leave it out, or {_WITHOUT}",
        )
    if arguments.get("replica") == 1:
        logger.warning("%s with one replica: nothing is shared until another is added", ENABLE)


def refuse_roles_without_replicas(arguments: Mapping[str, Any], roles: Sequence[str]) -> None:
    """Raises ConfigError if there are more `roles` than replicas."""
    replica = arguments.get("replica")
    count = replica if isinstance(replica, int) else 1
    if len(roles) > count:
        raise ConfigError(
            "xavier_roles",
            ",".join(roles),
            f"has {len(roles)} replicas, but {count} {'is' if count == 1 else 'are'} launched",
            f"launch with replica={len(roles)}, or give fewer roles",
        )


def refuse_several_hosts(supervisor: Any, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError if `replica_config` places replicas on hosts that cannot share memory. If
    xinference places the replicas itself, only their fetches show where they are."""
    placements = arguments.get("replica_config") or ()
    hosts = {device.worker_ip for item in placements for device in item.devices}
    if len(hosts) > 1 and not supervisor.is_local_deployment():
        raise ConfigError(
            "xavier_transport",
            "shared_memory",
            f"needs one host, but replica_config names {', '.join(sorted(map(str, hosts)))}",
            "place all replicas on one host, or use auto",
        )
