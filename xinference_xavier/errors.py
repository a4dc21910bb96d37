"""The package's own errors.

They cross process boundaries: xoscar pickles what an actor raises, and xinference puts the text
into a REST answer. So each survives pickling, and its text is complete.
"""

from __future__ import annotations

import reprlib
from enum import StrEnum


def shown(value: object) -> str:
    """A short form of any value."""
    try:
        return reprlib.repr(value)
    except Exception:  # for example an integer of too many digits
        return f"<{type(value).__name__}>"


class XavierError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(XavierError, ValueError):
    """An option was refused. The text names option, value, reason and remedy.

    Also a ``ValueError``, because xinference answers those with status 400.
    """

    def __init__(self, option: str, value: object, reason: str, remedy: str) -> None:
        self.option = option
        # Other values may not survive pickling.
        plain = value is None or isinstance(value, (str, int, float, bool))
        self.value = value if plain else shown(value)
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{option}={self.value!r} {reason}; {remedy}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return type(self), (self.option, self.value, self.reason, self.remedy)


class ReasonError(XavierError):
    """`reason` is the text without the address that xoscar prepends to remote errors."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class NotFoundError(ReasonError, LookupError):
    """No model with that uid shares its cache here."""


class PrefixNotFoundError(ReasonError, LookupError):
    """The model has no prefix of that name."""


class PrefixRefusedError(ReasonError, ValueError):
    """A prefix cannot be kept as a client wants it."""


class NamesError(ReasonError):
    """The names of a model's prefixes cannot be read or changed at the moment."""


class ReplicaNotServingError(ReasonError, LookupError):
    """The replica takes no requests: it starts, ends or has ended."""


class SupervisorError(XavierError):
    """xinference's supervisor does not say where a replica is."""


class ReplicaStartError(XavierError):
    """An engine refused to start; the text is the engine's."""


class LaunchCancelledError(XavierError):
    """The model's launch was cancelled while its engines were loading."""


class RegionError(XavierError):
    """A pool's memory could not be allocated, shared or mapped."""


class TransportError(XavierError):
    """A transport cannot work on this host as configured."""


class LinkError(XavierError):
    """A link to a peer failed or was refused."""


class LinkTimeoutError(LinkError, TimeoutError):
    """A link did not make progress before its deadline."""


class ExplainError(ReasonError):
    """No replica can locate the chunks of a prompt at the moment."""


class ApiError(XavierError):
    """A request to xinference failed; the text says why and what to do.

    `status` is the HTTP status, None without an answer that could be read.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


class ModelNotFoundError(ApiError):
    """No model of that uid shares its cache at that xinference."""


class UnknownPrefixError(ApiError):
    """The model has no prefix of that name at that xinference."""


NOT_FOUND_HEADER = "x-xavier-not-found"
"""Says what the REST interface did not find, because xinference also answers unknown paths with
404: "model" or "prefix"."""

REFUSALS = (
    "busy",
    "donor gone",
    "no transfer process",
    "not compared",
    "not held",
    "other namespace",
    "reset",
    "sharing is off",
    "too many rows",
)
"""Reasons why no rows are granted."""
ROLLBACKS = (
    *REFUSALS,
    "checksum",
    "disk",
    "donor unreachable",
    "internal error",
    "link",
    "out of reach",
    "refused",
    "stopped",
    "timeout",
    "transfer process died",
)
"""Reasons why a fetch is rolled back."""


class GrantRefusedError(ReasonError):
    """A donor did not grant rows, for one of `REFUSALS`."""


class NotSharing(StrEnum):
    """Reasons why a replica cannot fetch; the first that applies is reported."""

    NO_PREFIX_CACHING = "prefix caching is off"
    CANNOT_COMPARE = "cannot compare"
    SWITCHED_OFF = "switched off"
    NOT_JOINED = "not joined"
    RESETTING = "resetting"
    NO_TRANSFER_PROCESS = "no transfer process"
    ALONE = "alone since a reset"
    NOT_COMPARED = "not compared with a peer yet"
    NO_PEERS = "no peers"
