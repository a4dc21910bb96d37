"""vLLM and a replica in the one process of a program, with a tracker elsewhere."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.documents import document
from tests.tracker_pools import MODEL
from xinference_xavier.config import XavierConfig, kv_transfer_config

CHUNK = 128
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

def ask(prompt):
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
    tokens = list(output.outputs[0].token_ids)
    return [len(output.prompt_token_ids), output.num_cached_tokens, tokens]

if __name__ == "__main__":
    order = json.load(sys.stdin)
    llm = LLM(order["model"], dtype="float32", enforce_eager=True, max_model_len=4096,
              block_size=128, num_gpu_blocks_override=40,
              kv_transfer_config=order["kv_transfer_config"])
    answers = [ask(order["prompt"])]
    for other in order["others"]:  # they take all blocks
        ask(other)
    answers.append(ask(order["prompt"]))  # from the pool
    llm.reset_prefix_cache()
    answers.append(ask(order["prompt"]))  # cold
    print("ANSWERS " + json.dumps(answers))
"""


@pytest.mark.usefixtures("tracker")
async def test_the_pool_serves_a_prefix_that_vllm_has_dropped(
    model_folder: Path, tmp_path: Path, pool: Any
) -> None:
    config = XavierConfig(MODEL, pool.external_address, pool_bytes=512 << 20)
    program = tmp_path / "engine.py"
    program.write_text(PROGRAM)
    order = {
        "model": str(model_folder),
        "prompt": document(300, 40),
        "others": [document(300, number) for number in range(41, 49)],
        "kv_transfer_config": kv_transfer_config(config),
    }
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    engine = await asyncio.create_subprocess_exec(
        *(sys.executable, program),
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
