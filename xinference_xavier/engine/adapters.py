"""Digests of LoRA adapters' files, which tell their rows apart.

vLLM's chunk keys name an adapter, and since 0.31 its path, but not its content. An adapter that is
replaced on one host, or differs between hosts, would share rows under the same keys.

A digest must be that of the content which vLLM has loaded. vLLM loads an adapter before the first
step that needs it, or when it is told to. So the files are looked at before: their attributes tell
whether they are still those that were loaded. While nobody can tell, there is no digest, and the
adapter's rows are neither stored nor loaded.

vLLM loads an adapter after that look, and one that was replaced in place with each step. So what an
adapter has computed is shared once a later look has found its files unchanged (`Unconfirmed`).

vLLM's own prefix cache keeps the blocks of a replaced adapter and hands them to requests of the new
one. Such requests store nothing (`Adapter.replaces`).

What is known is bounded: a training run may have an adapter for each of its steps. An adapter that
was forgotten is not shared if it comes again, as nobody knows whether vLLM still has it.

Threading: the scheduler thread calls the methods, which return at once; a folder may be on a file
system that hangs. One thread looks at the files, another one reads them.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.lora.request import LoRARequest

from xinference_xavier.limits import LIMIT
from xinference_xavier.pool.pool import Row
from xinference_xavier.runtime.aio import DaemonThreads

logger = logging.getLogger(__name__)

_PREFIXES = ("adapter", "new_embeddings")  # of the files that vLLM loads
_PATIENCE = 1.0
"""Seconds that a request waits for a look at its adapter's files."""


_Version = tuple[tuple[str, int, int, int], ...]
"""(path, inode, size, time of the last change) of each file."""
_Name = tuple[str, str]
"""What vLLM's chunk keys have of an adapter: its name and its path."""


class Adapter:
    """One content of an adapter."""

    def __init__(self, name: _Name, version: _Version) -> None:
        self.name = name
        self.version = version
        self.content: bytes | None = None  # its digest
        self.changed = False
        """True if files changed after vLLM may have loaded them: then the content is unknown."""
        self.replaces = False
        """vLLM's own cache may hold blocks that another adapter of this name computed."""

    @property
    def digest(self) -> bytes | None:
        """32 bytes; None if unknown."""
        return None if self.changed else self.content


@dataclass(eq=False)
class Look:
    """One look at an adapter's files. Once `ended` is set, `adapter` is what was found.

    The scheduler thread sets `too_late` if vLLM may load the adapter before that. It does so after
    `deadline`, in seconds of its clock.
    """

    request: LoRARequest
    deadline: float
    adapter: Adapter | None = None
    too_late: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def is_awaited(self, now: float) -> bool:
        """True if vLLM must not load the adapter yet, not even for a prompt without a chunk."""
        if not (self.ended.is_set() or self.too_late):
            self.too_late = now >= self.deadline
            return not self.too_late
        return False

    @property
    def hangs(self) -> bool:
        return self.too_late and not self.ended.is_set()

    @property
    def digest(self) -> bytes | None:
        """32 bytes; None if unknown."""
        return None if self.adapter is None or self.too_late else self.adapter.digest

    @property
    def replaces(self) -> bool:
        return self.adapter is not None and self.adapter.replaces


class Unconfirmed(NamedTuple):
    """Rows that an adapter has computed, of whose files `before` and `after` are looks."""

    before: Look
    after: Look
    rows: list[Row]

    def has_answer(self, now: float) -> bool:
        return self.after.ended.is_set() or now >= self.after.deadline

    @property
    def is_confirmed(self) -> bool:
        """True if the files did not change meanwhile."""
        return self.after.digest is not None and self.after.adapter is self.before.adapter


class Adapters:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, Adapter] = {}  # by vLLM's number of the adapter, the latest last
        self._forgotten = 0
        """The highest number of an adapter that was forgotten."""
        self._cached: dict[_Name, _Version | None] = {}
        """The version that computed the blocks of a name in vLLM's own cache; None if unknown."""
        self._unlisted = False  # blocks of a name that is missing there
        self._looking = DaemonThreads(1, "xavier-adapter-files")
        self._reading = DaemonThreads(1, "xavier-adapters")
        self._latest: Look | None = None

    def look(self, request: LoRARequest) -> Look:
        """Look at the files that vLLM loads before it computes `request`, or has loaded."""
        look = Look(request, self._clock() + _PATIENCE)
        latest = self._latest
        look.too_late = latest is not None and latest.hangs
        self._latest = look
        self._looking.submit(self._look, look, request)
        return look

    def look_again(self, request: LoRARequest) -> None:
        """Notice a change since the request's own look, a little later."""
        if self._latest is None or self._latest.ended.is_set():
            self.look(request)

    def load(self, load: Callable[[LoRARequest], bool], request: LoRARequest) -> bool:
        """Have vLLM load the adapter before any request needs it."""
        look = self.look(request)
        look.too_late |= not look.ended.wait(0.0 if look.too_late else _PATIENCE)
        try:
            return load(request)
        finally:
            self.look_again(request)

    def forget_replaced(self, needed: Collection[int]) -> None:
        """vLLM's own prefix cache is empty. Requests that have not ended need these adapters."""
        self._looking.submit(self._forget_replaced, needed)

    # -- on the thread that looks ---------------------------------------------------------------

    def _forget_replaced(self, needed: Collection[int]) -> None:
        self._cached.clear()
        self._unlisted = False
        for adapter in self._known.values():
            adapter.replaces = False
        for number in self._known.keys() & needed:
            self._note(self._known[number])

    def _look(self, look: Look, request: LoRARequest) -> None:
        try:
            look.adapter = self._find(request, look)
            self._note(look.adapter)
        except Exception:
            logger.exception("cannot tell adapters apart; not shared: name=%s", request.lora_name)
        finally:
            look.ended.set()

    def _find(self, request: LoRARequest, look: Look) -> Adapter:
        version = _version(request.lora_path)
        adapter = self._known.pop(request.lora_int_id, None)
        if adapter is not None:
            self._known[request.lora_int_id] = adapter
            if adapter.version == version:
                return adapter
        if adapter is not None and not request.load_inplace:
            if not adapter.changed:
                logger.warning(
                    "adapter changed under the engine; its rows are no longer shared: name=%s",
                    request.lora_name,
                )
            adapter.changed = True
            return adapter
        if adapter is not None:
            adapter.changed = True  # running requests compute with both
        adapter = Adapter((request.lora_name, request.lora_path), version)
        self._known[request.lora_int_id] = adapter
        if len(self._known) > LIMIT:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._forgotten = max(self._forgotten, oldest)
        if request.lora_int_id <= self._forgotten:
            adapter.changed = True
            _warn("adapter may have been used before ten thousand others", request)
        elif look.too_late:
            adapter.changed = True
            _warn("adapter's files answer too slowly", request)
        elif version:
            self._reading.submit(self._read, adapter, request)
        else:
            _warn("adapter has no files here", request)
        return adapter

    def _note(self, adapter: Adapter) -> None:
        """vLLM's own cache will have blocks of the adapter."""
        if len(self._cached) >= LIMIT:
            self._cached.clear()
            self._unlisted = True
        version = None if self._unlisted or adapter.changed else adapter.version
        if self._cached.setdefault(adapter.name, version) != version or version is None:
            self._cached[adapter.name] = None
            for each in self._known.values():
                each.replaces |= each.name == adapter.name

    # -- on the thread that reads ---------------------------------------------------------------

    def _read(self, adapter: Adapter, request: LoRARequest) -> None:
        try:
            digest = hashlib.sha256()
            for path, *_ in adapter.version:
                with open(path, "rb") as file:
                    digest.update(os.path.basename(path).encode())
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            if _version(request.lora_path) == adapter.version:
                adapter.content = digest.digest()
        except OSError:
            _warn("cannot read adapter", request, exc_info=True)


def _warn(reason: str, request: LoRARequest, *, exc_info: bool = False) -> None:
    name, path = request.lora_name, request.lora_path
    text = "%s; its rows are not shared: name=%s path=%s"
    logger.warning(text, reason, name, path, exc_info=exc_info)


def salted(key: bytes, digest: bytes) -> bytes:
    """`key` for the rows of the adapter with `digest`. The group's number at its end stays."""
    size = len(key) - 4
    mixed = int.from_bytes(key[:size]) ^ int.from_bytes(digest[:size])
    return mixed.to_bytes(size) + key[size:]


def _version(folder: str) -> _Version:
    """Empty if there is no such folder."""
    try:
        files = [file for file in os.scandir(folder) if file.name.startswith(_PREFIXES)]
        stats = [(file.path, file.stat()) for file in files]
    except OSError:
        return ()
    return tuple(
        sorted((path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats)
    )
