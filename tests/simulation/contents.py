"""What the simulated KV cache holds: numbers that say for which tokens they stand.

A real K and V depend on all tokens up to their own. Here they are one number for each token and
layer, made of three parts:

    40 bits   a hash of all tokens up to this one (and the salt), different for each layer
     8 bits   the content of the adapter that it was computed with, or `MIXED`
    16 bits   the age: the oldest weights that any number it was computed from depends on

So whoever reads a number knows whether it belongs to the tokens that it is read for, and whether
anything from before a change of weights, or of another adapter, went into it. A recurrent state is
one number of the same kind for each layer: it stands for all tokens up to the last one that it has
seen.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from tests.engine.any_version import called

Numbers = npt.NDArray[np.uint64]

BLOCK_TOKENS = 4
PAGE_BYTES = 8 * BLOCK_TOKENS
LAYERS = 2
"""One for each group."""
VOCABULARY = 500
MIXED = 255
"""Contents of several adapters went into it."""
_CONTENT, _AGE = np.uint64(40), np.uint64(48)
_HASH = np.uint64((1 << 40) - 1)


class Text:
    """Tokens that grow as a model would continue them, and the hash of each of their prefixes.

    The next token depends on all tokens before it, so equal prompts get equal answers.
    """

    def __init__(
        self, tokens: Sequence[int], salt: str | None = None, adapter: str | None = None
    ) -> None:
        self.salt, self.adapter = salt, adapter
        self.tokens: list[int] = []
        self._hashes: list[int] = []
        self._hash = _next(0, f"{salt} {adapter}")
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self._hash = _next(self._hash, token)
        self._hashes.append(self._hash)

    def continue_to(self, length: int) -> None:
        while len(self.tokens) < length:
            self._append(self._hash % VOCABULARY)

    def hashes(self, first: int, last: int) -> Numbers:
        """Hashes of the prefixes that end with the tokens `first` to `last`, exclusive."""
        return np.array(self._hashes[first:last], dtype=np.uint64)


def _next(before: int, token: int | str) -> int:
    digest = hashlib.blake2b(f"{before}/{token}".encode(), digest_size=5).digest()
    return int.from_bytes(digest)


def ages(numbers: Numbers) -> Numbers:
    return numbers >> _AGE


def contents(numbers: Numbers) -> set[int]:
    return set(((numbers >> _CONTENT) & np.uint64(MIXED)).ravel().tolist())


class Group(NamedTuple):
    """A KV-cache group."""

    spec: KVCacheSpec
    names: list[str]
    tags: Numbers
    """Seeds of the layers, mixed into the hashes that they hold; shape (layers, 1)."""

    @property
    def is_recurrent(self) -> bool:
        return isinstance(self.spec, MambaSpec)

    def reach(self, start: int) -> int:
        """How many of the `start` tokens before it a token reads. A state stands for all."""
        if self.is_recurrent:
            return 1
        return self.spec.sliding_window - 1 if isinstance(self.spec, SlidingWindowSpec) else start

    def numbers(self, hashes: Numbers, age: int, content: int) -> Numbers:
        """What the layers hold for tokens with these `hashes`; shape (layers, tokens)."""
        return (hashes[None] ^ self.tags) | np.uint64(age << 48 | content << 40)

    def faults(self, found: Numbers, hashes: Numbers) -> list[int]:
        """At which of the tokens some layer holds something else; `found` is as in `numbers`."""
        wrong = ((found & _HASH) != (hashes[None] ^ self.tags)).any(axis=0)
        return [int(place) for place in np.flatnonzero(wrong)]


class Layout(NamedTuple):
    """A KV cache: groups whose layers share the same tensors, as vLLM lays out hybrid models."""

    groups: list[Group]
    blocks: int

    @property
    def config(self) -> KVCacheConfig:
        layers = [[group.names[layer] for group in self.groups] for layer in range(LAYERS)]
        tensors = [
            called(
                KVCacheTensor,
                size=self.blocks * PAGE_BYTES,
                layers=sharing,
                shared_by=sharing,
                layer_stride=0,
                block_stride=PAGE_BYTES,
            )
            for sharing in layers
        ]
        groups = [KVCacheGroupSpec(group.names, group.spec) for group in self.groups]
        return KVCacheConfig(
            num_blocks=self.blocks, kv_cache_tensors=tensors, kv_cache_groups=groups
        )


def layout(kinds: Sequence[str], blocks: int, window: int) -> Layout:
    """`kinds` are "full", "window" or "recurrent", one for each group."""
    groups = []
    for number, kind in enumerate(kinds):
        tags = [[_next(number, f"layer {layer}")] for layer in range(LAYERS)]
        names = [f"{kind}.{number}.{layer}" for layer in range(LAYERS)]
        groups.append(Group(_spec(kind, window), names, np.array(tags, dtype=np.uint64)))
    return Layout(groups, blocks)


def _spec(kind: str, window: int) -> KVCacheSpec:
    attention: dict[str, Any] = {
        "block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32,
    }  # fmt: skip
    if kind == "full":
        return FullAttentionSpec(**attention)
    if kind == "window":
        return SlidingWindowSpec(**attention, sliding_window=window)
    return MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=((2,),),
        dtypes=(torch.float32,),
        page_size_padded=PAGE_BYTES,
        mamba_cache_mode="align",
    )
