"""Gloo listens where the kernel chooses; here the kernel has no other choice."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys

import pytest

from xinference_xavier.errors import TransportError
from xinference_xavier.transfer.free_ports import _ephemeral_ports, only_free_ports

HOST = "127.0.0.1"
FIRST, LAST = _ephemeral_ports()


def chosen_port() -> int:
    """What the kernel gives to a socket like Gloo's."""
    with socket.socket() as like_gloos:
        like_gloos.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        like_gloos.bind((HOST, 0))
        return int(like_gloos.getsockname()[1])


@pytest.mark.parametrize("offset", [100, 5001, 9000])
@pytest.mark.parametrize("width", [4, 200])
def test_the_kernel_chooses_from_the_range(offset: int, width: int) -> None:
    low, high = FIRST + offset, FIRST + offset + width - 1
    with only_free_ports(HOST, low, high):
        assert all(low <= chosen_port() <= high for _ in range(20))


def test_a_single_port_of_the_less_liked_parity_can_be_had() -> None:
    for port in range(FIRST + 2000, FIRST + 2200, 2):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        with only_free_ports(HOST, port, port):
            assert chosen_port() == port
        return
    raise AssertionError("no even port is free")


def test_taken_ports_of_the_range_are_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with only_free_ports(HOST, port, min(port + 20, LAST)):
            assert chosen_port() != port
        with (
            pytest.raises(TransportError, match=rf"={port}-{port} (has no free port|cannot)"),
            only_free_ports(HOST, port, port),
        ):
            pass


@pytest.mark.parametrize(("low", "high"), [(1024, FIRST - 1), (LAST + 1, 65535)])
def test_a_range_outside_the_ephemeral_ports_is_refused_with_the_remedy(
    low: int, high: int
) -> None:
    with (
        pytest.raises(TransportError, match=r"choose a range inside .*ip_local_port_range"),
        only_free_ports(HOST, low, high),
    ):
        pass


def test_too_few_open_files_are_an_error_with_the_remedy() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))\n"
        "from xinference_xavier.transfer.free_ports import only_free_ports\n"
        f"with only_free_ports({HOST!r}, {LAST - 1}, {LAST}): pass"
    )
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"TransportError: xavier_port_range={LAST - 1}-{LAST}" in refused.stderr
    assert "raise the limit of open files" in refused.stderr


def test_nothing_is_occupied_afterwards() -> None:
    with only_free_ports(HOST, FIRST + 3000, FIRST + 3003):
        pass
    assert len({chosen_port() for _ in range(50)}) > 4


def test_the_usual_limit_of_open_files_is_no_obstacle_and_stays() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with only_free_ports(HOST, FIRST + 3000, FIRST + 3003):
            assert FIRST + 3000 <= chosen_port() <= FIRST + 3003
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
