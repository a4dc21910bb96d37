"""The package's own errors.

All of them cross process borders: xoscar pickles what an actor raises, and xinference turns the
text into a REST answer. So each survives a pickle round trip and says everything in ``str()``.
"""

from __future__ import annotations

import reprlib


def shown(value: object) -> str:
    """Of any value, enough to recognise it."""
    try:
        return reprlib.repr(value)
    except Exception:  # such as a number of too many digits
        return f"<{type(value).__name__}>"


class XavierError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(XavierError, ValueError):
    """An option was refused: which, what it was, why, and what to do instead.

    A ``ValueError`` as well, because xinference answers those with status 400.
    """

    def __init__(self, option: str, value: object, reason: str, remedy: str) -> None:
        self.option = option
        # Anything beyond plain data may not survive the pickling.
        plain = value is None or isinstance(value, (str, int, float, bool))
        self.value = value if plain else shown(value)
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{option}={self.value!r} {reason}; {remedy}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return type(self), (self.option, self.value, self.reason, self.remedy)


class NotFoundError(XavierError, LookupError):
    """No model of that uid shares its cache here."""

    def __init__(self, model_uid: str, reason: str) -> None:
        self.model_uid = model_uid
        self.reason = reason
        super().__init__(f"model {model_uid!r} {reason}")

    def __reduce__(self) -> tuple[type[NotFoundError], tuple[str, str]]:
        return type(self), (self.model_uid, self.reason)


class ReplicaStartError(XavierError):
    """An engine refused to start with what only it could know; the text is its own."""


class LaunchCancelledError(XavierError):
    """The model's launch was cancelled while its engines were loading."""

    def __init__(self, model_uid: str) -> None:
        super().__init__(model_uid)
        self.model_uid = model_uid

    def __str__(self) -> str:
        return f"the launch of model {self.model_uid!r} was cancelled"


class RegionError(XavierError):
    """A pool's memory could not be made, offered or mapped."""


class TransportError(XavierError):
    """A transport cannot work on this machine as configured."""


class LinkError(XavierError):
    """A link to a peer failed or was refused."""


class LinkTimeoutError(LinkError, TimeoutError):
    """A link did not make progress before its deadline."""


class ExplainError(XavierError):
    """Nobody can say at the moment which chunks of a prompt are where.

    `reason` stays what it was where the text does not: xoscar puts an address before it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class ApiError(XavierError):
    """A request to xinference failed; the text says why and what to do.

    `status` is HTTP's, None if nothing answered.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


class ModelNotFoundError(ApiError):
    """No model of that uid shares its cache at that xinference."""


NOT_FOUND_HEADER = "x-xavier-model-not-found"
"""By this the REST interface marks its own 404s; xinference answers unknown paths with 404, too."""

REFUSALS = (
    "busy",
    "donor gone",
    "no transfer process",
    "not held",
    "other namespace",
    "sharing is off",
    "too many rows",
)
"""Why rows are not granted."""
OUT_OF_REACH = ("memory not shared", "other machine", "other network namespace", "other user")
"""Why a replica that shares within its host only cannot fetch from a donor."""
ROLLBACKS = (
    *REFUSALS,
    *OUT_OF_REACH,
    "checksum",
    "donor unreachable",
    "internal error",
    "link",
    "malformed",
    "refused",
    "reset",
    "stopped",
    "timeout",
    "transfer process died",
)
"""Why fetches are rolled back."""


class GrantRefusedError(XavierError):
    """A donor did not grant rows.

    `reason` is what it is counted as. It stays what it was where the text does not: xoscar puts an
    address before the text of what comes from another process.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


SWITCHED_OFF = "switched off"


NOT_JOINED = "not joined"


RESETTING = "resetting"


NO_TRANSFER_PROCESS = "no transfer process"


ALONE = "alone since a reset"


NO_PEERS = "no peers"


NOT_SHARING = (SWITCHED_OFF, NOT_JOINED, RESETTING, NO_TRANSFER_PROCESS, ALONE, NO_PEERS)
"""Why a replica can fetch from nobody; the first that applies is the one that is told."""
