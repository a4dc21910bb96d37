"""Threads on which xoscar serializes long messages.

xoscar serializes a message of more than a hundred parts on the default threads of the event loop;
Python allows four more of these than there are processors. xinference 4.1's
`xinference-supervisor` occupies six for its child processes for as long as it runs. On two
processors none is left, and whoever asks a tracker for much would wait forever.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

_MAX_THREADS = 32
"""Made when needed. A child process that is restarted occupies three of them."""


def provide_threads() -> None:
    """Give the running event loop default threads that nothing else occupies. The former ones
    finish their work and end."""
    executor = ThreadPoolExecutor(_MAX_THREADS, "xavier-messages")
    asyncio.get_running_loop().set_default_executor(executor)
