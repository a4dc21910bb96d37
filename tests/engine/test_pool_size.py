"""A pool is by default as large as its engine's KV cache, within a share of the free memory."""

from __future__ import annotations

import pytest

from xinference_xavier.config import XavierConfig
from xinference_xavier.engine.pool_size import MIN_ROWS, rows_of
from xinference_xavier.errors import ConfigError

MiB, GiB = 1 << 20, 1 << 30


def gib(
    *,
    cache: float,
    free: float,
    replicas: int = 1,
    engines: int = 1,
    workers: int = 1,
    row: int = MiB,
    given: float | None = None,
) -> float:
    """The size of a pool in GiB, as are `cache`, `free` and `given`."""
    config = XavierConfig(
        "m",
        "127.0.0.1:1",
        pool_bytes=None if given is None else round(given * GiB),
        replicas_per_host=replicas,
        engines=engines,
    )
    rows = rows_of(
        config,
        row_bytes=row,
        cache_rows=round(cache * GiB / row),
        workers=workers,
        free=round(free * GiB),
    )
    return rows * row / GiB


@pytest.mark.parametrize(
    ("cache", "free", "replicas", "workers", "row", "size"),
    [
        pytest.param(56, 1900, 8, 1, 7 * MiB, 56, id="8 H100, one each for a 7B model"),
        pytest.param(140, 1900, 2, 4, 40 * MiB, 140, id="8 H100, four each for a 72B model"),
        pytest.param(56, 800, 8, 1, 7 * MiB, 25 * 512 / 522, id="8 H100, little memory"),
        pytest.param(4, 16, 2, 1, MiB, 2 * 512 / 516, id="processors, whose memory has the cache"),
        pytest.param(1, 16, 2, 1, MiB, 1, id="processors, a small cache"),
        pytest.param(4, 2, 1, 1, MiB, 0.5 * 512 / 515, id="a small container"),
    ],
)
def test_the_cache_or_a_share_of_a_quarter_of_the_free_memory(
    cache: float, free: float, replicas: int, workers: int, row: int, size: float
) -> None:
    """Page tables take 1/512 for each process: the workers, the engine, and the transfer processes
    of all replicas."""
    found = gib(cache=cache, free=free, replicas=replicas, workers=workers, row=row)
    assert 0 <= size - found < row / GiB * 1.01


def test_the_engines_of_a_replica_share_its_part() -> None:
    assert gib(cache=9, free=64, replicas=2, engines=2) == gib(cache=9, free=64, replicas=4)
    assert gib(cache=9, free=64, engines=2, given=8) == 4


@pytest.mark.parametrize("given", [0.5, 4, 12])
def test_a_given_size_is_taken_whatever_cache_and_quarter_are(given: float) -> None:
    assert gib(cache=2, free=16, given=given) == given


@pytest.mark.parametrize(("cache", "free"), [(0, 64), (4, 17 / 1024)])
def test_a_pool_is_large_enough_to_work_if_memory_allows(cache: float, free: float) -> None:
    assert gib(cache=cache, free=free) == MIN_ROWS / 1024


@pytest.mark.parametrize("given", [None, 16 / 1024])
def test_a_pool_needs_its_memory_with_the_page_tables(given: float | None) -> None:
    with pytest.raises(ConfigError) as refused:
        gib(cache=4, free=16 / 1024, given=given)
    assert str(refused.value).startswith(f"xavier_pool_bytes={16 * MiB} takes ")


def test_a_refusal_names_the_least_size_in_the_option_s_units() -> None:
    with pytest.raises(ConfigError, match=f"use at least {2 * MIN_ROWS * MiB}$"):
        gib(cache=4, free=64, engines=2, given=31 / 1024)
