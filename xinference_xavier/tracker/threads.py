"""Threads for long messages.

xoscar serializes a message of more than a hundred parts on the default threads of the event loop,
of which there are as many as processors and four. xinference 4.1's `xinference-supervisor` keeps
six of them for its child processes for as long as it runs: with two processors none is left, and
whoever asks a tracker there for much would wait for ever.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

_MOST = 32
"""Threads; each is made when it is needed. A child that is started anew takes three of them."""


def provide_threads() -> None:
    """The running event loop gets default threads that nobody else has taken. Those it had finish
    what they have been given, and end."""
    executor = ThreadPoolExecutor(_MOST, "xavier-messages")
    asyncio.get_running_loop().set_default_executor(executor)
