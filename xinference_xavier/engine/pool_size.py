"""How many rows a pool has. Pure.

By default it has as many as the engine's own KV cache takes, but the launch's pools on this host
take at most a quarter of the free memory. Page tables count: 8 bytes for each page of 4 KiB, in
every process that maps the pool.
"""

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import ConfigError

MIN_ROWS = 16
_PARTS = 4  # of the free memory; by default, the pools take one
_BYTES_PER_TABLE_BYTE = 512


def rows_of(
    config: XavierConfig, *, row_bytes: int, cache_rows: int, workers: int, free: int
) -> int:
    """The rows of one engine's pool, with `free` bytes of memory and vLLM's `workers`.

    Raises:
        ConfigError: the pool is too small to work with, or larger than the free memory.
    """
    here = config.replicas_per_host * config.engines
    # Mapped by the workers, the engine, and the transfer processes of all engines here.
    mappings = workers + 1 + here
    mapped_bytes = row_bytes + -(-mappings * row_bytes // _BYTES_PER_TABLE_BYTE)
    given = config.pool_bytes
    if given is None:
        rows = max(MIN_ROWS, min(cache_rows, free // _PARTS // here // mapped_bytes))
    else:
        rows = given // config.engines // row_bytes
        if rows < MIN_ROWS:
            raise ConfigError(
                "xavier_pool_bytes",
                given,
                f"holds {rows} chunks of {row_bytes} bytes, fewer than {MIN_ROWS}",
                f"use at least {MIN_ROWS * row_bytes * config.engines}",
            )
    needed = rows * mapped_bytes
    if needed > free:
        raise ConfigError(
            "xavier_pool_bytes",
            given or rows * row_bytes,
            f"takes {needed} bytes with its page tables, more than the {free} that are free",
            "use less, or leave it out, or give the host or the container more memory",
        )
    return rows
