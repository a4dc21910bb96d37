"""vLLM on the CPU platform with asynchronous scheduling, which is how it runs on CUDA.

The platform switches it off, although it works there. With it, and with workers in processes of
their own, vLLM schedules a step before it has the output of the one before. Benchmarks and tests
have it; a program that finds `PLUGINS` on its path has it in all of its engines, for vLLM itself
loads what is installed there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

PLUGINS = Path(__file__).with_name("vllm_plugins")
LINE = "this engine schedules asynchronously"
logger = logging.getLogger("vllm.asynchronous")


def schedule_asynchronously() -> None:
    """For engines that this process makes from now on."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(platform: type[CpuPlatform], vllm_config: Any) -> None:
        original(platform, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
        logger.info(LINE)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment]
