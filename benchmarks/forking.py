"""Engines' processes that are forked from one that has imported vLLM.

Each import takes 10 s of processor time, and an engine has two processes: the one that calls it and
EngineCore. vLLM forks EngineCore wherever it may, but its CPU platform starts it anew.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # otherwise the platform uses a worker process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # all engines use all cores
}


def context() -> ForkServerContext:
    """For processes that call `fork_engine_core`. The first one waits for the imports."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["benchmarks.preload"])
    return found


def fork_engine_core() -> None:
    """Affects engines that this process creates from now on; not their workers, since OpenMP does
    not survive a fork."""
    from vllm.v1.engine import utils

    vars(utils)["get_mp_context"] = lambda: multiprocessing.get_context("fork")
