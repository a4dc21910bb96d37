"""Only chunks that vLLM stored whole are shared. A prompt's keys are those of a request with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, make_offload_key

from tests.engine.scheduling import CHUNK, chunks
from tests.engine.vllm_scheduler import BLOCK_TOKENS, engine_config, hasher_of, request_of
from xinference_xavier.config import XavierConfig
from xinference_xavier.engine.keys import (
    Group,
    Layout,
    PromptChunker,
    chunk_tokens_for,
    stores_whole_chunks,
    window_tokens,
)
from xinference_xavier.errors import ConfigError, ExplainError

BLOCKS_PER_CHUNK = 4
SIZES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 16,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SIZES)
SLIDING = SlidingWindowSpec(**SIZES, sliding_window=512)
RECURRENT = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


def options(chunk_tokens: int | None = None) -> XavierConfig:
    return XavierConfig("model", "127.0.0.1:1", chunk_tokens=chunk_tokens)


class TestChunkTokens:
    @pytest.mark.parametrize(
        ("blocks", "tokens"),
        [([16], 128), ([128], 128), ([48], 144), ([256], 256), ([16, 24], 144), ([32, 64], 128)],
    )
    def test_the_default_is_rounded_up_to_whole_blocks(
        self, blocks: list[int], tokens: int
    ) -> None:
        assert chunk_tokens_for(options(), blocks, [None] * len(blocks)) == tokens

    def test_a_configured_size_is_used(self) -> None:
        assert chunk_tokens_for(options(512), [16, 128], [None, None]) == 512

    def test_a_size_that_is_not_a_multiple_is_refused_with_the_next_one(self) -> None:
        with pytest.raises(ConfigError) as refused:
            chunk_tokens_for(options(200), [16, 128], [None, None])
        assert str(refused.value) == (
            "xavier_chunk_tokens=200 is not a multiple of the model's block size, 128 tokens; "
            "use 256"
        )

    @pytest.mark.parametrize(
        ("blocks", "windows", "tokens"),
        [
            ([16], [512], 128),
            ([16], [100], 96),
            ([16], [8], 16),  # a chunk of one block has no hole
            ([32, 16], [None, 64], 128),  # 4 blocks of 16 of the second group
            ([32, 16], [None, 32], 64),
        ],
    )
    def test_the_default_is_at_most_the_smallest_window(
        self, blocks: list[int], windows: list[int | None], tokens: int
    ) -> None:
        assert chunk_tokens_for(options(), blocks, windows) == tokens

    def test_a_chunk_longer_than_a_window_is_refused_with_the_longest(self) -> None:
        with pytest.raises(ConfigError) as refused:
            chunk_tokens_for(options(1024), [16, 16], [None, 520])
        assert str(refused.value) == (
            "xavier_chunk_tokens=1024 is longer than the model's sliding window; use at most 512"
        )


class TestWindow:
    @pytest.mark.parametrize(
        ("spec", "window"),
        [
            (FULL, None),
            (RECURRENT, None),
            (SLIDING, 512),
            (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=256), 256),
        ],
    )
    def test_how_far_back_vllm_keeps_blocks(self, spec: KVCacheSpec, window: int | None) -> None:
        assert window_tokens(KVCacheGroupSpec(["layer"], spec)) == window

    def test_a_drafter_stores_one_chunk_late(self) -> None:
        group = KVCacheGroupSpec(["layer"], SLIDING)
        group.is_eagle_group = True
        assert window_tokens(group) == 256


@pytest.mark.parametrize(
    ("spec", "blocks", "start", "count", "whole"),
    [
        (SLIDING, 12, 8, 3, True),
        (SLIDING, 11, 8, 3, False),
        (SLIDING, 11, 9, 3, False),
        (RECURRENT, 1, 3, 1, True),
        (RECURRENT, 2, 3, 2, False),
    ],
    ids=[
        "all blocks",
        "one is missing in the middle",
        "the first is missing",
        "a state is in the last block",
        "two states would move together",
    ],
)
def test_only_whole_chunks_are_stored(
    spec: KVCacheSpec, blocks: int, start: int, count: int, whole: bool
) -> None:
    """A store of `count` chunks of one group, after one chunk of another."""
    keys = [*chunks("prompt", 1, group=0), *chunks("prompt", count, group=2)]
    store = GPULoadStoreSpec(
        range(BLOCKS_PER_CHUNK + blocks),
        group_sizes=[BLOCKS_PER_CHUNK, blocks],
        block_indices=[0, start],
    )
    assert stores_whole_chunks(store, keys, {0: FULL, 2: spec}, BLOCKS_PER_CHUNK) is whole


# -- keys of a prompt -----------------------------------------------------------------------------

PROMPT = {"prompt": "one two three four " * 100}


@pytest.fixture(scope="module")
def vllm_config(model_folder: Path) -> VllmConfig:
    return engine_config(model_folder, skip_tokenizer_init=False)


@pytest.fixture
def chunker(vllm_config: VllmConfig) -> PromptChunker:
    return chunker_of(vllm_config)


def chunker_of(config: VllmConfig, groups: int = 1) -> PromptChunker:
    layout = Layout(CHUNK, {number.to_bytes(4): Group(CHUNK) for number in range(groups)})
    return PromptChunker(config, layout, BLOCK_TOKENS)


@pytest.mark.parametrize(
    ("groups", "salt"), [(1, {}), (2, {}), (1, {"cache_salt": "a"}), (1, {"cache_salt": "b"})]
)
def test_keys_are_those_of_a_request(
    vllm_config: VllmConfig, groups: int, salt: dict[str, str]
) -> None:
    chunker = chunker_of(vllm_config, groups)
    tokens = chunker._loaded_tokenizer().encode(PROMPT["prompt"])
    request = request_of("r", tokens, 1, hasher_of(vllm_config, BLOCK_TOKENS), **salt)
    per_chunk = CHUNK // BLOCK_TOKENS
    last_hashes = request.block_hashes[per_chunk - 1 :: per_chunk]
    chunked = chunker({**PROMPT, **salt})
    assert (chunked.prompt_tokens, chunked.chunk_tokens) == (len(tokens), CHUNK)
    assert len(chunked.chunks) == len(tokens) // CHUNK >= 2
    assert chunked.chunks == [
        tuple(make_offload_key(last, group) for group in range(groups)) for last in last_hashes
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


def test_a_model_without_a_tokenizer_is_an_error(model_folder: Path) -> None:
    with pytest.raises(ExplainError, match="launched without a tokenizer"):
        chunker_of(engine_config(model_folder))(PROMPT)
