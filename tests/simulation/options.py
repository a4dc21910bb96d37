"""What one run of the simulation is about, chosen by its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.simulation.contents import BLOCK_TOKENS

GROUPS = (
    ("full",),
    ("full", "window"),
    ("full", "recurrent"),
    ("window",),
    ("full", "window", "window"),
)


@dataclass(frozen=True)
class Options:
    """The options of one run. The last ones are switches, to find out why a run fails."""

    seed: int
    groups: tuple[str, ...] = ("full",)
    window: int = 16  # tokens
    batches: int = 1  # in flight
    blocks: int = 64  # of vLLM's cache
    slots: int = 24  # of the pool
    chunk_blocks: int = 2
    step_tokens: int = 32  # computed at most
    running: int = 4  # requests at most
    longest: int = 80  # tokens of a request
    hash_tokens: int | None = None  # fewer than a block's: vLLM finds parts of blocks
    retention: int | None = 0  # vLLM's `prefix_cache_retention_interval`
    adaptive: bool = False
    interrupts: float = 0.1  # how often another thread gets in between
    copies: float = 1.0  # how often a copy job runs when it might; less: slow copies
    step_seconds: float = 0.01
    events: int = 100
    arrivals: float = 0.3
    aborts: float = 0.02
    resets: float = 0.01
    flushes: float = 0.01
    requests_go_on: bool = True
    """Requests may run while the connector is reset. They go on with what they have computed."""
    refused_resets: bool = True
    """vLLM may refuse a reset after it has preempted all requests, because some load."""
    two_resets: bool = True
    """The connector may be reset again before vLLM's next step."""
    resets_of_busy_pools: bool = True
    """The connector may be reset while workers and peers use every slot of the pool."""
    fetches_end_within_steps: bool = True
    """A fetch may end between the lookups of a step and the end of the step's scheduling."""

    @classmethod
    def random(cls, seed: int, **fixed: object) -> Options:
        rng = random.Random(f"options {seed}")
        groups = rng.choice(GROUPS)
        chunk_blocks = rng.choice((1, 1, 2, 3))
        chunk = chunk_blocks * BLOCK_TOKENS
        window = rng.choice((1, 2, 3)) * chunk + rng.choice((0, 0, 1, 3))
        longest = rng.choice((40, 80, 120))
        step_tokens = rng.choice((8, 16, 32, 64))
        batches = rng.choice((1, 2))
        return cls(
            **{  # type: ignore[arg-type]
                **{
                    "seed": seed,
                    "groups": groups,
                    "window": window,
                    "batches": batches,
                    "blocks": 2
                    + len(groups) * (longest // BLOCK_TOKENS + 2)
                    + batches * step_tokens // BLOCK_TOKENS
                    + rng.choice((0, 0, 8, 40)),
                    "slots": rng.choice((12, 24, 60, 120)),
                    "chunk_blocks": chunk_blocks,
                    "step_tokens": step_tokens,
                    "running": rng.choice((1, 3, 6)),
                    "longest": longest,
                    "hash_tokens": rng.choice((None, 2)) if "recurrent" in groups else None,
                    "retention": rng.choice((0, None, chunk * 2)),
                    "adaptive": rng.random() < 0.5,
                    "interrupts": rng.choice((0.0, 0.1, 0.4)),
                    "copies": rng.choice((1.0, 0.3, 0.05)),
                    "step_seconds": rng.choice((0.01, 1.0)),
                    "arrivals": rng.choice((0.1, 0.3, 0.6)),
                    "aborts": rng.choice((0.0, 0.02, 0.08)),
                    "resets": rng.choice((0.0, 0.01, 0.04)),
                    "flushes": rng.choice((0.0, 0.02)),
                },
                **fixed,
            }
        )
