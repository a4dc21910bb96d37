"""Makes the kernel choose a port within a range, for who cannot be told one.

Gloo listens on whatever port the kernel gives it. The kernel takes it from the ephemeral ports,
those of the lower half first and among them the odd ones first (`inet_csk_find_open_port`, for
sockets with SO_REUSEADDR). So we occupy, for the milliseconds that it takes, those outside the
range that would be preferred to one inside.
"""

import errno
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from xinference_xavier.errors import TransportError
from xinference_xavier.runtime.net import check_range


@contextmanager
def only_free_ports(host: str, low: int, high: int) -> Iterator[None]:
    """While entered, the port that the kernel chooses on `host` is one of `low` to `high`.

    Or one that somebody gives up at that very moment: look, and if need be, try again.

    Raises:
        TransportError: there is none that the kernel would choose.
    """
    first, last = check_range(low, high)
    with _many_open_files(), ExitStack() as occupied:
        try:
            found = any(
                _occupy_all_but(host, ports, range(low, high + 1), occupied)
                for ports in _in_order_of_preference(first, last)
            )
        except OSError as error:
            raise TransportError(
                f"xavier_port_range={low}-{high} cannot be forced upon Gloo on host {host!r} "
                f"({error}); raise the limit of open files, or choose a range close to {first}"
            ) from None
        if not found:
            raise TransportError(
                f"xavier_port_range={low}-{high} has no free port for Gloo; choose another one"
            )
        yield


@contextmanager
def _many_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _in_order_of_preference(first: int, last: int) -> list[range]:
    half = first + (last + 1 - first) // 4 * 2
    return [
        range(start + parity, stop, 2)
        for start, stop in ((first, half), (half, last + 1))
        for parity in (1, 0)
    ]


def _occupy_all_but(host: str, ports: range, wanted: range, occupied: ExitStack) -> bool:
    """Whether one of `ports` is wanted and free; the others of them are occupied now."""
    found = False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        with ExitStack() as brief:
            holder = occupied if port not in wanted else brief
            blocker = holder.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                blocker.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                blocker.close()
            else:
                found = found or port in wanted
    return found
