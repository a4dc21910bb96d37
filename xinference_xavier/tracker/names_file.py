"""The file with the named prefixes of one model, beside the supervisor.

Each change writes all of them under another name, which then takes the file's place: it is whole at
any time, and what was removed is not in it. A lock keeps a second tracker from writing it, one of
another xinference with the same data folder.

Threading: one thread, because the disk may be slow or hang.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from xinference_xavier.protocol.prefixes import Terms

VERSION = 1
_MAX_NAME = 250
"""Bytes of a file's name, without its suffix: file systems take 255."""


@dataclass(slots=True)
class Prefix:
    id: str
    tenant: str
    """The `cache_salt` of its requests, or empty."""
    name: str
    terms: Terms
    created: float
    """Wall-clock seconds."""
    content: str
    """JSON; see `NewPrefix`."""
    used: float = field(default=0.0, compare=False)
    """Monotonic seconds; not in the file."""

    @property
    def expires(self) -> float:
        return self.used + self.terms.ttl


class NamesFile:
    """`folder` has a file per model."""

    def __init__(self, folder: Path, model_uid: str) -> None:
        name = quote(model_uid, safe="")  # three times as long, if it is Chinese
        if len(name) > _MAX_NAME:
            name = hashlib.sha256(model_uid.encode()).hexdigest()
        self.path = folder / f"{name}.json"
        self._scratch = self.path.with_suffix(".new")
        self._lock: int | None = None

    def open(self) -> list[Prefix]:
        """Read the file. Raises OSError, and ValueError for what it cannot read."""
        if not self.lock():
            raise OSError(
                f"another xinference uses {self.path}; give this one another XINFERENCE_HOME"
            )
        self._scratch.unlink(missing_ok=True)  # may have texts that were removed since
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return []
        try:
            found = json.loads(text)
            if found["version"] == VERSION:
                return [*map(_decoded, found["prefixes"])]
            reason = f"has version {found['version']}, and {VERSION} is known here"
        except (ValueError, KeyError, TypeError) as error:
            reason = f"is damaged ({error!r})"
        raise ValueError(f"{self.path} {reason}; mend it or move it away")

    def lock(self) -> bool:
        """True if it is ours alone, until `close`. Raises OSError."""
        if self._lock is not None:
            return True
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.path.with_suffix(".lock"), flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._lock = lock
        return True

    def write(self, prefixes: Iterable[Prefix]) -> None:
        """Write all prefixes. Raises OSError; then the file is as before, unless its folder cannot
        be written."""
        scratch = self._scratch
        scratch.unlink(missing_ok=True)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(scratch, flags, 0o600), "wb") as file:
                file.write(b'{"version": %d, "prefixes": [' % VERSION)
                for number, prefix in enumerate(prefixes):
                    file.write(b",\n" if number else b"\n")
                    file.write(_encoded(prefix))
                file.write(b"\n]}\n")
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self.path)
            _sync(self.path.parent)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Let others open it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sync(folder: Path) -> None:
    """A file's new name is on the disk once its folder is."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _encoded(prefix: Prefix) -> bytes:
    known = {
        "id": prefix.id,
        "tenant": prefix.tenant,
        "name": prefix.name,
        **prefix.terms._asdict(),
        "created": prefix.created,
    }
    # The content as it is: to encode megabytes anew would hold up the tracker.
    return f'{json.dumps(known)[:-1]}, "content": {prefix.content}}}'.encode()


def _decoded(known: dict[str, Any]) -> Prefix:
    terms = Terms(known["ttl"], known["copies"], known["retention"])
    content = json.dumps(known["content"])
    return Prefix(known["id"], known["tenant"], known["name"], terms, known["created"], content)
