"""Takes over the named prefixes that API processes kept before trackers did: in one SQLite file for
all models."""

import logging
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from xinference_xavier.protocol.prefixes import Terms
from xinference_xavier.tracker.names_file import NamesFile, Prefix

logger = logging.getLogger(__name__)

_ONE_AT_A_TIME = threading.Lock()


def take_over(former: Path, folder: Path) -> None:
    """Write the names of each model to its file in `folder`, unless there is one, and remove the
    `former` file. Raises OSError, sqlite3.Error."""
    with _ONE_AT_A_TIME:
        if not former.exists():
            return
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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for model_uid, prefixes in models.items():
            file = NamesFile(folder, model_uid)
            if not file.path.exists():
                file.write(prefixes)
        for suffix in ("", "-wal", "-shm"):
            former.with_name(f"{former.name}{suffix}").unlink(missing_ok=True)
        logger.info(
            "named prefixes taken over: from=%s to=%s names=%d models=%d",
            *(former, folder, len(rows), len(models)),
        )
