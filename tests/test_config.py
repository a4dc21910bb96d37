"""Launch options: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.config import (
    ENABLE,
    MAX_DEFAULT_POOL_BYTES,
    UPSTREAM_OPTIONS,
    LaunchOptions,
    XavierConfig,
    default_pool_bytes,
    take_launch_options,
)
from xinference_xavier.errors import ConfigError

GiB = 1 << 30


def parsed(**options: Any) -> dict[str, Any]:
    return dict(take_launch_options({ENABLE: True, **options}).values)


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        take_launch_options({ENABLE: True, **options})
    return str(caught.value)


@pytest.mark.parametrize("yes", [True, 1, "1", "true", "True", " TRUE ", "yes", "on"])
@pytest.mark.parametrize("name", ["enable_xavier", "enable-xavier"])
def test_enabled(name: str, yes: object) -> None:
    assert take_launch_options({name: yes}).enabled


@pytest.mark.parametrize("no", [False, 0, "0", "false", "False", "no", "off", None])
def test_text_that_says_no_means_no(no: object) -> None:
    """Upstream takes bool("false") for True, so it must be handed a real False."""
    kwargs = {"enable-xavier": no}
    assert not take_launch_options(kwargs).enabled
    assert kwargs == {ENABLE: False}


@pytest.mark.parametrize("neither", ["maybe", "", 2, 1.0, [], "tru"])
def test_what_is_neither_true_nor_false_is_refused(neither: object) -> None:
    assert "neither true nor false" in refusal(enable_xavier=neither)


def test_options_are_taken_out_in_both_spellings_and_others_stay() -> None:
    kwargs = {
        "enable-xavier": "true",
        "xavier-pool-bytes": "4GiB",
        "xavier_chunk_tokens": "256",
        "max_model_len": 16384,
    }
    options = take_launch_options(kwargs)
    assert options == LaunchOptions(True, {"pool_bytes": 4 * GiB, "chunk_tokens": 256})
    assert kwargs == {"max_model_len": 16384}


def test_the_same_option_in_both_spellings_is_refused() -> None:
    assert "given twice" in refusal(**{"xavier-transport": "gloo", "xavier_transport": "auto"})
    assert "contradicts itself" in refusal(**{"enable-xavier": False})


def test_none_means_not_given() -> None:
    assert parsed(xavier_pool_bytes=None, xavier_host=None) == {}


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
    assert "is not positive" in refusal(xavier_pool_bytes=wrong)


@given(st.integers(min_value=1, max_value=1 << 60))
def test_every_byte_count_is_exact(size: int) -> None:
    assert parsed(xavier_pool_bytes=str(size)) == parsed(xavier_pool_bytes=size)
    assert parsed(xavier_pool_bytes=f"{size}KiB") == {"pool_bytes": size << 10}


@pytest.mark.parametrize("wrong", [0, -128, "0", "many", 1.5, True, "12.0", []])
def test_chunk_tokens_are_a_positive_whole_number(wrong: object) -> None:
    assert "xavier_chunk_tokens=" in refusal(xavier_chunk_tokens=wrong)


def test_a_hook_is_named_by_module_and_function() -> None:
    assert parsed(xavier_hooks="ops.pager:tell") == {"hooks": "ops.pager:tell"}
    for wrong in ("ops.pager", "ops pager:tell", 7):
        assert "does not name a function" in refusal(xavier_hooks=wrong)


def test_min_fetch_tokens_may_be_zero_but_not_negative() -> None:
    assert parsed(xavier_min_fetch_tokens="0") == {"min_fetch_tokens": 0}
    assert "is negative" in refusal(xavier_min_fetch_tokens=-1)


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
    assert "is an hour or more" in refusal(xavier_fetch_timeout=3600)


def test_transports() -> None:
    assert parsed(xavier_transport="Gloo") == {"transport": "gloo"}
    assert parsed(xavier_transport=" shared_memory ") == {"transport": "shared_memory"}
    assert "use one of auto, gloo, shared_memory" in refusal(xavier_transport="nccl")


@pytest.mark.parametrize("ports", ["40000-40100", " 40000 - 40100 ", [40000, 40100]])
def test_port_range(ports: object) -> None:
    assert parsed(xavier_port_range=ports) == {"port_range": (40000, 40100)}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("30000", "is not a range"),
        (30000, "is not a range"),
        ("a-b", "is not a range"),
        ([30000, "30001"], "is not a range"),
        ([1, 2, 3], "is not a range"),
        ("30100-30000", "ends below its start"),
        ("80-90", "leaves the ports a user may take"),
        ("60000-70000", "leaves the ports a user may take"),
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
    ("wrong", "reason"),
    [
        ("10.0.0.1:80", "carries a port"),
        ("0.0.0.0", "not an address a peer can reach"),
        ("::", "not an address a peer can reach"),
        ("a b", "is not a host"),
        (7, "is not a host"),
    ],
)
def test_a_host_is_an_address_without_port_that_peers_can_reach(wrong: object, reason: str) -> None:
    assert reason in refusal(xavier_host=wrong)


def test_an_unknown_name_is_answered_with_the_nearest_known() -> None:
    assert refusal(xavier_pool_size=1) == (
        "xavier_pool_size=1 is not an option; did you mean xavier_pool_bytes?"
    )
    assert "did you mean xavier_fetch_timeout?" in refusal(**{"xavier-timeout": 1})


def test_a_refusal_names_value_reason_and_remedy_in_one_sentence() -> None:
    assert refusal(xavier_pool_bytes="4QiB") == (
        "xavier_pool_bytes='4QiB' is not a size; "
        "use a positive number of bytes or a size like 4GiB or 512MiB"
    )


@pytest.mark.parametrize("name", sorted(UPSTREAM_OPTIONS))
def test_upstream_options_exclude_ours(name: str) -> None:
    assert "built into xinference, which excludes this one" in refusal(**{name: 1})


@pytest.mark.parametrize("off", [{}, {ENABLE: False}, {ENABLE: "false"}])
def test_upstream_options_stay_untouched_without_ours(off: dict[str, Any]) -> None:
    upstream = dict.fromkeys(UPSTREAM_OPTIONS, 1) | {"xavier_new_upstream_option": 2}
    kwargs = {**upstream, **off}
    take_launch_options(kwargs)
    assert {name: kwargs[name] for name in upstream} == upstream
    assert kwargs.get(ENABLE, False) is False


def test_our_options_without_enable_are_dropped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kwargs: dict[str, Any] = {"xavier-pool-bytes": "nonsense", "dtype": "float32"}
    assert not take_launch_options(kwargs).enabled
    assert kwargs == {"dtype": "float32"}
    assert "xavier-pool-bytes ignored" in caplog.text


def test_a_refusal_leaves_the_arguments_as_they_were() -> None:
    kwargs = {ENABLE: "true", "xavier_pool_bytes": "1GiB", "xavier_transport": "nccl"}
    before = dict(kwargs)
    with pytest.raises(ConfigError):
        take_launch_options(kwargs)
    assert kwargs == before


def test_config_survives_json() -> None:
    config = LaunchOptions(True, parsed(xavier_port_range="40000-40100")).config(
        model_uid="m", tracker_address="10.0.0.1:9999", replicas_per_host=2
    )
    assert config.port_range == (40000, 40100)
    assert XavierConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_config_refuses_what_it_does_not_know() -> None:
    plain = XavierConfig("m", "10.0.0.1:9999").to_dict()
    with pytest.raises(ConfigError, match="is not known to this version"):
        XavierConfig.from_dict({**plain, "colour": "red"})
    del plain["model_uid"]
    with pytest.raises(ConfigError, match="model_uid"):
        XavierConfig.from_dict(plain)


def test_default_pool_is_a_tenth_of_free_memory_shared_by_the_replicas() -> None:
    assert default_pool_bytes(1, free=100 * GiB) == 10 * GiB
    assert default_pool_bytes(4, free=100 * GiB) == 10 * GiB // 4
    assert default_pool_bytes(1, free=1000 * GiB) == MAX_DEFAULT_POOL_BYTES
    assert 0 < default_pool_bytes(2) <= MAX_DEFAULT_POOL_BYTES
