"""Requests that an engine gives itself, without a client.

They go the way of clients' requests: into the queue that vLLM's input thread fills. Their outputs
go to the first API process, which ignores outputs of requests that it does not know.

Threading: any thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc

from xinference_xavier.engine import compat

_NO_WAVE = -1
"""With data parallelism, it makes an engine that idles wake the others, which compute in step."""


class OwnRequests:
    def __init__(self, core: Any) -> None:
        """Without a `core`, and in vain, nothing is ever computed."""
        self._core = core

    @classmethod
    def at(cls, config: VllmConfig) -> OwnRequests:
        """Of the engine that is being made on this thread."""
        generates = config.model_config.runner_type == "generate"
        core = compat.engine_core()
        return cls(core if generates and hasattr(core, "input_queue") else None)

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
