"""Additions to xinference's launch, cancel, terminate and removal of a replica."""

from collections.abc import Awaitable, Callable
from typing import Any

from xinference_xavier.config import ENABLE, WITHOUT_US
from xinference_xavier.errors import ConfigError
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.serving import seam

Method = Callable[..., Awaitable[Any]]
"""A method of xinference's supervisor or worker."""


def is_off() -> ConfigError:
    """Why a launch cannot share where the extension is off."""
    missing = "; ".join(seam.missing())
    reason = f"is not possible here: xinference lacks what sharing uses ({missing})"
    return ConfigError(ENABLE, True, reason, f"install xinference 4.1, or {WITHOUT_US}")


def own_trackers(supervisor: Any) -> dict[str, Any]:
    """The trackers of the models that share. The built-in Xavier keeps its own there, too."""
    found = seam.trackers(supervisor).items()
    return {uid: tracker for uid, tracker in found if tracker.uid == tracker_uid(uid).encode()}
