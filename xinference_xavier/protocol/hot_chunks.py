"""What a replica that has just started asks its peers, and what they answer."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from xinference_xavier.errors import LinkError
from xinference_xavier.protocol.tracker import checked, unpack
from xinference_xavier.protocol.transfer import MAX_ROWS_PER_FETCH
from xinference_xavier.runtime.validate import Count, up_to

MAX_HOT = MAX_ROWS_PER_FETCH
"""Chunks of one answer."""


class HotChunks(NamedTuple):
    """The chunks with which a replica's latest prompts began, the most important ones first, and
    each behind those before it in its prompt.

    `keys` are packed; `uses` says how many prompts had each. The first `named` of them belong to
    named prefixes.
    """

    keys: bytes
    uses: Annotated[tuple[int, ...], Field(max_length=MAX_HOT), up_to(1 << 31)]
    named: Count


_HOT = TypeAdapter(HotChunks)


def check_hot(answer: object, key_bytes: int) -> tuple[HotChunks, list[bytes]]:
    """The answer, and its keys of `key_bytes` each. Raises LinkError."""
    try:
        hot = checked(_HOT, "hot chunks", answer)
        keys = unpack(hot.keys, key_bytes)
    except ValueError as error:
        raise LinkError(str(error)) from None
    if len(keys) != len(hot.uses):
        raise LinkError(f"malformed hot chunks: {len(keys)} keys have {len(hot.uses)} uses")
    return hot, keys
