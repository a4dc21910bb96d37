"""The launch options: what a user may write, what it means, and what a replica is told.

``take_launch_options`` runs in the supervisor, before any actor or process exists; it refuses what
is wrong with a sentence that names the value, the reason and the remedy. ``XavierConfig`` is what
it becomes: plain data that travels in vLLM's ``kv_transfer_config`` and is logged by xinference, so
it never holds a secret. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic_core import to_jsonable_python

from xinference_xavier.errors import ConfigError
from xinference_xavier.options import DEFAULT_FETCH_TIMEOUT, LEAST_FETCH_TOKENS, PARSERS, parse_bool
from xinference_xavier.runtime.host import free_memory_bytes

logger = logging.getLogger(__name__)

MAX_DEFAULT_POOL_BYTES = 16 << 30

ENABLE = "enable_xavier"
SHARES = "XAVIER_SHARES"
"""The environment variable by which the processes of a replica know that it is to share."""
XAVIER = "xavier"
"""Our entry in the extra configuration of vLLM's connector."""
_PREFIX = "xavier_"

# The built-in Xavier of xinference has options of its own under the same prefix.
UPSTREAM_OPTIONS = frozenset(
    {
        "xavier_cache_bytes",
        "xavier_cache_backend",
        "xavier_cache_backend_config",
        "xavier_gpu_cache_bytes",
        "xavier_config",
    }
)


@pydantic.dataclasses.dataclass(
    frozen=True, config=pydantic.ConfigDict(extra="forbid", strict=True)
)
class XavierConfig:
    """Everything one replica is told about sharing.

    ``pool_bytes`` is the total of one replica over all its workers; None is replaced by
    ``default_pool_bytes`` on the worker that launches it. ``chunk_tokens`` None means 128, rounded
    up to the model's block size, which only the engine knows. ``min_fetch_tokens`` None leaves it
    to the engine's measurements what is fetched, from ``least_fetch_tokens`` on.
    """

    model_uid: str
    tracker_address: str
    pool_bytes: int | None = None
    chunk_tokens: int | None = None
    transport: str = "auto"
    host: str | None = None
    port_range: Annotated[tuple[int, int], pydantic.Strict(False)] | None = None  # a list in JSON
    fetch_timeout: float = DEFAULT_FETCH_TIMEOUT
    min_fetch_tokens: int | None = None
    hooks: str | None = None
    worker_address: str | None = None
    replicas_per_host: int = 1

    @property
    def least_fetch_tokens(self) -> int:
        """Shorter runs are computed in any case."""
        given = self.min_fetch_tokens
        return LEAST_FETCH_TOKENS if given is None else given

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` reverses it."""
        plain: dict[str, Any] = to_jsonable_python(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> XavierConfig:
        """Raises ConfigError for a key this version does not know or a wrong value."""
        try:
            return cls(**plain)
        except pydantic.ValidationError as error:
            fault = error.errors()[0]
        key = str(fault["loc"][0])
        if fault["type"] == "unexpected_keyword_argument":
            raise ConfigError(
                key,
                plain[key],
                "is not known to this version of xinference-xavier",
                "install the same version on the supervisor and on every worker",
            )
        raise ConfigError(
            key, plain.get(key), f"is malformed ({fault['msg']})", "launch the model again"
        )


@dataclass(frozen=True)
class LaunchOptions:
    """What the user asked for in one launch: ``values`` are fields of XavierConfig, parsed."""

    enabled: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hooks(self) -> str | None:
        path: str | None = self.values.get("hooks")
        return path

    def config(
        self, *, model_uid: str, tracker_address: str, replicas_per_host: int
    ) -> XavierConfig:
        return XavierConfig(
            model_uid=model_uid,
            tracker_address=tracker_address,
            replicas_per_host=replicas_per_host,
            **self.values,
        )


def take_launch_options(kwargs: MutableMapping[str, Any]) -> LaunchOptions:
    """Take our options out of a launch's keyword arguments; raises ConfigError.

    Afterwards ``kwargs`` holds none of ours in any spelling. Switched off, or not asked for,
    upstream's own options stay untouched and stray ones of ours are dropped with a warning, since
    vLLM would refuse to start with them; an ``enable_xavier`` given stays, as a real False.
    """
    names = {name: name.replace("-", "_") for name in kwargs}
    asked = [name for name, plain in names.items() if plain == ENABLE]
    if len({parse_bool(ENABLE, kwargs[name]) for name in asked}) > 1:
        raise ConfigError(
            ENABLE, "true and false", "is given twice and contradicts itself", "give it once"
        )
    enabled = bool(asked) and parse_bool(ENABLE, kwargs[asked[0]])
    if not enabled:
        _drop_stray_options(kwargs, names, asked)
        return LaunchOptions()

    given: dict[str, Any] = {}
    for name, plain in names.items():
        if not plain.startswith(_PREFIX):
            continue
        _refuse_foreign_name(name, plain, kwargs[name])
        if plain in given:
            raise ConfigError(name, kwargs[name], "is given twice", f"give {plain} once")
        given[plain] = kwargs[name]
    parsed = {
        plain.removeprefix(_PREFIX): PARSERS[plain](plain, value)
        for plain, value in given.items()
        if value is not None
    }
    for name, plain in names.items():
        if plain in given or plain == ENABLE:
            del kwargs[name]
    return LaunchOptions(enabled=True, values=parsed)


def default_pool_bytes(replicas_per_host: int, free: int | None = None) -> int:
    """A tenth of the host's free memory, shared by its replicas, at most 16 GiB each.

    ``free`` is what the host or its cgroup can still give, measured now if not passed.
    """
    if free is None:
        free = free_memory_bytes()
    return min(free // 10 // max(1, replicas_per_host), MAX_DEFAULT_POOL_BYTES)


def _drop_stray_options(
    kwargs: MutableMapping[str, Any], names: Mapping[str, str], asked: list[str]
) -> None:
    stray = sorted(name for name, plain in names.items() if plain in PARSERS)
    for name in [*stray, *asked]:
        del kwargs[name]
    if stray:
        logger.warning("%s ignored, because enable_xavier is not true", ", ".join(stray))
    if asked:
        # Upstream takes bool("false") for True.
        kwargs[ENABLE] = False


def _refuse_foreign_name(name: str, plain: str, value: object) -> None:
    if plain in UPSTREAM_OPTIONS:
        raise ConfigError(
            name,
            value,
            "belongs to the Xavier built into xinference, which excludes this one",
            "leave it out, or launch without enable_xavier=true",
        )
    if plain not in PARSERS:
        near = difflib.get_close_matches(plain, PARSERS, n=1, cutoff=0.0)[0]
        raise ConfigError(name, value, "is not an option", f"did you mean {near}?")
