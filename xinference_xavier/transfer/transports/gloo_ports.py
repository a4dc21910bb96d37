"""Makes the kernel give Gloo a port within a range: Gloo cannot be told which port to use.

The kernel chooses among the ephemeral ports: the lower half first, and in each half odd ports first
(`inet_csk_find_open_port`, for sockets with SO_REUSEADDR). So for some milliseconds we bind the
ports outside the range that the kernel would prefer.
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
    """Within this context, the kernel chooses a port between `low` and `high` on `host`.

    Another process may free a port outside at that moment, so check the port and try again.
    Raises TransportError if the kernel would choose none of them.
    """
    first, last = check_range(low, high)
    with _raised_file_limit(), ExitStack() as bound:
        try:
            found = any(
                _bind_all_except(host, ports, range(low, high + 1), bound)
                for ports in _in_kernel_order(first, last)
            )
        except OSError as error:
            raise TransportError(
                f"xavier_port_range={low}-{high} cannot be used for Gloo on host {host!r} "
                f"({error}); raise the limit of open files, or choose a range close to {first}"
            ) from None
        if not found:
            raise TransportError(
                f"xavier_port_range={low}-{high} has no free port for Gloo; choose another one"
            )
        yield


@contextmanager
def _raised_file_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _in_kernel_order(first: int, last: int) -> list[range]:
    half = first + (last + 1 - first) // 4 * 2
    return [
        range(start + parity, stop, 2)
        for start, stop in ((first, half), (half, last + 1))
        for parity in (1, 0)
    ]


def _bind_all_except(host: str, ports: range, wanted: range, bound: ExitStack) -> bool:
    """Bind those of `ports` that are not wanted. Returns whether a wanted one is free."""
    found = False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        with ExitStack() as brief:
            holder = bound if port not in wanted else brief
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
