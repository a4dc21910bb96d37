"""Gloo listens on a port that the kernel chooses; here the kernel can only choose from a range."""

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from xinference_xavier.errors import TransportError
from xinference_xavier.runtime.net import _ephemeral_ports
from xinference_xavier.transfer.transports.gloo import _PORT_ATTEMPTS, only_free_ports

pytestmark = pytest.mark.process

HOST = "127.0.0.1"
FIRST, LAST = _ephemeral_ports()


def like_gloos() -> socket.socket:
    """A socket with Gloo's options."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return server


def chosen_port(low: int, high: int) -> int:
    """The port that the kernel chooses for a socket like Gloo's, tried as often as for Gloo."""
    with ExitStack() as misfits:
        for _ in range(_PORT_ATTEMPTS):
            server = misfits.enter_context(like_gloos())
            server.bind((HOST, 0))
            port = int(server.getsockname()[1])
            if low <= port <= high:
                break
    return port


@pytest.mark.parametrize("offset", [100, 5001, 9000])
@pytest.mark.parametrize("width", [40, 200])
def test_the_kernel_chooses_from_the_range(offset: int, width: int) -> None:
    low, high = FIRST + offset, FIRST + offset + width - 1
    with only_free_ports(HOST, low, high):
        assert all(low <= chosen_port(low, high) <= high for _ in range(20))


def taken_port(start: int) -> tuple[int, socket.socket]:
    """The first free port of `start`, `start` + 2, …, and the socket that now has it."""
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


def test_a_single_port_of_the_less_preferred_parity_can_be_chosen() -> None:
    """Another process may take it, as its own choice is occupied; so one of several must do."""
    given = []
    for start in range(FIRST + 2000, FIRST + 12000, 2000):
        port, taken = taken_port(start)
        taken.close()
        with only_free_ports(HOST, port, port):
            given.append(chosen_port(port, port) == port)
    assert any(given)


def test_taken_ports_of_the_range_are_passed_over() -> None:
    port, taken = taken_port(FIRST + 6001)
    with taken:
        with only_free_ports(HOST, port, port + 20):
            assert port < chosen_port(port, port + 20) <= port + 20
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
        "from xinference_xavier.transfer.transports.gloo import only_free_ports\n"
        f"with only_free_ports({HOST!r}, {LAST - 1}, {LAST}): pass"
    )
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"TransportError: xavier_port_range={LAST - 1}-{LAST}" in refused.stderr
    assert "raise the limit of open files" in refused.stderr


def test_no_port_is_occupied_afterwards() -> None:
    with only_free_ports(HOST, FIRST + 3000, FIRST + 3003):
        pass
    assert len({chosen_port(FIRST, LAST) for _ in range(50)}) > 4


def test_the_usual_limit_of_open_files_suffices_and_stays() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with only_free_ports(HOST, FIRST + 3000, FIRST + 3003):
            low, high = FIRST + 3000, FIRST + 3003
            assert low <= chosen_port(low, high) <= high
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
