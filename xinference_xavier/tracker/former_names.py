"""Takes over the named prefixes that API processes kept before trackers did: in one SQLite file for
all models."""

import logging
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from xinference_xavier.protocol.prefixes import Terms
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.tracker.names_file import NamesFile, Prefix

logger = logging.getLogger(__name__)

_ONE_AT_A_TIME = threading.Lock()
_log = RateLimitedLog(logger)  # used with the lock


def take_over(former: Path, folder: Path) -> None:
    """Write the names of each model to its file in `folder`, unless there is one, and remove the
    `former` file. A failure is logged: it costs the former names, not those in the model's file."""
    with _ONE_AT_A_TIME:
        try:
            if former.exists():
                _take_over(former, folder)
        except (OSError, sqlite3.Error) as error:
            _log.warn(
                str(former),
                "former named prefixes cannot be taken over: path=%s error=%r; free space, mend "
                "the file or move it away, and launch the model again",
                *(former, error),
            )


def _take_over(former: Path, folder: Path) -> None:
    with closing(sqlite3.connect(former)) as connection:
        rows = connection.execute(
            "SELECT model_uid, id, tenant, name, ttl, copies, retention, created, content"
            " FROM prefixes WHERE used + ttl > ? ORDER BY created",
            (time.time(),),
        ).fetchall()
    models: dict[str, list[Prefix]] = {}
    for model_uid, id_, tenant, name, ttl, copies, retention, created, content in rows:
        terms = Terms(ttl, "all" if copies == "all" else 1, retention)
        prefix = Prefix(id_, tenant, name, terms, created, content)
        models.setdefault(model_uid, []).append(prefix)
    taken = [_take(NamesFile(folder, uid), names) for uid, names in models.items()]
    if not all(taken):
        return
    for suffix in ("", "-wal", "-shm"):
        former.with_name(f"{former.name}{suffix}").unlink(missing_ok=True)
    logger.info(
        "named prefixes taken over: from=%s to=%s names=%d models=%d",
        *(former, folder, len(rows), len(models)),
    )


def _take(file: NamesFile, prefixes: list[Prefix]) -> bool:
    """False while the model's tracker has the file; its next one takes them over."""
    if not file.lock():
        return False
    try:
        if not file.path.exists():
            file.write(prefixes)
    finally:
        file.close()
    return True
