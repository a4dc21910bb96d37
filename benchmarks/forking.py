"""Engines' processes that are forked from one that has imported vLLM.

Each import takes 10 s of processor time, and an engine has two processes: the one that calls it and
EngineCore. vLLM forks EngineCore wherever it may, but its CPU platform starts it anew.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # otherwise the platform uses a worker process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # all engines use all cores
}

FORGET = "forget_prefix_cache"
"""A call of such an engine's EngineCore that empties vLLM's own prefix cache and leaves our pool
alone, as `reset_prefix_cache` does not. False if any block is in use."""


def context() -> ForkServerContext:
    """For processes that call `fork_engine_core`. The first one waits for the imports."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["benchmarks.preload"])
    return found


def fork_engine_core() -> None:
    """Affects engines that this process creates from now on; not their workers, since OpenMP does
    not survive a fork."""
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCore

    vars(utils)["get_mp_context"] = lambda: multiprocessing.get_context("fork")
    setattr(EngineCore, FORGET, _forget)


def _forget(core: Any) -> bool:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return KVCacheManager.reset_prefix_cache(core.scheduler.kv_cache_manager)
