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


def like_gloos() -> socket.socket:
    """A socket that a server makes."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return server


def chosen_port() -> int:
    """What the kernel gives to a socket like Gloo's."""
    with like_gloos() as server:
        server.bind((HOST, 0))
        return int(server.getsockname()[1])


@pytest.mark.parametrize("offset", [100, 5001, 9000])
@pytest.mark.parametrize("width", [4, 200])
def test_the_kernel_chooses_from_the_range(offset: int, width: int) -> None:
    low, high = FIRST + offset, FIRST + offset + width - 1
    with only_free_ports(HOST, low, high):
        assert all(low <= chosen_port() <= high for _ in range(20))


def taken_port(start: int) -> tuple[int, socket.socket]:
    """The first of `start`, `start` + 2, … that can be had, and who has it now."""
    for port in range(start, start + 1000, 2):
        taken = like_gloos()
        try:
            taken.bind((HOST, port))
        except OSError:
            taken.close()
            continue
        taken.listen()
        return port, taken
    raise AssertionError("no port is free")


def test_the_port_of_a_connection_that_has_just_ended_is_no_way_out() -> None:
    """Somebody else can have it only with SO_REUSEADDR, and Gloo asks with that."""
    port, server = taken_port(FIRST + 8001)
    with server, socket.create_connection((HOST, port)):
        server.accept()[0].close()  # who closes first keeps the port in TIME_WAIT
    with only_free_ports(HOST, port + 2, port + 201):
        with socket.socket() as plain, pytest.raises(OSError, match="in use"):
            plain.bind((HOST, port))
        with like_gloos() as another, pytest.raises(OSError, match="in use"):
            another.bind((HOST, port))


def test_a_single_port_of_the_less_liked_parity_can_be_had() -> None:
    port, taken = taken_port(FIRST + 2000)
    taken.close()
    with only_free_ports(HOST, port, port):
        assert chosen_port() == port


def test_taken_ports_of_the_range_are_passed_over() -> None:
    port, taken = taken_port(FIRST + 6001)
    with taken:
        with only_free_ports(HOST, port, port + 20):
            assert port < chosen_port() <= port + 20
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
