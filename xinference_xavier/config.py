"""The launch options, and the configuration of a replica that they become.

``take_launch_options`` runs in the supervisor, before any actor or process exists, so a wrong
option is refused at once. ``XavierConfig`` is plain data: it travels in vLLM's
``kv_transfer_config``, which xinference logs, so it holds no secret. Sizes are bytes, times are
seconds.
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
"""The environment variable that tells a replica's processes to share."""
XAVIER = "xavier"
"""Our key in the extra configuration of vLLM's connector."""
_PREFIX = "xavier_"

# The Xavier built into xinference has options with the same prefix.
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
    """The configuration of one replica.

    ``pool_bytes`` is the total over the replica's vLLM workers. None stands for
    ``default_pool_bytes`` of the host. ``chunk_tokens`` None stands for 128, rounded up to the
    model's block size, which only the engine knows. With ``min_fetch_tokens`` None the engine
    measures whether a run of ``least_fetch_tokens`` or more is worth a fetch.
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
        """Shorter runs are always computed."""
        given = self.min_fetch_tokens
        return LEAST_FETCH_TOKENS if given is None else given

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` reverses it."""
        plain: dict[str, Any] = to_jsonable_python(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> XavierConfig:
        """Raises ConfigError for an unknown key or a wrong value."""
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
    """The options of one launch; ``values`` are parsed fields of XavierConfig."""

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
    """Remove our options, with ``-`` or ``_``, from a launch's keyword arguments and parse them.

    Without ``enable_xavier=true``, the options of xinference's own Xavier stay. Ours are dropped
    with a warning, because vLLM would refuse to start with them; ``enable_xavier`` becomes False.

    Raises:
        ConfigError: an option is wrong; ``kwargs`` are unchanged.
    """
    names = {name: name.replace("-", "_") for name in kwargs}
    switches = [name for name, plain in names.items() if plain == ENABLE]
    if len({parse_bool(ENABLE, kwargs[name]) for name in switches}) > 1:
        raise ConfigError(
            ENABLE, "true and false", "is given twice and contradicts itself", "give it once"
        )
    if not switches or not parse_bool(ENABLE, kwargs[switches[0]]):
        _drop_stray_options(kwargs, names, switches)
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
    """A tenth of the host's ``free`` bytes, shared by its replicas, at most 16 GiB each.

    ``free`` defaults to what the host or its cgroup can still give.
    """
    if free is None:
        free = free_memory_bytes()
    return min(free // 10 // max(1, replicas_per_host), MAX_DEFAULT_POOL_BYTES)


def _drop_stray_options(
    kwargs: MutableMapping[str, Any], names: Mapping[str, str], switches: list[str]
) -> None:
    stray = sorted(name for name, plain in names.items() if plain in PARSERS)
    for name in [*stray, *switches]:
        del kwargs[name]
    if stray:
        logger.warning("%s ignored, because enable_xavier is not true", ", ".join(stray))
    if switches:
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
