"""Which chunks of this replica's pool its latest requests used most, for peers that start.

Threading: on the replica's background loop. Bounded: by requests, and by chunks of all of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.sweep import PORTION
from xinference_xavier.protocol.hot_chunks import MAX_HOT, HotChunks
from xinference_xavier.protocol.tracker import pack

MAX_REQUESTS = 1000
MAX_KEYS = 100_000
LEAST_USES = 2
"""What only one request had is not hot."""
_GROUP = slice(-4, None)  # the part of a key that is the number of its KV-cache group
_PAUSE = 1e-6  # seconds, in which other threads get Python's lock

Prompt = Sequence[bytes]
"""The keys of a prompt's chunks, group by group."""


class RecentPrompts:
    """`take_finished` returns the prompts of the requests that ended since its last call, `named`
    those of the named prefixes that are kept."""

    def __init__(
        self,
        pool: Pool,
        take_finished: Callable[[], Iterable[Prompt]],
        named: Callable[[], Iterable[Prompt]],
    ) -> None:
        self._pool = pool
        self._take_finished = take_finished
        self._named = named
        self._prompts: deque[Prompt] = deque()
        self._keys = 0

    def collect(self) -> None:
        """Call it now and then: what takes no more room is forgotten."""
        for prompt in self._take_finished():
            self._prompts.append(prompt)
            self._keys += len(prompt)
        while len(self._prompts) > MAX_REQUESTS or self._keys > MAX_KEYS:
            self._keys -= len(self._prompts.popleft())

    def hottest(self, most: int) -> HotChunks:
        """At most so many chunks that peers may fetch.

        A chunk is used by no more requests than the one before it, and no later. So each is behind
        the one before it, however the list is cut.
        """
        self.collect()
        uses: dict[bytes, int] = {}  # of the latest prompt first
        for prompt in reversed(self._prompts):
            for key in self._shared(prompt):
                uses[key] = uses.get(key, 0) + 1
        named = {key for prompt in self._named() for key in self._shared(prompt)}
        for prompt in self._named():
            uses.update((key, 0) for key in prompt if key in named and key not in uses)
        found = [key for key, count in uses.items() if key in named or count >= LEAST_USES]
        found.sort(key=lambda key: (key not in named, -uses[key]))
        del found[min(most, MAX_HOT) :]
        return HotChunks(
            pack(found), tuple(uses[key] for key in found), sum(key in named for key in found)
        )

    def _shared(self, prompt: Prompt) -> Iterator[bytes]:
        """The run of chunks of each group that peers may fetch. Where the model looks back only so
        far, it may begin behind the prompt's start."""
        begun: set[bytes] = set()
        ended: set[bytes] = set()
        for number, key in enumerate(prompt):
            if number % PORTION == 0:
                time.sleep(_PAUSE)
            group, row = key[_GROUP], self._pool.lookup(key)
            if group in ended:
                continue
            if row is not None and row.checksum is not None:
                begun.add(group)
                yield key
            elif group in begun:
                ended.add(group)
