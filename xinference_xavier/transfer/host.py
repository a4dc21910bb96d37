"""Which host a process is on, so that two can guess whether one may have the other's memory.

A peer's word for it is a hint. The proof is that handing the memory over works.
"""

import os
from pathlib import Path

from xinference_xavier.errors import OUT_OF_REACH, TransportError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def host_identity() -> str:
    """The kernel's boot, the network namespace, within which abstract sockets are found, and the
    user, to whom alone memory is handed over.

    Raises:
        TransportError: this system does not tell.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {_NETWORK.stat().st_ino} {os.getuid()}"
    except OSError as error:
        raise TransportError(f"this host cannot be told from others: {error}") from None


MEMORY_NOT_SHARED, DIFFERENCES = OUT_OF_REACH[0], OUT_OF_REACH[1:]
"""The latter in the order of an identity's parts."""


def difference(own: str, theirs: str | None) -> str | None:
    """Why a process there cannot hand its memory to us; None if it says that it can."""
    if theirs is None:
        return MEMORY_NOT_SHARED
    parts = zip(DIFFERENCES, own.split(" "), theirs.split(" "), strict=False)
    different = (name for name, ours, its in parts if ours != its)
    return None if own == theirs else next(different, DIFFERENCES[0])
