import pytest

from xinference_xavier.config import XavierConfig
from xinference_xavier.runtime.addresses import (
    join_address,
    reachable_address,
    split_address,
    without_brackets,
)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("10.0.0.1:80", "10.0.0.1", 80), ("node:80", "node", 80), ("fe80::1:80", "fe80::1", 80)],
)
def test_split_and_join_are_inverse(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


def test_brackets_are_only_for_people() -> None:
    assert split_address("[fe80::1]:80") == ("fe80::1", 80)
    assert without_brackets("[fe80::1]:80") == "fe80::1:80"
    assert XavierConfig("model", "[fe80::1]:80").tracker_address == "fe80::1:80"


@pytest.mark.parametrize("wrong", ["", "10.0.0.1", ":80", "node:", "node:x", "a:b:80", "::x:80"])
def test_what_is_not_host_and_port_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(wrong)


@pytest.mark.parametrize(
    ("address", "via", "reachable"),
    [
        ("10.0.0.1:80", "10.0.0.2:99", "10.0.0.1:80"),
        ("0.0.0.0:80", "10.0.0.2:99", "10.0.0.2:80"),
        ("[::]:80", "[fe80::1]:99", "fe80::1:80"),
        (":::80", "fe80::1:99", "fe80::1:80"),
        ("[fe80::1]:80", None, "fe80::1:80"),
        ("0.0.0.0:80", "node:99", "node:80"),
        ("0.0.0.0:80", "0.0.0.0:99", "127.0.0.1:80"),
        ("0.0.0.0:80", None, "127.0.0.1:80"),
        ("[::]:80", None, "::1:80"),
    ],
)
def test_a_wildcard_is_replaced_by_a_reachable_address(
    address: str, via: str | None, reachable: str
) -> None:
    assert reachable_address(address, via) == reachable
