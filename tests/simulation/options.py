"""What one run of the simulation is about, chosen by its seed."""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.simulation.contents import BLOCK_TOKENS

GROUPS = (
    ("full",),
    ("full", "window"),
    ("full", "recurrent"),
    ("window",),
    ("full", "window", "window"),
)


class Options(NamedTuple):
    seed: int
    groups: tuple[str, ...]
    window: int  # tokens
    batches: int  # in flight
    blocks: int  # of vLLM's cache
    slots: int  # of the pool
    chunk_blocks: int
    step_tokens: int  # computed at most
    running: int  # requests at most
    longest: int  # tokens of a request
    hash_tokens: int | None  # fewer than a block's: vLLM finds parts of blocks
    retention: int | None  # vLLM's `prefix_cache_retention_interval`
    adaptive: bool
    interrupts: float  # how often another thread gets in between
    copies: float  # how often a copy job runs when it might; less: slow copies
    step_seconds: float
    arrivals: float
    aborts: float
    resets: float
    flushes: float

    @classmethod
    def random(cls, seed: int) -> Options:
        rng = random.Random(f"options {seed}")
        groups = rng.choice(GROUPS)
        chunk_blocks = rng.choice((1, 1, 2, 3))
        chunk = chunk_blocks * BLOCK_TOKENS
        window = rng.choice((1, 2, 3)) * chunk + rng.choice((0, 0, 1, 3))
        longest = rng.choice((40, 80, 120))
        step_tokens = rng.choice((8, 16, 32, 64))
        batches = rng.choice((1, 2))
        return cls(
            seed=seed,
            groups=groups,
            window=window,
            batches=batches,
            blocks=2
            + len(groups) * (longest // BLOCK_TOKENS + 2)
            + batches * step_tokens // BLOCK_TOKENS
            + rng.choice((0, 0, 8, 40)),
            slots=rng.choice((12, 24, 60, 120)),
            chunk_blocks=chunk_blocks,
            step_tokens=step_tokens,
            running=rng.choice((1, 3, 6)),
            longest=longest,
            hash_tokens=rng.choice((None, 2)) if "recurrent" in groups else None,
            retention=rng.choice((0, None, chunk * 2)),
            adaptive=rng.random() < 0.5,
            interrupts=rng.choice((0.0, 0.1, 0.4)),
            copies=rng.choice((1.0, 0.3, 0.05)),
            step_seconds=rng.choice((0.01, 1.0)),
            arrivals=rng.choice((0.1, 0.3, 0.6)),
            aborts=rng.choice((0.0, 0.02, 0.08)),
            resets=rng.choice((0.0, 0.01, 0.04)),
            flushes=rng.choice((0.0, 0.02)),
        )
