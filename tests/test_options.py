"""Each launch option's values: which are accepted, which are refused, and the messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launch_options import parsed, refusal
from xinference_xavier.options import MAX_QUEUE

GiB = 1 << 30


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (4294967296, 4 * GiB),
        ("4294967296", 4 * GiB),
        ("4GiB", 4 * GiB),
        ("4 gib", 4 * GiB),
        ("512MiB", 512 << 20),
        ("2GB", 2_000_000_000),
        ("1.5GiB", 3 * GiB // 2),
        ("64kB", 64_000),
        ("1TiB", 1 << 40),
        ("100B", 100),
    ],
)
def test_sizes(written: object, size: int) -> None:
    assert parsed(xavier_pool_bytes=written) == {"pool_bytes": size}


@pytest.mark.parametrize(
    "wrong", ["4QiB", "GiB", "4.GiB", "-1", "1e9", "", "4 GiB extra", 1.5, True, [], "٤GiB"]
)
def test_malformed_sizes_are_refused(wrong: object) -> None:
    assert "is not a size" in refusal(xavier_pool_bytes=wrong)


@pytest.mark.parametrize("wrong", [0, -1, "0", "0GiB", "0.1B"])
def test_sizes_are_positive(wrong: object) -> None:
    assert "is too small; use a positive number" in refusal(xavier_pool_bytes=wrong)


@given(st.integers(min_value=1, max_value=1 << 60))
def test_every_byte_count_is_exact(size: int) -> None:
    assert parsed(xavier_pool_bytes=str(size)) == parsed(xavier_pool_bytes=size)
    assert parsed(xavier_pool_bytes=f"{size}KiB") == {"pool_bytes": size << 10}


@pytest.mark.parametrize("wrong", [0, -128, "0", "many", 1.5, True, "12.5", []])
def test_chunk_tokens_are_a_positive_whole_number(wrong: object) -> None:
    assert "xavier_chunk_tokens=" in refusal(xavier_chunk_tokens=wrong)


def test_a_hook_is_named_by_module_and_function() -> None:
    assert parsed(xavier_hooks="ops.pager:tell") == {"hooks": "ops.pager:tell"}
    for wrong in ("ops.pager", "ops pager:tell", 7):
        assert "does not name a function" in refusal(xavier_hooks=wrong)


def test_min_fetch_tokens_may_be_zero_but_not_negative() -> None:
    assert parsed(xavier_min_fetch_tokens="0") == {"min_fetch_tokens": 0}
    assert "is too small; use a number of tokens" in refusal(xavier_min_fetch_tokens=-1)


@pytest.mark.parametrize("seconds", [5, 0.25, "0.25", "5"])
def test_fetch_timeout_is_in_seconds(seconds: Any) -> None:
    assert parsed(xavier_fetch_timeout=seconds) == {"fetch_timeout": float(seconds)}


@pytest.mark.parametrize(
    "wrong", [0, -1, "nan", "inf", float("inf"), "5s", True, None.__class__, 10**400]
)
def test_fetch_timeout_is_positive_and_finite(wrong: object) -> None:
    assert "xavier_fetch_timeout=" in refusal(xavier_fetch_timeout=wrong)


def test_fetch_timeout_is_less_than_an_hour() -> None:
    """Peers refuse a longer one, and all fetches would fail."""
    assert parsed(xavier_fetch_timeout=3599) == {"fetch_timeout": 3599.0}
    assert "is too large; use seconds above 0 and below" in refusal(xavier_fetch_timeout=3600)


def test_transports() -> None:
    assert parsed(xavier_transport="Gloo") == {"transport": "gloo"}
    assert parsed(xavier_transport=" shared_memory ") == {"transport": "shared_memory"}
    assert "use one of auto, gloo, shared_memory" in refusal(xavier_transport="nccl")


@pytest.mark.parametrize("routing", ["auto", "backlog", "off"])
def test_routing(routing: str) -> None:
    assert parsed(xavier_routing=routing) == {"routing": routing}
    assert parsed(xavier_routing=f" {routing.capitalize()} ") == {"routing": routing}


@pytest.mark.parametrize("wrong", ["fast", "", True, False, 1, [], ["auto"]])
def test_routing_is_one_of_a_few_ways(wrong: object) -> None:
    message = refusal(xavier_routing=wrong)
    assert "is not a choice; use one of auto, backlog, off" in message


@pytest.mark.parametrize(("written", "length"), [(0, 0), ("0", 0), ("250", 250), (MAX_QUEUE,) * 2])
def test_queue_is_a_number_of_requests(written: object, length: int) -> None:
    assert parsed(xavier_queue=written) == {"queue": length}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (-1, "is too small"),
        (MAX_QUEUE + 1, "is too large"),
        ("100001", "is too large"),
        (1.5, "is not a whole number"),
        ("ten", "is not a whole number"),
        (True, "is not a number"),
        ([], "is not a whole number"),
    ],
)
def test_queue_has_a_bound(wrong: object, reason: str) -> None:
    message = refusal(xavier_queue=wrong)
    assert f"{reason}; use a number of requests from 0 to 100000" in message


@pytest.mark.parametrize("ports", ["40000-40100", " 40000 - 40100 ", [40000, 40100]])
def test_port_range(ports: object) -> None:
    assert parsed(xavier_port_range=ports) == {"port_range": (40000, 40100)}


def test_port_range_may_have_no_more_than_three_ports() -> None:
    assert parsed(xavier_port_range="40000-40002") == {"port_range": (40000, 40002)}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("30000", "is not a range"),
        (30000, "is not a range"),
        ("a-b", "is not a range"),
        ([30000, "30001"], "is not a range"),
        ([1, 2, 3], "is not a range"),
        ("30100-30000", "ends below its start"),
        ("80-90", "is outside the ports that users may take"),
        ("60000-70000", "is outside the ports that users may take"),
        ("40000-40001", "is too small for a replica's engine"),
    ],
)
def test_port_range_needs_three_ports_that_a_user_may_take(wrong: object, reason: str) -> None:
    message = refusal(xavier_port_range=wrong)
    assert reason in message
    assert "at least 3 ports" in message


@pytest.mark.parametrize("host", ["10.0.0.1", "node-1.cluster", "fe80::1%eth0"])
def test_host(host: str) -> None:
    assert parsed(xavier_host=host) == {"host": host}


def test_a_bracketed_host_loses_its_brackets() -> None:
    assert parsed(xavier_host="[::1]") == {"host": "::1"}


@pytest.mark.parametrize(
    ("given", "network"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        (" 10.1.2.3/8 ", "10.0.0.0/8"),
        ("fd00::7/64", "fd00::/64"),
    ],
)
def test_a_host_may_be_a_network(given: str, network: str) -> None:
    assert parsed(xavier_host=given) == {"host": network}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("10.0.0.0/33", "is not a network"),
        ("gpu-7/8", "is not a network"),
        ("0.0.0.0/0", "contains every address"),
        ("::/0", "contains every address"),
        ("10.0.0.1:80", "carries a port"),
        ("0.0.0.0", "not an address a peer can reach"),
        ("::", "not an address a peer can reach"),
        ("a b", "is not a host"),
        (7, "is not a host"),
    ],
)
def test_a_host_is_an_address_without_port_that_peers_can_reach(wrong: object, reason: str) -> None:
    assert reason in refusal(xavier_host=wrong)


def test_roles_are_numbers_of_replicas() -> None:
    roles = ("prefill", "decode", "decode")
    assert parsed(xavier_roles="prefill:1, decode:2") == {"roles": roles}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("", "is not a list of roles"),
        ("prefill", "is not a list of roles"),
        (["prefill"], "is not a list of roles"),
        ("encode:1,any:1", "has an unknown role, encode"),
        ("decode:100000", "has more than 1000 replicas"),
        ("prefill:2", "has no replica that answers"),
    ],
)
def test_malformed_roles_are_refused(wrong: object, reason: str) -> None:
    assert reason in refusal(xavier_roles=wrong)


@pytest.mark.parametrize("wrong", [-1, "1.5", "many", True])
def test_a_prefill_threshold_is_a_number_of_tokens(wrong: object) -> None:
    assert "xavier_prefill_threshold=" in refusal(xavier_prefill_threshold=wrong)
