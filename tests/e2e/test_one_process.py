"""An engine whose worker and scheduler live in one process, as with CUDA and one GPU."""

import asyncio
import json
import os
import sys
from pathlib import Path

import xoscar

from examples.documents import document
from xinference_xavier.config import XavierConfig
from xinference_xavier.serving.transfer_config import kv_transfer_config
from xinference_xavier.tracker.actor import BlockTracker, tracker_uid

CHUNK = 128
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

order = json.load(sys.stdin)
llm = LLM(order["model"], dtype="float32", enforce_eager=True, max_model_len=4096, block_size=128,
          kv_transfer_config=order["kv_transfer_config"])

def ask():
    (output,) = llm.generate([order["prompt"]], SamplingParams(temperature=0, max_tokens=8))
    tokens = list(output.outputs[0].token_ids)
    return [len(output.prompt_token_ids), output.num_cached_tokens, tokens]

answers = [ask()]
llm.reset_prefix_cache()
answers.append(ask())  # from the pool
llm.reset_prefix_cache(reset_connector=True)
answers.append(ask())  # from nothing
print("ANSWERS " + json.dumps(answers))
"""


async def test_pool_hits_in_one_process(model_folder: Path) -> None:
    pool = await xoscar.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    async with pool:
        address = pool.external_address
        await xoscar.create_actor(BlockTracker, "m", address=address, uid=tracker_uid("m"))
        config = XavierConfig(model_uid="m", tracker_address=address, pool_bytes=128 << 20)
        order = {
            "model": str(model_folder),
            "prompt": document(300, 40),
            "kv_transfer_config": kv_transfer_config(config),
        }
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        engine = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PROGRAM,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
        )
        output, _ = await engine.communicate(json.dumps(order).encode())
    text = output.decode()
    line = next((line for line in text.splitlines() if line.startswith("ANSWERS ")), None)
    assert line is not None, text
    cold, from_pool, after_reset = json.loads(line.removeprefix("ANSWERS "))
    whole = cold[0] // CHUNK * CHUNK
    assert [cold[1], from_pool[1], after_reset[1]] == [0, whole, 0]
    assert cold[2] == from_pool[2] == after_reset[2]
