"""A replica's configuration: checked launch options, and the ``kv_transfer_config`` dictionary.

That dictionary of vLLM's is the only thing that serving hands to the engine.

xinference logs it, so it holds no secret. xinference may use it again for a launch on another
worker, which replaces the fields that are a worker's own. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import MISSING, fields, replace
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic_core import to_jsonable_python

from xinference_xavier.errors import ConfigError
from xinference_xavier.options import (
    LEAST_FETCH_TOKENS,
    PARSERS,
    RETIRED,
    RULES,
    Backend,
    LaunchOptions,
    Role,
    parse_backend,
    parse_bool,
)
from xinference_xavier.runtime.addresses import reachable_address, without_brackets

logger = logging.getLogger(__name__)

ENABLE = "enable_xavier"
BACKEND = "xavier_backend"
XAVIER = "xavier"  # our key in the extra configuration of vLLM's connector
_PREFIX = "xavier_"
_VARIABLES = "XINFERENCE_"  # and an option's name in capitals: the variable that has its default

# The Xavier built into xinference has options with the same prefix.
UPSTREAM_OPTIONS = frozenset(
    {
        "xavier_cache_bytes",
        "xavier_cache_backend",
        "xavier_cache_backend_config",
        "xavier_gpu_cache_bytes",
        "xavier_config",
        "xavier_transfer_block_num",
    }
)
UPSTREAM_VARIABLES = frozenset({"XINFERENCE_XAVIER_PROFILE"})
OWN_VARIABLES = frozenset({"XINFERENCE_XAVIER_TENANTS"})
"""Variables of the API process, which no launch has as an option."""


@pydantic.dataclasses.dataclass(frozen=True, config=RULES)
class XavierConfig(LaunchOptions):
    """The configuration of one replica.

    ``role`` is its own. ``replica`` is its name without xinference. ``replaced_vllm`` is the older
    version of vLLM that the model's definition asks for, where the launch has replaced it.
    ``tracker_address`` may have a wildcard as its host: ``supervisor_address`` is an address of the
    same host, as the replica's worker reaches it.
    """

    model_uid: str
    tracker_address: Annotated[str, pydantic.AfterValidator(without_brackets)]
    replaced_vllm: str | None = None
    request_limit: Annotated[int, pydantic.Field(ge=1)] | None = None
    role: Role = "any"
    worker_address: str | None = None
    supervisor_address: str | None = None
    replicas_per_host: int = 1
    engines: int = 1
    replica: Annotated[str, pydantic.Field(min_length=1, max_length=256)] | None = None

    @property
    def tracker(self) -> str:
        """The tracker's address as this replica reaches it."""
        return reachable_address(self.tracker_address, via=self.supervisor_address)

    @property
    def least_fetch_tokens(self) -> int:
        """The shortest run that may be fetched; shorter ones are always computed."""
        given = self.min_fetch_tokens
        return LEAST_FETCH_TOKENS if given is None else given

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` reverses it."""
        plain: dict[str, Any] = to_jsonable_python(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> XavierConfig:
        """Raises ConfigError for an unknown key or a wrong value. Ignores retired options, with a
        warning: a server without xinference may have a dictionary of an earlier version."""
        fields = dict(plain)
        for option in RETIRED:
            if (value := fields.pop(option.removeprefix(_PREFIX), None)) is not None:
                _warn_of_retired(option, option, value)
        try:
            return cls(**fields)
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


def take_launch_options(
    kwargs: MutableMapping[str, Any], foreign: bool = False
) -> LaunchOptions | None:
    """Remove our options, with ``-`` or ``_``, from a launch's keyword arguments and parse them.
    The environment has the cluster's defaults.

    None if the launch is not ours: without ``enable_xavier=true``, or with the Xavier built into
    xinference. Its options stay then, as xinference writes them. Ours are dropped with a warning,
    because vLLM would refuse to start with them. A launch is ``foreign`` if only the built-in
    Xavier may do something for it.

    Raises:
        ConfigError: an option is wrong; ``kwargs`` are unchanged.
    """
    switches = [name for name in kwargs if _plain(name) == ENABLE]
    if len({parse_bool(ENABLE, kwargs[name]) for name in switches}) > 1:
        raise ConfigError(
            ENABLE, "true and false", "is given twice and contradicts itself", "give it once"
        )
    if not switches or not parse_bool(ENABLE, kwargs[switches[0]]):
        _drop_stray_options(kwargs, switches)
        return None
    if _backend(kwargs, foreign) == "builtin":
        _leave_to_builtin(kwargs)
        return None
    options = parse_options(kwargs)
    for name in list(kwargs):
        if name in switches or _plain(name).startswith(_PREFIX):
            del kwargs[name]
    return options


def _leave_to_builtin(kwargs: MutableMapping[str, Any]) -> None:
    """xinference knows its options by one spelling, and none of ours, not even without a value."""
    for name in [each for each in kwargs if _plain(each).startswith((ENABLE, _PREFIX))]:
        value = kwargs.pop(name)
        if not _is_own(name):
            kwargs[_plain(name)] = value
    kwargs[ENABLE] = True


def _backend(given: Mapping[str, Any], foreign: bool) -> Backend:
    """The Xavier that a launch uses: the one that it names, else the one whose options it has, else
    the cluster's default."""
    named = {_plain(name): value for name, value in given.items() if value is not None}
    own = next((name for name in named if name in PARSERS or name in RETIRED), None)
    if BACKEND in named:
        backend: Backend = parse_backend(BACKEND, named[BACKEND])
        if backend == "builtin" and own is not None:
            raise ConfigError(
                own,
                named[own],
                "is an option of this extension, which xavier_backend=builtin leaves out",
                "leave it out, or use xavier_backend=extension",
            )
        return backend
    if own is not None:
        return "extension"
    if foreign or UPSTREAM_OPTIONS & named.keys():
        return "builtin"
    return default_backend()


def default_backend() -> Backend:
    """The cluster's default, from the environment. Raises ConfigError."""
    variable = _variable(BACKEND)
    backend: Backend = parse_backend(variable, os.environ.get(variable) or "extension")
    return backend


def parse_options(given: Mapping[str, Any]) -> LaunchOptions:
    """Our options among those ``given``, and for the others those of the environment. Ignores
    retired options, with a warning. Raises ConfigError."""
    _warn_of_ignored_defaults()
    ours: dict[str, Any] = {}
    for name, value in given.items():
        plain = _plain(name)
        if not plain.startswith(_PREFIX) or plain == BACKEND:
            continue
        if plain in RETIRED:
            if value is not None:
                _warn_of_retired(plain, name, value)
            continue
        _refuse_foreign_name(name, plain, value)
        if plain in ours:
            raise ConfigError(name, value, "is given twice", f"give {plain} once")
        ours[plain] = value
    options = {
        plain: PARSERS[plain](plain, value) for plain, value in ours.items() if value is not None
    }
    defaults = {
        plain: parse(variable, os.environ[variable])
        for plain, parse in PARSERS.items()
        if os.environ.get(variable := _variable(plain)) and plain not in options
    }
    fields = {plain.removeprefix(_PREFIX): value for plain, value in (defaults | options).items()}
    inherited = tuple(plain.removeprefix(_PREFIX) for plain in defaults)
    return LaunchOptions(**fields, from_environment=inherited)


def _warn_of_retired(option: str, name: str, value: object) -> None:
    """`name` is how it was written."""
    logger.warning("%s=%s is ignored; that option is gone: %s", name, value, RETIRED[option])


def _warn_of_ignored_defaults() -> None:
    """Warn of retired and misspelt ones. xinference has variables of such names, too."""
    known = (
        {_variable(option) for option in (BACKEND, *PARSERS)} | UPSTREAM_VARIABLES | OWN_VARIABLES
    )
    retired = {_variable(option): option for option in RETIRED}
    for name in os.environ.keys() - known:
        if name in retired:
            _warn_of_retired(retired[name], name, os.environ[name])
        elif name.startswith(_variable(_PREFIX)):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            logger.warning("%s is no default of an option; did you mean %s?", name, near)


def _variable(option: str) -> str:
    """The environment variable with the cluster's default for an option."""
    return f"{_VARIABLES}{option.upper()}"


def _is_own(name: str) -> bool:
    """True if an argument of a launch is for ours only."""
    return _plain(name) in {*PARSERS, *RETIRED, BACKEND}


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _drop_stray_options(kwargs: MutableMapping[str, Any], switches: list[str]) -> None:
    stray = sorted(filter(_is_own, kwargs))
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
            "leave it out, or leave out this extension's options and use xavier_backend=builtin",
        )
    if plain not in PARSERS:
        near = difflib.get_close_matches(plain, PARSERS, n=1, cutoff=0.0)[0]
        raise ConfigError(name, value, "is not an option", f"did you mean {near}?")


_DEFAULTS = {
    field.name: to_jsonable_python(field.default)
    for field in fields(XavierConfig)
    if field.default is not MISSING
}
CONNECTOR = "XavierConnector"
_MODULE = "xinference_xavier.engine.entry"
_EXTRA = "kv_connector_extra_config"


def kv_transfer_config(config: XavierConfig) -> dict[str, Any]:
    """The dictionary with which vLLM loads our connector and offloading spec. Defaults are left
    out."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": _MODULE,
        "kv_role": "kv_both",
        _EXTRA: {
            "spec_name": "XavierSpec",
            "spec_module_path": _MODULE,
            "offload_prompt_only": False,
            XAVIER: dict(
                each for each in config.to_dict().items() if each not in _DEFAULTS.items()
            ),
        },
    }


def own_config(transfer: object) -> XavierConfig | None:
    """The configuration in a launch's ``kv_transfer_config``, perhaps JSON text; None if that is
    missing or another's. Raises ConfigError."""
    if isinstance(transfer, str):
        try:
            transfer = json.loads(transfer)
        except ValueError:
            return None
    if isinstance(transfer, dict) and transfer.get("kv_connector_module_path") == _MODULE:
        return XavierConfig.from_dict(transfer[_EXTRA][XAVIER])
    return None


def for_worker(
    config: XavierConfig,
    *,
    worker_address: str,
    supervisor_address: str | None,
    number: int = -1,
    engines: int = 1,
    replaced_vllm: str | None = None,
) -> XavierConfig:
    """The configuration of one replica on the worker at ``worker_address``.

    The replica's ``number`` decides which of the ``roles`` it has. With data parallelism it has
    several ``engines`` there, which divide its pool's memory.
    """
    return replace(
        config,
        engines=engines,
        replaced_vllm=replaced_vllm,
        supervisor_address=supervisor_address,
        worker_address=reachable_address(worker_address),
        role=dict(enumerate(config.roles or ())).get(number, "any"),
    )


WITHOUT_US = f"launch with {BACKEND}=builtin, or without {ENABLE}=true"


def why_foreign(arguments: Mapping[str, Any]) -> ConfigError | None:
    """Why only the Xavier built into xinference may do something for a launch; None if we can."""
    placements = arguments.get("replica_config") or ()
    engines = [arguments.get("model_engine")]
    engines += [item.model_engine for item in placements if item.model_engine is not None]
    for engine in engines:
        if str(engine).lower() != "vllm":
            remedy = f"use vLLM, or {WITHOUT_US}"
            return ConfigError("model_engine", engine, "cannot share its cache", remedy)
    model_type = arguments.get("model_type")
    if str(model_type or "LLM").lower() != "llm":
        return ConfigError("model_type", model_type, "has no prefixes to share", WITHOUT_US)
    for item in placements:
        if item.role != "hybrid":
            reason = "splits prefill from decoding, which sharing does not support"
            return ConfigError("role", item.role, reason, WITHOUT_US)
    return None
