"""The messages between a replica and its tracker, their checks, and the names of both.

All speak one version, which the tracker checks when a replica joins. Later checks are of lengths,
and of what one replica could break for the others. They raise ValueError.
"""

import enum
import json
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from struct import iter_unpack
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from xinference_xavier.errors import shown
from xinference_xavier.options import Routing
from xinference_xavier.protocol.sketches import Difference, pack_canaries
from xinference_xavier.runtime.validate import check_json_size, first_reason

PROTOCOL_VERSION = 11  # raised with every change of the messages
SPLIT = "~"
"""Stands between a namespace and the number of one that split from it."""
MAX_WEIGHTS_VERSION = 64  # characters; it becomes part of a namespace
MAX_STATS_BYTES = 1 << 16  # a replica's stats as JSON
MAX_QUESTION_BYTES = 8 << 20  # a prompt or messages to explain, as JSON
MAX_PACKED_BYTES = 64 << 20  # keys of one publication: 5.6 million short ones
MAX_REPORTED = 100  # events in one heartbeat
MAX_CHANGE_SECONDS = 3600.0  # of a change that is put back
GROUP = slice(-4, None)
"""The part of a key that is the number of its KV-cache group."""
SHORT_KEY = 12
"""Bytes at the end of a key by which the index knows it: 64 bits of its hash, and its group. Two
keys that share them cost a fetch of a chunk that its donor lacks."""


class NotMemberError(LookupError):
    """The replica's lease has expired, or it never joined."""


class TrackerFullError(RuntimeError):
    """One more member would exceed the tracker's limit."""


_T = TypeVar("_T")
_RANK = re.compile(r"_dp\d+$")


class Verdict(enum.Enum):
    """The tracker's judgement on what a replica computes. Only those that are COMPARED share."""

    WAITING = "not compared yet"
    COMPARED = "compared"
    DIFFERS = "differs"
    CANNOT = "cannot compare"


class Comparison(NamedTuple):
    """How a replica's canaries compare with those of the first member that computed them.

    If it DIFFERS, `peer` is that first one's incarnation. `reason` says why it CANNOT, too. If
    those that compute the same are in another `namespace`, the replica is to move there.
    """

    verdict: Verdict = Verdict.WAITING
    reason: str = ""
    peer: str = ""
    difference: Difference | None = None
    namespace: str = ""


class CanaryReport(NamedTuple):
    """All packed canaries that a replica has computed since its last reset, or why it `cannot`; and
    how it found the rows of donors to differ in audits."""

    packed: bytes = pack_canaries({})
    cannot: str = ""
    audited: tuple[tuple[str, Difference], ...] = ()


NO_CANARIES = CanaryReport()


class Member(NamedTuple):
    """A replica: its incarnation, the address of the xoscar actor in its engine, whether peers can
    fetch from it now, and whether it computes what they compute."""

    incarnation: str
    address: str
    serves: bool = True
    comparison: Comparison = Comparison()


class JoinReply(NamedTuple):
    """`secret` is shared by the model's replicas. `lease` is in seconds. `epoch` identifies the
    index; `sequence` is the number of the last publication of this incarnation that it applied.
    `comparison` is what its canaries have shown.
    """

    secret: bytes
    lease: float
    epoch: str
    sequence: int
    comparison: Comparison


class Switches(NamedTuple):
    """The operator's switches. With `routing` None, it is as the replicas were launched."""

    enabled: bool = True
    routing: Routing | None = None


class Settings(NamedTuple):
    """The switches as they are now. The settings with the higher version are newer."""

    version: int = 0
    enabled: bool = True
    routing: Routing | None = None
    then: Switches | None = None
    """What they are again when a change for some time is over."""

    @property
    def switches(self) -> Switches:
        """The switches without a change for some time."""
        return self.then or Switches(self.enabled, self.routing)

    def put_back(self) -> "Settings":
        return self._replace(**self.switches._asdict(), then=None)


INITIAL_SETTINGS = Settings()


class Change(NamedTuple):
    """The effect of one publication, with packed short keys. A key that is both removed and added
    is held. With `replaces`, `added` is everything that the incarnation holds."""

    incarnation: str
    sequence: int
    added: bytes
    removed: bytes = b""
    replaces: bool = False


class Left(NamedTuple):
    """This one is no member any more; `comparison` is what was found of it until then."""

    incarnation: str
    comparison: Comparison = Comparison()


News = Settings | Member | Left | Change
"""What happened to an index. A `Member` has joined or changed."""


class Update(NamedTuple):
    """The `news` that bring a watcher to `revision`, in the order to apply them; not of itself.

    A `snapshot` is for one that knows nothing, or too old things: all settings, members and
    holdings, after those that left and were found to differ. Others are no members any more.
    """

    revision: int
    epoch: str
    snapshot: bool
    news: tuple[News, ...]


class Outcome(enum.Enum):
    """The tracker's answer to a publication."""

    APPLIED = "applied"
    STALE = "stale"  # ignored: its sequence is not above the last
    GAP = "gap"  # ignored: one before it is missing; the publisher must send a snapshot
    UNKNOWN = "unknown"  # ignored: the publisher is not a member and must join


def tracker_uid(model_uid: str) -> str:
    return f"xavier-tracker-{model_uid}"


def replica_name(engine_id: str = "", given: str | None = None) -> str:
    """xinference's name for the replica of this process; without xinference the `given` one, or
    empty.

    With data parallelism a replica has several engines, and vLLM's ids of them end in `_dp0` etc.
    The name of each ends likewise.
    """
    name = os.environ.get("XINFERENCE_MODEL_UID") or given or ""
    rank = _RANK.search(engine_id)
    return name + rank[0] if name and rank else name


def without_rank(name: str) -> str:
    """The replica that an engine of that name belongs to."""
    return _RANK.sub("", name)


def check_version(version: object) -> None:
    """The protocol version of a replica that joins."""
    if version != PROTOCOL_VERSION:
        raise ValueError(
            f"the replica speaks tracker protocol {shown(version)}, this tracker "
            f"{PROTOCOL_VERSION}; run the same version of xinference-xavier everywhere"
        )


def check_update(update: Update) -> None:
    """Checks the lengths of all keys, so that an update is applied completely or not at all."""
    for news in update.news:
        if isinstance(news, Change):
            check_packed("added", news.added)
            check_packed("removed", news.removed)


def checked(adapter: TypeAdapter[_T], what: str, value: object) -> _T:
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        raise ValueError(f"malformed {what}: {first_reason(error)}") from None


def checker(kind: type[_T], what: str) -> Callable[[object], _T]:
    """A check that returns a value of this type."""
    return partial(checked, TypeAdapter(kind), what)


def pack_question(question: object) -> bytes:
    """A question as JSON, in which form it travels: xoscar would walk through all its objects."""
    _check_question(question)
    return check_json_size("question", question, MAX_QUESTION_BYTES)


def unpack_question(packed: bytes) -> dict[str, Any]:
    """A question that was checked when it was packed. A long one takes seconds."""
    question: dict[str, Any] = json.loads(packed)
    return question


def _check_question(question: object) -> None:
    """A prompt, or the messages of a chat and perhaps its tools, as in a request; perhaps with the
    salt of the tenant that asks."""
    match question:
        case {"prompt": str() as prompt, **rest} if prompt and rest.keys() <= {"cache_salt"}:
            pass
        case {"messages": [_, *_] as messages, **rest} if rest.keys() <= {"tools", "cache_salt"}:
            for message in messages:
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise ValueError(f"message={shown(message)} is not an object with a role")
            if not isinstance(tools := rest.get("tools", []), list):
                raise ValueError(f"tools={shown(tools)} is not a list")
        case _:
            raise ValueError('the question is neither {"prompt": "…"} nor {"messages": […]}')


def check_packed(name: str, value: object, key_bytes: int = SHORT_KEY) -> None:
    """Packed keys."""
    if type(value) is not bytes:
        raise ValueError(f"{name} is {type(value).__name__}, not the bytes of packed keys")
    if len(value) > MAX_PACKED_BYTES:
        raise ValueError(f"{name} has {len(value)} bytes, more than {MAX_PACKED_BYTES}")
    if len(value) % key_bytes:
        raise ValueError(f"{name} has {len(value)} bytes, not a multiple of key length {key_bytes}")


def check_stats(stats: object) -> None:
    if not isinstance(stats, dict):
        raise ValueError(f"stats is {type(stats).__name__}, not a dictionary")
    check_json_size("stats", stats, MAX_STATS_BYTES)


def pack(keys: Iterable[bytes]) -> bytes:
    """Keys of one length as they travel: sending a list costs four times as much."""
    return b"".join(keys)


def pack_short(keys: Iterable[bytes]) -> bytes:
    return b"".join([key[-SHORT_KEY:] for key in keys])


def unpack(packed: bytes, key_bytes: int = SHORT_KEY) -> list[bytes]:
    """The keys in `packed`. Raises ValueError unless they fill it exactly."""
    check_packed("keys", packed, key_bytes)
    # Slicing takes twice as long.
    return [key for (key,) in iter_unpack(f"{key_bytes}s", packed)]
