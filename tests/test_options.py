"""Each launch option's values: which are accepted, which are refused, and the messages."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.config import ENABLE, parse_options, take_launch_options
from xinference_xavier.errors import ConfigError
from xinference_xavier.options import MAX_QUEUE, LaunchOptions

GiB = 1 << 30


def parsed(**options: Any) -> LaunchOptions:
    return parse_options(options)


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        take_launch_options({ENABLE: True, **options})
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "written", "value"),
    [
        ("pool_bytes", 4294967296, 4 * GiB),
        ("pool_bytes", "4294967296", 4 * GiB),
        ("pool_bytes", "4GiB", 4 * GiB),
        ("pool_bytes", "4 gib", 4 * GiB),
        ("pool_bytes", "512MiB", 512 << 20),
        ("pool_bytes", "2GB", 2_000_000_000),
        ("pool_bytes", "1.5GiB", 3 * GiB // 2),
        ("pool_bytes", "64kB", 64_000),
        ("pool_bytes", "1TiB", 1 << 40),
        ("pool_bytes", "100B", 100),
        ("hooks", "ops.pager:tell", "ops.pager:tell"),
        ("min_fetch_tokens", "0", 0),
        ("fetch_timeout", 5, 5.0),
        ("fetch_timeout", 0.25, 0.25),
        ("fetch_timeout", "0.25", 0.25),
        ("fetch_timeout", 3599, 3599.0),
        ("transport", "Gloo", "gloo"),
        ("transport", " shared_memory ", "shared_memory"),
        ("routing", "auto", "auto"),
        ("routing", " Backlog ", "backlog"),
        ("routing", "off", "off"),
        ("queue", 0, 0),
        ("queue", "0", 0),
        ("queue", "250", 250),
        ("queue", MAX_QUEUE, MAX_QUEUE),
        ("port_range", "40000-40100", (40000, 40100)),
        ("port_range", " 40000 - 40100 ", (40000, 40100)),
        ("port_range", [40000, 40100], (40000, 40100)),
        ("port_range", "40000-40002", (40000, 40002)),
        ("host", "10.0.0.1", "10.0.0.1"),
        ("host", "node-1.cluster", "node-1.cluster"),
        ("host", "fe80::1%eth0", "fe80::1%eth0"),
        ("host", "[::1]", "::1"),
        ("host", "10.0.0.0/8", "10.0.0.0/8"),
        ("host", " 10.1.2.3/8 ", "10.0.0.0/8"),
        ("host", "fd00::7/64", "fd00::/64"),
        ("roles", "prefill:1, decode:2", ("prefill", "decode", "decode")),
        ("roles", ["prefill", "decode"], ("prefill", "decode")),
    ],
)
def test_what_a_launch_may_write(option: str, written: object, value: object) -> None:
    assert getattr(parsed(**{f"xavier_{option}": written}), option) == value


@given(st.integers(min_value=1, max_value=1 << 60))
def test_every_byte_count_is_exact(size: int) -> None:
    assert parsed(xavier_pool_bytes=str(size)) == parsed(xavier_pool_bytes=size)
    assert parsed(xavier_pool_bytes=f"{size}KiB").pool_bytes == size << 10


NO_SIZES = ["4QiB", "GiB", "4.GiB", "-1", "1e9", "", "4 GiB extra", 1.5, True, [], "٤GiB"]
NO_TIMES = [0, -1, "nan", "inf", float("inf"), "5s", True, None.__class__, 10**400]
NO_ROUTINGS = ["fast", "", True, False, 1, [], ["auto"]]
NO_RANGES = ["30000", 30000, "a-b", [30000, "30001"], [1, 2, 3]]
REVERSED = ["30100-30000"]
RESERVED = ["80-90", "60000-70000"]
TOO_FEW = ["40000-40001"]
QUEUE = "use a number of requests from 0 to 100000"


@pytest.mark.parametrize(
    ("option", "wrong", "sentence"),
    [
        ("pool_bytes", NO_SIZES, "is not a size"),
        ("pool_bytes", [0, -1, "0", "0GiB", "0.1B"], "is too small; use a positive number"),
        ("chunk_tokens", [0, -128, "0", "many", 1.5, True, "12.5", []], "xavier_chunk_tokens="),
        ("hooks", ["ops.pager", "ops pager:tell", 7], "does not name a function"),
        ("min_fetch_tokens", [-1], "is too small; use a number of tokens"),
        ("fetch_timeout", NO_TIMES, "xavier_fetch_timeout="),
        # Peers refuse a longer one, and all fetches would fail.
        ("fetch_timeout", [3600], "is too large; use seconds above 0 and below"),
        ("transport", ["nccl", "my.fabric"], "use one of auto, gloo, nixl, shared_memory"),
        ("routing", NO_ROUTINGS, "is not a choice; use one of auto, backlog, off"),
        ("queue", [-1], f"is too small; {QUEUE}"),
        ("queue", [MAX_QUEUE + 1, "100001"], f"is too large; {QUEUE}"),
        ("queue", [1.5, "ten", []], f"is not a whole number; {QUEUE}"),
        ("queue", [True], f"is not a number; {QUEUE}"),
        ("port_range", NO_RANGES, "is not a range"),
        ("port_range", REVERSED, "ends below its start"),
        ("port_range", RESERVED, "is outside the ports that users may take"),
        ("port_range", TOO_FEW, "is too small for a replica's engine"),
        ("port_range", [*NO_RANGES, *REVERSED, *RESERVED, *TOO_FEW], "at least 3 ports"),
        ("host", ["10.0.0.0/33", "gpu-7/8", "http://gpu-7"], "is not a network"),
        ("host", ["0.0.0.0/0", "::/0"], "contains every address"),
        ("host", ["10.0.0.1:80"], "carries a port"),
        ("host", ["0.0.0.0", "::"], "not an address a peer can reach"),
        ("host", ["a b", 7], "is not a host"),
        ("disk", ["cache/xavier", 7], "is not an absolute path"),
        ("roles", ["", "prefill", 7], "is not a list of roles"),
        ("roles", ["encode:1,any:1"], "has an unknown role, encode"),
        ("roles", ["decode:100000"], "has more than 1000 replicas"),
        ("roles", ["prefill:2", ["prefill"]], "has no replica that answers"),
        ("pin_fraction", ["-0.1", "1.5", "half", "nan"], "use a part of the pool from 0 to 1"),
        ("warm_join", ["-1", "601", "soon", "nan"], "use seconds from 0 (off) to 600"),
        ("drain", ["-1", "3601", "soon", "nan"], "use seconds from 0 (off) to 3600"),
        ("audit", ["maybe"], "is neither true nor false"),
        ("untested_vllm", ["perhaps"], "is neither true nor false"),
    ],
)
def test_anything_else_is_refused_with_its_reason(
    option: str, wrong: list[object], sentence: str
) -> None:
    for value in wrong:
        assert sentence in refusal(**{f"xavier_{option}": value}), value
