"""What a replica and its tracker agree on, beside what the index is made of."""

from __future__ import annotations

from typing import NamedTuple

from xinference_xavier.checks import shown

PROTOCOL_VERSION = 1
"""Of what a replica and its tracker say to each other."""


def tracker_uid(model_uid: str) -> str:
    return f"xavier-tracker-{model_uid}"


def check_version(version: object) -> None:
    """Of a replica that joins. Raises ValueError."""
    if version != PROTOCOL_VERSION:
        raise ValueError(
            f"the replica speaks tracker protocol {shown(version)}, this tracker "
            f"{PROTOCOL_VERSION}; run the same version of xinference-xavier everywhere"
        )


class NotMemberError(LookupError):
    """The watcher's lease has ended, or it never joined."""


class TrackerFullError(RuntimeError):
    """One more namespace, member or watch would exceed the tracker's limits."""


class JoinReply(NamedTuple):
    """`secret` is shared by the model's replicas, `lease` in seconds, `epoch` the index's life.

    `sequence` is the last that the index saw of this incarnation.
    """

    secret: bytes
    lease: float
    epoch: str
    sequence: int
