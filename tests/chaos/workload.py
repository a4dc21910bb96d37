"""The prompts of one replica, and the expected content of its rows.

The content follows from the key and from the replica's weights, so that wrong rows show, including
rows that were computed before a reset.
"""

import hashlib
import random
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import OffloadKey

from tests.engine.scheduling import chunks
from tests.harness.replicas import content

ROW_BYTES = 16 << 10
FAMILIES = 6
DOCUMENTS = 6
"""Documents per family; they have a common beginning."""
COMMON_CHUNKS = 4
OWN_CHUNKS = 8


@lru_cache(maxsize=2000)
def row_content(key: bytes, weights: str) -> npt.NDArray[np.uint8]:
    """The expected content of the row of `key`, shape (ROW_BYTES,)."""
    return content(hashlib.sha256(key + weights.encode()).digest(), ROW_BYTES)


def prompt(source: random.Random) -> list[OffloadKey]:
    """The chunks of a document, or of its beginning."""
    family, document = source.randrange(FAMILIES), source.randrange(DOCUMENTS)
    whole = [
        *chunks(f"family {family}", COMMON_CHUNKS),
        *chunks(f"family {family}, document {document}", OWN_CHUNKS),
    ]
    return whole[: source.randint(COMMON_CHUNKS, len(whole))]
