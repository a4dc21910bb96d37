"""vLLM on the CPU platform with asynchronous scheduling, as it runs on CUDA.

The CPU platform switches asynchronous scheduling off, although it works there. With it, and with
workers in processes of their own, vLLM schedules a step before it has the output of the previous
one. Benchmarks and tests use it. A program with `PLUGINS` on its path has it in all of its engines,
because vLLM loads the plugins that are installed there.
"""

import logging
from pathlib import Path
from typing import Any

PLUGINS = Path(__file__).with_name("vllm_plugins")
LINE = "this engine schedules asynchronously"
logger = logging.getLogger("vllm.asynchronous")


def schedule_asynchronously() -> None:
    """Affects engines that this process creates from now on."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(platform: type[CpuPlatform], vllm_config: Any) -> None:
        original(platform, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
        logger.info(LINE)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment]
