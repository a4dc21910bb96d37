"""Requests that an engine gives itself, without a client.

They go the way of clients' requests: into the queue that vLLM's input thread fills. Their outputs
go to the first API process, which ignores outputs of requests that it does not know.

Threading: any thread.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from queue import Queue
from types import FrameType
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc

_NO_WAVE = -1
"""With data parallelism, it makes an engine that idles wake the others, which compute in step."""


def engine_core(frame: FrameType | None) -> Any:
    """vLLM's `EngineCoreProc` that is being made on the stack of `frame`.

    None for an engine without a process of its own: its caller's thread runs the steps.
    """
    while frame is not None:
        core = frame.f_locals.get("self")
        if isinstance(getattr(core, "__dict__", {}).get("input_queue"), Queue):
            return core
        frame = frame.f_back
    return None


class OwnRequests:
    def __init__(self, core: Any) -> None:
        """Without a `core`, and in vain, nothing is ever computed."""
        self._core = core

    @classmethod
    def at(cls, config: VllmConfig) -> OwnRequests:
        """Of the engine that is being made on this thread."""
        generates = config.model_config.runner_type == "generate"
        return cls(engine_core(sys._getframe()) if generates else None)

    def ask(self, tokens: Sequence[int], salt: str) -> str | None:
        """Compute `tokens` and one more. Returns the request's id; None if the engine takes none
        now."""
        core = self._core
        if core is None or not _takes_requests(core):
            return None
        request = EngineCoreRequest(
            request_id=f"xavier-probe-{secrets.token_hex(8)}",
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
            current_wave=_NO_WAVE,
        )
        core.input_queue.put_nowait(
            (EngineCoreRequestType.ADD, core.preprocess_add_request(request))
        )
        return request.request_id

    def abort(self, req_id: str) -> None:
        """Does nothing if the request has ended."""
        self._core.input_queue.put_nowait((EngineCoreRequestType.ABORT, [req_id]))


def _takes_requests(core: Any) -> bool:
    if getattr(core, "request_block_hasher", None) is None:  # it is being made
        return False
    steps_with_others = isinstance(core, DPEngineCoreProc)
    if steps_with_others and not core.has_coordinator:  # nobody would wake them
        return False
    return bool(core.scheduler.pause_state.name == "UNPAUSED")
