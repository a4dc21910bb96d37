"""The messages between a replica and its tracker, and their checks.

Every check raises a ValueError that names the value, and nothing else, whatever it is given.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from struct import iter_unpack
from typing import NamedTuple

from xinference_xavier.errors import shown
from xinference_xavier.runtime.validate import (
    MAX_KEY_BYTES,
    check_address,
    check_count,
    check_identifier,
    check_json_size,
)

PROTOCOL_VERSION = 1
"""Raised with every change of the messages."""
MAX_WEIGHTS_VERSION = 64
"""Characters. It becomes part of a namespace."""
MAX_STATS_BYTES = 1 << 16
"""A replica's stats as JSON."""
MAX_QUESTION_BYTES = 8 << 20
"""A prompt or messages to explain, as JSON."""
MAX_PACKED_BYTES = 64 << 20
"""Keys of one publication: 1.8 million keys of 36 bytes."""
MAX_REPORTED = 100
"""Events in one heartbeat."""
MAX_CLAIM_SECONDS = 600.0


class NotMemberError(LookupError):
    """The replica's lease has expired, or it never joined."""


class TrackerFullError(RuntimeError):
    """One more namespace, member or watch would exceed the tracker's limits."""


class JoinReply(NamedTuple):
    """`secret` is shared by the model's replicas. `lease` is in seconds. `epoch` identifies the
    index; `sequence` is the number of the last publication of this incarnation that it applied.
    """

    secret: bytes
    lease: float
    epoch: str
    sequence: int


class Member(NamedTuple):
    """A replica: its incarnation, and the address of the xoscar actor in its engine."""

    incarnation: str
    address: str


class Settings(NamedTuple):
    """The operator's switch. The settings with the higher version are newer."""

    version: int = 0
    enabled: bool = True


INITIAL_SETTINGS = Settings()


class Change(NamedTuple):
    """The effect of one publication. A key that is both removed and added is held.

    With `replaces`, `added` is everything that the incarnation holds.
    """

    incarnation: str
    sequence: int
    added: bytes
    removed: bytes
    replaces: bool


class Update(NamedTuple):
    """The `changes` that bring a watcher to `revision`, in the order to apply them.

    With `snapshot`, the watcher first forgets everything. `members` are all members, the watcher
    included; None if they have not changed, because there may be many and they rarely do. Keys are
    `key_bytes` long.
    """

    revision: int
    epoch: str
    snapshot: bool
    settings: Settings
    key_bytes: int
    members: tuple[Member, ...] | None
    changes: tuple[Change, ...]


class Outcome(enum.Enum):
    """The tracker's answer to a publication."""

    APPLIED = "applied"
    STALE = "stale"
    """Ignored: its sequence is not above the last."""
    GAP = "gap"
    """Ignored: one before it is missing; the publisher must send a snapshot."""
    UNKNOWN = "unknown"
    """Ignored: the publisher is not a member and must join."""


def tracker_uid(model_uid: str) -> str:
    return f"xavier-tracker-{model_uid}"


def check_version(version: object) -> None:
    """The protocol version of a replica that joins."""
    if version != PROTOCOL_VERSION:
        raise ValueError(
            f"the replica speaks tracker protocol {shown(version)}, this tracker "
            f"{PROTOCOL_VERSION}; run the same version of xinference-xavier everywhere"
        )


def check_member(member: object) -> Member:
    if not isinstance(member, tuple) or len(member) != 2:
        raise ValueError(f"member={shown(member)} is not a pair of incarnation and address")
    incarnation, address = member
    check_identifier("incarnation", incarnation)
    check_address("address", address)
    return Member(incarnation, address)


def check_settings(settings: object) -> Settings:
    if not isinstance(settings, tuple) or len(settings) != 2:
        raise ValueError(f"settings={shown(settings)} is not a pair of version and switch")
    version, enabled = settings
    check_count("settings.version", version, 0)
    check_switch(enabled)
    return Settings(version, enabled)


def check_update(update: object) -> None:
    """Checks all of it, so that a mirror applies an update completely or not at all."""
    if not isinstance(update, Update):
        raise ValueError(f"update={shown(update)} is not an update")
    check_count("revision", update.revision, 0)
    check_identifier("epoch", update.epoch)
    check_settings(update.settings)
    members = () if update.members is None and not update.snapshot else update.members
    if type(members) is not tuple or type(update.changes) is not tuple:
        raise ValueError("members or changes of the update are not a tuple")
    for member in members:
        check_member(member)
    if update.changes:
        check_count("key_bytes", update.key_bytes, 1, MAX_KEY_BYTES)
    for change in update.changes:
        _check_change(change, update.key_bytes)


def _check_change(change: object, key_bytes: int) -> None:
    if not isinstance(change, Change):
        raise ValueError(f"change={shown(change)} is not a change")
    check_identifier("incarnation", change.incarnation)
    check_count("sequence", change.sequence, 0)
    for name, keys in (("added", change.added), ("removed", change.removed)):
        check_packed(name, keys, key_bytes)


def check_weights_version(version: object) -> None:
    if not isinstance(version, str) or not 0 < len(version) <= MAX_WEIGHTS_VERSION:
        raise ValueError(
            f"weights_version={shown(version)} is not a text of 1 to {MAX_WEIGHTS_VERSION} "
            "characters"
        )


def check_question(question: object) -> None:
    """A prompt, or the messages of a chat, as in a request."""
    names = list(question) if isinstance(question, dict) else []
    match question:
        case {"prompt": str() as prompt} if names == ["prompt"] and prompt:
            pass
        case {"messages": [_, *_] as messages} if names == ["messages"]:
            for message in messages:
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise ValueError(f"message={shown(message)} is not an object with a role")
        case _:
            raise ValueError('the question is neither {"prompt": "…"} nor {"messages": […]}')
    check_json_size("the question", question, MAX_QUESTION_BYTES)


def check_explanation(answer: object) -> None:
    match answer:
        case {
            "prompt_tokens": int(),
            "chunk_tokens": int(),
            "chunks": list() as chunks,
            "reuse": dict(),
        } if all(
            isinstance(chunk, dict) and isinstance(chunk.get("replicas"), dict) for chunk in chunks
        ):
            return
    raise ValueError(f"explanation={shown(answer)} is not an explanation")


def check_packed(name: str, value: object, key_bytes: int = 1) -> None:
    """Packed keys, of `key_bytes` each if that is known."""
    if type(value) is not bytes:
        raise ValueError(f"{name} is {type(value).__name__}, not the bytes of packed keys")
    if len(value) > MAX_PACKED_BYTES:
        raise ValueError(f"{name} has {len(value)} bytes, more than {MAX_PACKED_BYTES}")
    if len(value) % key_bytes:
        raise ValueError(f"{name} has {len(value)} bytes, not a multiple of key length {key_bytes}")


def check_switch(value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"enabled={shown(value)} is neither True nor False")


def check_stats(stats: object) -> None:
    if not isinstance(stats, dict):
        raise ValueError(f"stats is {type(stats).__name__}, not a dictionary")
    check_json_size("stats", stats, MAX_STATS_BYTES)


def pack(keys: Iterable[bytes]) -> bytes:
    return b"".join(keys)


def unpack(packed: bytes, key_bytes: int) -> list[bytes]:
    """The keys in `packed`. Raises ValueError unless they fill it exactly."""
    check_packed("keys", packed, key_bytes)
    # Slicing takes twice as long.
    return [key for (key,) in iter_unpack(f"{key_bytes}s", packed)]
