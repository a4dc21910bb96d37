"""Chunks: how long one is, whether vLLM stores all of it, and the chunk keys of a prompt.

vLLM keeps only the latest blocks of a group with a sliding window and frees the others. A chunk
must be stored while it has all its blocks.

`PromptChunker` computes the keys that a request with a given text would have. One call at a time,
never on the scheduler thread: the first call loads the tokenizer, and a long prompt takes a while.
Only text and `cache_salt` are considered: images or an adapter would change a request's keys.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, make_offload_key
from vllm.v1.request import Request

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import ConfigError, ExplainError
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.replica.inspect import Chunked

logger = logging.getLogger(__name__)

DEFAULT_CHUNK_TOKENS = 128


class Group(NamedTuple):
    """A KV-cache group. A hit needs the last `window` of its chunks; None: all."""

    chunk_tokens: int
    window: int | None = None

    @property
    def rank(self) -> tuple[bool, int]:
        """The chunks of the group with the highest rank tell how much of a prompt a replica
        holds."""
        return self.window is None, self.chunk_tokens


class Layout(NamedTuple):
    """The KV-cache groups of an engine, by the number at the end of their keys. The longest chunks
    have `chunk_tokens`."""

    chunk_tokens: int
    groups: Mapping[bytes, Group]

    def group(self, key: bytes) -> Group:
        return self.groups[key[GROUP]]

    @property
    def main(self) -> bytes:
        """The number of the group with the highest rank."""
        return max(self.groups, key=lambda number: self.groups[number].rank)

    def whole_chunks(self, positions: Mapping[OffloadKey, int]) -> dict[bytes, list[bytes]]:
        """The keys of a request's whole chunks in order, by the number of their group. `positions`
        are the tokens up to each chunk's end."""
        if len(self.groups) == 1:  # as mostly, and quicker
            ((number, group),) = self.groups.items()
            return {number: [key for key, end in positions.items() if not end % group.chunk_tokens]}
        groups: dict[bytes, list[bytes]] = {}
        for key, end in positions.items():
            keys = groups.setdefault(key[GROUP], [])
            if end == (len(keys) + 1) * self.group(key).chunk_tokens:
                keys.append(key)
        return groups


def chunk_tokens_for(
    config: XavierConfig, block_tokens: Sequence[int], windows: Sequence[int | None]
) -> int:
    """Tokens per chunk: the configured number, or the default rounded up to whole blocks.

    `block_tokens` and `windows` are those of each KV-cache group. A window is how many tokens back
    vLLM keeps the group's blocks; None: all. No chunk of several blocks is longer than its window.

    Raises:
        ConfigError: the configured number is not a multiple of every block size, or too large.
    """
    block = math.lcm(*block_tokens)
    limits = [
        max(1, window // own) * max(block_tokens)
        for own, window in zip(block_tokens, windows, strict=True)
        if window is not None
    ]
    longest = max(block, min(limits) // block * block) if limits else None
    tokens = config.chunk_tokens or DEFAULT_CHUNK_TOKENS
    whole = -(-tokens // block) * block
    if config.chunk_tokens is not None and tokens != whole:
        raise ConfigError(
            "xavier_chunk_tokens",
            tokens,
            f"is not a multiple of the model's block size, {block} tokens",
            f"use {whole}",
        )
    if longest is not None and whole > longest:
        if config.chunk_tokens is not None:
            raise ConfigError(
                "xavier_chunk_tokens",
                tokens,
                "is longer than the model's sliding window",
                f"use at most {longest}",
            )
        return longest
    return whole


def window_tokens(group: KVCacheGroupSpec) -> int | None:
    """How many tokens back vLLM keeps a group's blocks; None: all.

    A chunk must be stored before any of its blocks may be freed. A drafter's chunks are stored one
    chunk late, so two must fit.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, SlidingWindowSpec):
        window = spec.sliding_window
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        window = spec.attention_chunk_size
    else:
        return None
    return window // 2 if getattr(group, "is_eagle_group", False) else window


def stores_whole_chunks(
    blocks: GPULoadStoreSpec,
    keys: Iterable[bytes],
    groups: Mapping[int, KVCacheSpec],
    blocks_per_chunk: int,
) -> bool:
    """True if a store has every block of the chunks with `keys`.

    `groups` are by number, in the order of `blocks`. Of a chunk of recurrent states, only the last
    block must be there.
    """
    chunks = Counter(key[GROUP] for key in keys)
    sizes_and_starts = zip(blocks.group_sizes, blocks.block_indices, strict=True)
    for (number, spec), (size, start) in zip(groups.items(), sizes_and_starts, strict=True):
        skipped = start % blocks_per_chunk
        if skipped and not isinstance(spec, MambaSpec):
            return False
        if skipped + size != chunks[number.to_bytes(4)] * blocks_per_chunk:
            return False
    return True


class PromptChunker:
    """vLLM hashes `tokens_per_hash` tokens at a time."""

    def __init__(self, vllm_config: VllmConfig, layout: Layout, tokens_per_hash: int) -> None:
        self._vllm_config = vllm_config
        self._chunk_tokens = layout.chunk_tokens
        self._tokens_per_hash = tokens_per_hash
        # Hashes of a chunk, by the group's number: a group's own chunks may be smaller.
        self._groups = {
            int.from_bytes(number): group.chunk_tokens // tokens_per_hash
            for number, group in layout.groups.items()
        }
        self._tokenizer: Any = None

    def __call__(self, question: dict[str, Any]) -> Chunked:
        """Chunk `{"prompt": text}` or `{"messages": [...]}`, which may have `tools`, too. Either
        may have a `cache_salt`.

        Raises:
            ExplainError: there is no tokenizer, or it rejects the question.
        """
        try:
            tokens = self._tokens(question)
        except ExplainError:
            raise
        except Exception as error:  # a tokenizer or a template may raise anything
            logger.warning("tokenizing a prompt failed", exc_info=True)
            raise ExplainError(
                f"the model's tokenizer rejects the question: {error!r:.300}"
            ) from None
        hashes = self._hashes(tokens, question.get("cache_salt"))
        per_chunk = self._chunk_tokens // self._tokens_per_hash
        chunks = [
            tuple(self._keys(hashes, start, start + per_chunk))
            for start in range(0, len(hashes) - per_chunk + 1, per_chunk)
        ]
        context = self._vllm_config.model_config.max_model_len
        return Chunked(len(tokens), context, self._chunk_tokens, chunks)

    def _tokens(self, question: dict[str, Any]) -> list[int]:
        tokenizer = self._loaded_tokenizer()
        prompt = question.get("prompt")
        if prompt is None:
            if not getattr(tokenizer, "chat_template", None):
                raise ExplainError("the model's tokenizer has no chat template; ask with a prompt")
            prompt = tokenizer.apply_chat_template(
                question["messages"],
                tools=question.get("tools") or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        tokens: list[int] = tokenizer.encode(prompt)
        return tokens

    def _loaded_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = cached_tokenizer_from_config(self._vllm_config.model_config)
        if self._tokenizer is None:
            raise ExplainError("the model was launched without a tokenizer (skip_tokenizer_init)")
        return self._tokenizer

    def _hashes(self, tokens: list[int], salt: str | None) -> list[BlockHash]:
        """The hash of every whole block, chained: it covers all tokens up to the block's end."""
        algorithm = self._vllm_config.cache_config.prefix_caching_hash_algo
        hasher = get_request_block_hasher(self._tokens_per_hash, get_hash_fn_by_name(algorithm))
        request = Request(
            request_id="",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=hasher,
        )
        return request.block_hashes

    def _keys(self, hashes: list[BlockHash], start: int, end: int) -> Iterator[bytes]:
        """The keys of all groups' chunks that end within hashes `start` to `end`. A chunk's key is
        made from its last hash."""
        for number, size in self._groups.items():
            for last in range(start - start % size + size - 1, end, size):
                yield make_offload_key(hashes[last], number)
