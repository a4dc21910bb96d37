"""The token that `xinference login` has stored, which is for one endpoint and expires."""

import hashlib
import os
from pathlib import Path


def stored_token(endpoint: str) -> str | None:
    """The token for exactly this endpoint, as xinference's own commands find it."""
    home = Path(os.environ.get("XINFERENCE_HOME") or Path.home() / ".xinference")
    file = home / "auth" / hashlib.sha256(endpoint.encode()).hexdigest()
    try:
        return file.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None
