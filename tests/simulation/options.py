"""What one run of the simulation is about, chosen by its seed."""

import random

from tests.simulation.contents import BLOCK_TOKENS

GROUPS = (
    ("full",),
    ("full", "window"),
    ("full", "recurrent"),
    ("window",),
    ("full", "window", "window"),
)


class Options:
    def __init__(self, seed: int) -> None:
        rng = random.Random(f"options {seed}")
        self.seed = seed
        self.groups = rng.choice(GROUPS)
        self.chunk_blocks = rng.choice((1, 1, 2, 3))
        chunk = self.chunk_blocks * BLOCK_TOKENS
        self.window = rng.choice((1, 2, 3)) * chunk + rng.choice((0, 0, 1, 3))  # tokens
        self.longest = rng.choice((40, 80, 120))  # tokens of a request
        self.step_tokens = rng.choice((8, 16, 32, 64))  # computed at most
        self.batches = rng.choice((1, 2))  # in flight
        self.blocks = (  # of vLLM's cache
            2
            + len(self.groups) * (self.longest // BLOCK_TOKENS + 2)
            + self.batches * self.step_tokens // BLOCK_TOKENS
            + rng.choice((0, 0, 8, 40))
        )
        self.slots = rng.choice((12, 24, 60, 120))  # of the pool
        self.running = rng.choice((1, 3, 6))  # requests at most
        self.hash_tokens = rng.choice((None, 2)) if "recurrent" in self.groups else None
        """Fewer than a block's: vLLM finds parts of blocks."""
        self.retention = rng.choice((0, None, chunk * 2))
        """vLLM's `prefix_cache_retention_interval`."""
        self.adaptive = rng.random() < 0.5
        self.interrupts = rng.choice((0.0, 0.1, 0.4))  # how often another thread gets in between
        self.copies = rng.choice((1.0, 0.3, 0.05))
        """How often a copy job runs when it might; less: slow copies."""
        self.step_seconds = rng.choice((0.01, 1.0))
        self.arrivals = rng.choice((0.1, 0.3, 0.6))
        self.aborts = rng.choice((0.0, 0.02, 0.08))
        self.resets = rng.choice((0.0, 0.01, 0.04))
        self.forgets = rng.choice((0.0, 0.01, 0.1))
        self.flushes = rng.choice((0.0, 0.02))
        self.disk = rng.choice((None, "used twice", "all"))
        """What is saved."""
        self.damages = rng.choice((0.02, 0.3))
        self.adapters = rng.random() < 0.4
        self.transfers = rng.choice((1.0, 1.0, 0.2))
        """How often a fetch from a peer goes on when it might."""
        self.nearby = rng.choice((0.0, 0.5, 1.0))
        """How likely a peer that starts is on the same host."""
        self.lent = rng.choice((4, 12, 40))  # slots of such a peer's pool
        self.upsets = rng.choice((0.0, 0.05, 0.2))  # of such peers
