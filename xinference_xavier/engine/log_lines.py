"""Where our log lines go in an engine's process.

vLLM sets up its own logger there and nothing else, so that lines of others would be lost below
WARNING and bare from there on.
"""

from __future__ import annotations

import logging


def log_like_vllm() -> None:
    """Ours go where vLLM's go, unless somebody has said where ours go. Idempotent."""
    follow(logging.getLogger("xinference_xavier"), logging.getLogger("vllm"))


def follow(ours: logging.Logger, vllms: logging.Logger) -> None:
    if ours.hasHandlers() or not vllms.handlers:
        return
    for handler in vllms.handlers:
        ours.addHandler(handler)
    ours.setLevel(vllms.level)
