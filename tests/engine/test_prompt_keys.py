"""The keys of a prompt are those that a request with it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from xinference_xavier.config import XavierConfig, kv_transfer_config
from xinference_xavier.engine.keys import PromptChunker
from xinference_xavier.errors import ExplainError

BLOCK = 32
CHUNK = 128
HASH = "sha256"
PROMPT = {"prompt": "one two three four " * 100}


def cache_config(*, sliding: bool = False) -> KVCacheConfig:
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=64, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer.0"], full)]
    if sliding:
        window = SlidingWindowSpec(
            block_size=BLOCK,
            num_kv_heads=4,
            head_size=64,
            dtype=torch.float32,
            sliding_window=256,
        )
        groups.append(KVCacheGroupSpec(["layer.1"], window))
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=groups)


def engine_config(folder: Path, **arguments: Any) -> VllmConfig:
    xavier = XavierConfig("model", "127.0.0.1:1", pool_bytes=1 << 26)
    return EngineArgs(
        model=str(folder),
        dtype="float32",
        block_size=BLOCK,
        max_model_len=2048,
        kv_transfer_config=KVTransferConfig(**kv_transfer_config(xavier)),
        **arguments,
    ).create_engine_config()


@pytest.fixture(scope="module")
def vllm_config(model_folder: Path) -> VllmConfig:
    init_none_hash(get_hash_fn_by_name(HASH))  # an engine does so when it starts
    return engine_config(model_folder)


def chunker_of(config: VllmConfig, **arguments: Any) -> PromptChunker:
    return PromptChunker(config, build_offloading_config(config, cache_config(**arguments)), CHUNK)


def hashes_of_a_request(tokens: list[int]) -> list[bytes]:
    """From which vLLM's scheduler makes keys."""
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name(HASH))
    request = Request("r", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    return list(request.block_hashes)


@pytest.mark.parametrize("sliding", [False, True], ids=["one group", "two groups"])
def test_keys_are_those_of_a_request(vllm_config: VllmConfig, sliding: bool) -> None:
    chunker = chunker_of(vllm_config, sliding=sliding)
    tokens = chunker._loaded_tokenizer().encode(PROMPT["prompt"])
    last_hashes = hashes_of_a_request(tokens)[CHUNK // BLOCK - 1 :: CHUNK // BLOCK]
    chunked = chunker(PROMPT)
    assert (chunked.prompt_tokens, chunked.chunk_tokens) == (len(tokens), CHUNK)
    assert len(chunked.chunks) == len(tokens) // CHUNK >= 2
    groups = range(1 + sliding)
    assert chunked.chunks == [
        tuple(make_offload_key(last, group) for group in groups) for last in last_hashes
    ]


def test_a_prompt_shorter_than_a_chunk_has_no_keys(vllm_config: VllmConfig) -> None:
    chunked = chunker_of(vllm_config)({"prompt": "short"})
    assert chunked.prompt_tokens > 0
    assert chunked.chunks == []


def test_messages_go_through_the_model_s_template(vllm_config: VllmConfig) -> None:
    chunker = chunker_of(vllm_config)
    content = "one two three four " * 50
    asked = chunker({"messages": [{"role": "user", "content": content}]})
    written = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert asked == chunker({"prompt": written})


def test_tools_are_counted(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    chunker = chunker_of(vllm_config)
    template = "{% for tool in tools %}{{ tool.name }}{% endfor %}{{ messages[0].content }}"
    monkeypatch.setattr(chunker._loaded_tokenizer(), "chat_template", template)
    asked = {"messages": [{"role": "user", "content": "?"}], "tools": [{"name": "look " * 300}]}
    assert chunker(asked) == chunker({"prompt": "look " * 300 + "?"})


def test_a_template_that_fails_is_an_error(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunker = chunker_of(vllm_config)
    monkeypatch.setattr(chunker._loaded_tokenizer(), "chat_template", "{{ 1 / 0 }}")
    with pytest.raises(ExplainError, match="the model's tokenizer rejects the question"):
        chunker({"messages": [{"role": "user", "content": "?"}]})


def test_a_model_without_a_tokenizer_is_an_error(model_folder: Path) -> None:
    config = engine_config(model_folder, skip_tokenizer_init=True)
    with pytest.raises(ExplainError, match="launched without a tokenizer"):
        chunker_of(config)(PROMPT)
