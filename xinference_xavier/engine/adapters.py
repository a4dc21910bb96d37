"""Digests of LoRA adapters' files, which tell their rows apart.

vLLM's chunk keys name an adapter, and since 0.31 its path, but not its content. An adapter that is
replaced on one host, or differs between hosts, would share rows under the same keys.

Threading: the scheduler thread calls `find`, which reads the files' attributes; a thread reads
their content. Until then, and when nobody can tell what vLLM has loaded, there is no digest, and
the adapter's rows are neither stored nor loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor

from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

_PREFIXES = ("adapter", "new_embeddings")  # of the files that vLLM loads

_Version = tuple[tuple[str, int, int, int], ...]
"""(path, inode, size, time of the last change) of each file."""


class Adapter:
    """An adapter as vLLM has loaded it."""

    def __init__(self, version: _Version) -> None:
        self.version = version
        self.content: bytes | None = None  # its digest
        self.changed = False
        """Its files changed after vLLM may have loaded them, so its content is unknown."""

    @property
    def digest(self) -> bytes | None:
        """32 bytes; None if unknown."""
        return None if self.changed else self.content


class Adapters:
    def __init__(self) -> None:
        self._loaded: dict[int, Adapter] = {}  # by vLLM's number of the adapter
        self._thread = ThreadPoolExecutor(1, "xavier-adapters")

    def find(self, request: LoRARequest) -> Adapter:
        version = _version(request.lora_path)
        adapter = self._loaded.get(request.lora_int_id)
        if adapter is not None and adapter.version == version:
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
        adapter = self._loaded[request.lora_int_id] = Adapter(version)
        if version:
            self._thread.submit(self._read, adapter, request)
        else:
            logger.warning(
                "adapter has no files here; its rows are not shared: name=%s path=%s",
                request.lora_name,
                request.lora_path,
            )
        return adapter

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
            logger.warning(
                "cannot read adapter; its rows are not shared: name=%s path=%s",
                request.lora_name,
                request.lora_path,
                exc_info=True,
            )


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
