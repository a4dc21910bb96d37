"""Requests directly to model actors, bypassing the supervisor and its REST interface."""

from __future__ import annotations

import asyncio
import json
import time

import xoscar

from examples.local_cluster import Completion

ANSWER_TIMEOUT = 120.0


def complete(
    worker_address: str, replica_model_uid: str, prompt: str, *, max_tokens: int = 8
) -> Completion:
    """The replica's greedy continuation. Raises what the worker or the model raises."""
    options: dict[str, object] = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 1,
    }

    async def ask() -> Completion:
        worker = await xoscar.actor_ref(worker_address, "worker")
        model = await worker.get_model(replica_model_uid)
        begin = time.perf_counter()
        answer = json.loads(await model.generate(prompt, options, raw_params=dict(options)))
        return Completion.of(answer, time.perf_counter() - begin)

    async def ask_in_time() -> Completion:
        return await asyncio.wait_for(ask(), ANSWER_TIMEOUT)

    return asyncio.run(ask_in_time())
