"""The keys of a prompt are those that a request with it would have."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import make_offload_key

from tests.engine.vllm_scheduler import (
    BLOCK_TOKENS,
    engine_config,
    hasher_of,
    request_of,
    slide_one_layer,
)
from xinference_xavier.engine.keys import PromptChunker
from xinference_xavier.errors import ExplainError

CHUNK = 128
PROMPT = {"prompt": "one two three four " * 100}


@pytest.fixture(scope="module")
def vllm_config(model_folder: Path) -> VllmConfig:
    return engine_config(model_folder, skip_tokenizer_init=False)


@pytest.fixture
def chunker(vllm_config: VllmConfig, cache_config: KVCacheConfig) -> PromptChunker:
    return chunker_of(vllm_config, cache_config)


def chunker_of(config: VllmConfig, caches: KVCacheConfig) -> PromptChunker:
    return PromptChunker(config, build_offloading_config(config, caches), CHUNK)


@pytest.mark.parametrize("sliding", [False, True], ids=["one group", "two groups"])
def test_keys_are_those_of_a_request(
    vllm_config: VllmConfig, cache_config: KVCacheConfig, sliding: bool
) -> None:
    if sliding:
        slide_one_layer(cache_config, 256)
    chunker = chunker_of(vllm_config, cache_config)
    tokens = chunker._loaded_tokenizer().encode(PROMPT["prompt"])
    request = request_of("r", tokens, 1, hasher_of(vllm_config, BLOCK_TOKENS))
    per_chunk = CHUNK // BLOCK_TOKENS
    last_hashes = request.block_hashes[per_chunk - 1 :: per_chunk]
    chunked = chunker(PROMPT)
    assert (chunked.prompt_tokens, chunked.chunk_tokens) == (len(tokens), CHUNK)
    assert len(chunked.chunks) == len(tokens) // CHUNK >= 2
    groups = range(1 + sliding)
    assert chunked.chunks == [
        tuple(make_offload_key(last, group) for group in groups) for last in last_hashes
    ]


def test_a_prompt_shorter_than_a_chunk_has_no_keys(chunker: PromptChunker) -> None:
    chunked = chunker({"prompt": "short"})
    assert chunked.prompt_tokens > 0
    assert chunked.chunks == []


def test_messages_go_through_the_model_s_template(chunker: PromptChunker) -> None:
    content = "one two three four " * 50
    asked = chunker({"messages": [{"role": "user", "content": content}]})
    written = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert asked == chunker({"prompt": written})


def test_tools_are_counted(chunker: PromptChunker, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for tool in tools %}{{ tool.name }}{% endfor %}{{ messages[0].content }}"
    monkeypatch.setattr(chunker._loaded_tokenizer(), "chat_template", template)
    asked = {"messages": [{"role": "user", "content": "?"}], "tools": [{"name": "look " * 300}]}
    assert chunker(asked) == chunker({"prompt": "look " * 300 + "?"})


def test_a_template_that_fails_is_an_error(
    chunker: PromptChunker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunker._loaded_tokenizer(), "chat_template", "{{ 1 / 0 }}")
    with pytest.raises(ExplainError, match="the model's tokenizer rejects the question"):
        chunker({"messages": [{"role": "user", "content": "?"}]})


def test_a_model_without_a_tokenizer_is_an_error(
    model_folder: Path, cache_config: KVCacheConfig
) -> None:
    with pytest.raises(ExplainError, match="launched without a tokenizer"):
        chunker_of(engine_config(model_folder), cache_config)(PROMPT)
