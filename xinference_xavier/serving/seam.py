"""What the serving side uses of xinference, and of xoscar, beyond what extensions are given.

Such names are used only here, in functions that say what they are for. `USED` lists them. Where one
is missing, the extension stays off (`missing`).
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware

_SUPERVISOR = "xinference.core.supervisor:SupervisorActor"
_WORKER = "xinference.core.worker:WorkerActor"
_FULL = "Rate limit reached"
_MARKS = "_anthropic_cache_control"
USED: dict[str, tuple[str, ...]] = {
    _SUPERVISOR: (
        # REST, versioned launches and autostart all call this one.
        "_launch_builtin_model(model_uid, model_name, model_engine, model_type, replica, n_worker, "
        "request_limits, worker_ip, replica_config, kwargs)",
        "cancel_launch_builtin_model(model_uid)",
        "terminate_model_replica(model_uid, replica_id)",
        "get_model(model_uid)",
        "is_local_deployment",
        "control_address",
        "_gen_model_uid(model_name)",
        "_model_uid_to_replica_info",
        "_replica_model_uid_to_worker",
        "_replica_model_uid_to_worker_shards",
        "_worker_address_to_worker",
        "_xavier_cache_mapping",
    ),
    _WORKER: (
        "launch_builtin_model(model_uid, virtual_env_packages, envs, kwargs)",
        "wait_for_load(model_uid)",
        "terminate_model(model_uid)",
        "get_model(model_uid)",
        "_update_model_state(model_uid, state)",
        "_supervisor_address",
        "_model_uid_to_model",
        "_model_uid_to_launch_args",
    ),
    "xinference.core.supervisor:ReplicaInfo": ("active_replica_ids", "replica_to_worker_refs"),
    "xinference.core.replica_config:ReplicaConfig": ("model_engine", "role", "devices"),
    "xinference.core.replica_config:DeviceConfig": ("worker_ip",),
    "xinference.core.model:ModelActor": (
        "decrease_serve_count",
        "generation_serve_count",
        "prepare_anthropic_request",
    ),
    "xinference.core.rpc_context": ("correlate_model_ref",),
    "xinference.core.utils": (
        "parse_replica_model_uid(replica_model_uid)",
        "filter_virtualenv_packages_by_markers",
        "merge_virtual_env_packages(base_packages, extra_packages)",
    ),
    "xinference.core.virtual_env_manager": ("expand_engine_dependency_placeholders",),
    "xinference.model.llm.custom": ("get_user_defined_llm_families",),
    "xinference.model.llm.llm_family": ("BUILTIN_LLM_FAMILIES",),
    "xinference.utils": ("get_pip_config_args",),
    "xinference.constants": ("XINFERENCE_ENABLE_VIRTUAL_ENV", "XINFERENCE_HOME"),
    "xinference.extensions": ("resolve_cache_salt(request)", "CacheSalt"),
    "xinference.api.restful_api": (
        "require_model(get_supervisor_ref, model_uid)",
        "parse_anthropic_request",
        "parse_responses_request",
    ),
    "xinference.api.restful_api:RESTfulAPI": (
        "create_chat_completion(request)",
        "create_completion(request)",
        "create_message(request)",
        "create_response(request)",
    ),
    "xinference.api.model_request_logging": ("get_current_model_request_id",),
    "xinference.api.protocols.anthropic:CanonicalChatRequest": ("to_openai_body",),
    "xinference.api.protocols.openai_responses:ResponsesRequest": ("chat_body",),
    "xinference.api.oauth2.advanced.auth_service:AdvancedAuthService": (
        "validate_model_access(token, model_uid, model_type)",
    ),
    "xinference.api.oauth2.advanced.cache:ApiKeyCacheEntry": (
        "has_model_access(model_uid, model_type)",
        "key_hash",
    ),
    "xoscar.api:IteratorWrapper": ("destroy", "_gc_destroy"),
    "fastapi:FastAPI": ("user_middleware",),
}
"""Names of modules and classes, with the parameters that a function must take."""


_missing: tuple[str, ...] = ()


def look() -> tuple[str, ...]:
    """What the installed xinference lacks of what we use, a sentence each. Imports xinference; call
    it once, when the extension is registered."""
    global _missing
    _missing = tuple(fault for path, uses in USED.items() for fault in _lacking(path, uses))
    return _missing


def missing() -> tuple[str, ...]:
    """What `look` found in this process. If anything, the extension is off here."""
    return _missing


def _lacking(path: str, uses: Collection[str]) -> Iterator[str]:
    try:
        owner = _find(path)
    except (ImportError, AttributeError):
        yield f"{path.replace(':', '.')} is gone"
        return
    known = _names(owner)
    for use in uses:
        name, _, parameters = use.removesuffix(")").partition("(")
        if name not in known:
            yield f"{owner.__name__}.{name} is gone"
        elif parameters:
            function = getattr(owner, name)
            taken = inspect.signature(function).parameters if callable(function) else {}
            if unknown := [each for each in parameters.split(", ") if each not in taken]:
                yield f"{owner.__name__}.{name} takes no {', '.join(unknown)}"


def _find(path: str) -> Any:
    module, _, name = path.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


def _names(owner: Any) -> set[str]:
    """Its attributes, the fields of a data class, and what `__init__` gives an instance."""
    code = getattr(owner.__init__, "__code__", None)
    fields = getattr(owner, "__annotations__", ())
    return {*dir(owner), *fields, *(code.co_names if code is not None else ())}


# -- the supervisor --------------------------------------------------------------------------------


def _actor(path: str) -> type[Any] | None:
    try:
        return _find(path)  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        return None


def supervisor_actor() -> type[Any] | None:
    """xinference's supervisor; None if it is gone."""
    return _actor(_SUPERVISOR)


def launch_method(actor: type[Any]) -> str | None:
    """The method of a supervisor or a worker, of any xinference, that every launch passes; None if
    it is gone."""
    names = ("_launch_builtin_model", "launch_builtin_model")
    return next((name for name in names if hasattr(actor, name)), None)


def control_address(supervisor: Any) -> str:
    return supervisor.control_address  # type: ignore[no-any-return]


def new_model_uid(supervisor: Any, model_name: str) -> str:
    return str(supervisor._gen_model_uid(model_name))


def trackers(supervisor: Any) -> dict[str, Any]:
    """References to trackers by model, which xinference destroys when the model ends. The built-in
    Xavier keeps its own there, too."""
    return supervisor._xavier_cache_mapping  # type: ignore[no-any-return]


def replica_infos(supervisor: Any) -> Mapping[str, Any]:
    """What xinference knows of each model's replicas."""
    return supervisor._model_uid_to_replica_info  # type: ignore[no-any-return]


def replicas_of(model_uid: str, info: Any) -> Iterator[tuple[str, Any]]:
    """Name and worker of each replica; one of several workers comes several times."""
    for replica_id in info.active_replica_ids:
        for worker in info.replica_to_worker_refs[replica_id]:
            yield replica_name(model_uid, replica_id), worker


def active_replicas(supervisor: Any, model_uid: str) -> Collection[int]:
    """The ids of a model's replicas that xinference gives requests to."""
    info = replica_infos(supervisor).get(model_uid)
    return () if info is None else tuple(info.active_replica_ids)


def replica_name(model_uid: str, replica_id: int) -> str:
    return f"{model_uid}-rep{replica_id}"


def replica_index(model_uid: str, replica: str) -> str:
    """What xinference's metrics call the replica: its number. A name that is not xinference's
    stays."""
    return replica.removeprefix(f"{model_uid}-rep")


def name_of(model: Any) -> str:
    """The name of the replica that a reference to a model actor is of."""
    return str(model.uid.decode())


def worker_of(supervisor: Any, replica: str) -> Any:
    """The worker of a replica. Raises KeyError."""
    worker = supervisor._replica_model_uid_to_worker[replica]
    return worker[0] if isinstance(worker, (list, tuple)) else worker  # a replica of several


def worker_addresses(supervisor: Any, model_uid: str) -> dict[str, str]:
    """The address of the worker of each of the model's replicas."""
    found: dict[str, str] = {}
    for number in active_replicas(supervisor, model_uid):
        replica = replica_name(model_uid, number)
        with suppress(KeyError):  # it has just been removed
            found[replica] = worker_of(supervisor, replica).address
    return found


def replica_records(supervisor: Any) -> tuple[dict[str, Any], ...]:
    """Records by replica, which keep its name taken."""
    return (supervisor._replica_model_uid_to_worker, supervisor._replica_model_uid_to_worker_shards)


def workers(supervisor: Any) -> dict[str, Any]:
    """References to all workers by address."""
    return supervisor._worker_address_to_worker  # type: ignore[no-any-return]


# -- a worker --------------------------------------------------------------------------------------


def worker_actor() -> type[Any] | None:
    """xinference's worker; None if it is gone."""
    return _actor(_WORKER)


def supervisor_address(worker: Any) -> str:
    return worker._supervisor_address  # type: ignore[no-any-return]


def model_on(worker: Any, replica: str) -> Any:
    """A reference to the replica's model actor; None if there is none."""
    return worker._model_uid_to_model.get(replica)


def launch_of(worker: Any, replica: str) -> Mapping[str, Any]:
    """The arguments with which `worker` launched the replica."""
    return worker._model_uid_to_launch_args.get(replica) or {}


def replica_number(replica: str) -> int:
    from xinference.core.utils import parse_replica_model_uid

    return int(parse_replica_model_uid(replica)[1])


def has_own_environment(asked: bool | None) -> bool:
    """True if a model gets an environment of its own. Its launch may ask for one, refuse it, or
    leave it open (None)."""
    from xinference.constants import XINFERENCE_ENABLE_VIRTUAL_ENV

    return bool(XINFERENCE_ENABLE_VIRTUAL_ENV if asked is None else asked)


def _settings(launch: Mapping[str, Any]) -> Any:
    """What the model's definition says of its environment; None if it is not known here."""
    from xinference.model.llm.custom import get_user_defined_llm_families
    from xinference.model.llm.llm_family import BUILTIN_LLM_FAMILIES

    families = [*get_user_defined_llm_families(), *BUILTIN_LLM_FAMILIES]
    name = launch.get("model_name")
    family = next((family for family in families if family.model_name == name), None)
    return getattr(family, "virtualenv", None)


def defined_packages(launch: Mapping[str, Any]) -> list[str]:
    """The packages that xinference would install for the model; empty if it is not known here."""
    return planned_packages(launch, None)


def planned_packages(launch: Mapping[str, Any], more: list[str] | None) -> list[str]:
    """The same, with `more` packages of the launch, which override those of the definition."""
    from xinference.core.utils import (
        filter_virtualenv_packages_by_markers,
        merge_virtual_env_packages,
    )
    from xinference.core.virtual_env_manager import expand_engine_dependency_placeholders

    settings, engine = _settings(launch), launch.get("model_engine")
    defined = [] if settings is None else settings.packages or ()
    packages = expand_engine_dependency_placeholders([*defined], engine)
    packages = merge_virtual_env_packages(packages, more)
    return filter_virtualenv_packages_by_markers(packages, engine, None)  # type: ignore[no-any-return]


def package_sources(launch: Mapping[str, Any]) -> dict[str, list[str]]:
    """The places where xinference looks for packages, by pip's option; its indexes of GPU builds
    are not among them."""
    from xinference.utils import get_pip_config_args

    settings = _settings(launch)
    inherited = get_pip_config_args() if getattr(settings, "inherit_pip_config", True) else {}
    sources = {}
    for option in ("index_url", "extra_index_url", "find_links"):
        found = getattr(settings, option, None) or inherited.get(option) or []
        sources[option] = found.split() if isinstance(found, str) else [*found]
    return sources


# -- the API ---------------------------------------------------------------------------------------

COMPLETION, MESSAGE = "create_completion", "create_message"
TEXT_ENDPOINTS = {"create_chat_completion", COMPLETION, MESSAGE, "create_response"}
"""xinference's functions that answer with a text, at whatever paths."""


def data_folder() -> Path:
    from xinference.constants import XINFERENCE_HOME

    return Path(XINFERENCE_HOME)


def add_middleware(app: Any, middleware: Any, **options: object) -> None:
    """Add a middleware inside xinference's own, so that what those refuse (addresses, too many
    requests) costs nothing here."""
    # Not add_middleware: the last one added is the outermost.
    app.user_middleware.append(Middleware(middleware, **options))


def metrics_registry(app: Any, default: Any) -> Any:
    """The registry of xinference's own `/metrics`."""
    return getattr(app.state, "registry", default)


def wrap_require_model(wrap: Callable[[Any], Any]) -> None:
    """Wrap the function by which text routes find a model."""
    _wrap_anew("require_model", wrap)


def _wrap_anew(name: str, wrap: Callable[[Any], Any]) -> None:
    """Only the latest wrapper counts: if its default port is taken, xinference makes its API
    again."""
    from xinference.api import restful_api

    function = getattr(restful_api, name)
    original = getattr(function, "xavier_wraps", function)
    wrapper = wrap(original)
    wrapper.xavier_wraps = original
    setattr(restful_api, name, wrapper)


def note_chats(note: Callable[[Mapping[str, Any]], None]) -> None:
    """Tell `note` of the chat that xinference makes of a request in Anthropic's form, or in that of
    OpenAI's responses, before it looks for the model. It may run in another thread."""

    def noting(chat_of: Callable[[Any], Mapping[str, Any]], parse: Any) -> Any:
        @functools.wraps(parse)
        def noting(*args: Any, **kwargs: Any) -> Any:
            found = parse(*args, **kwargs)
            note(chat_of(found))
            return found

        return noting

    _wrap_anew(
        "parse_anthropic_request", functools.partial(noting, lambda found: found.to_openai_body())
    )
    _wrap_anew("parse_responses_request", functools.partial(noting, lambda found: found.chat_body))


def may_ask(auth_service: Any, request: Any, model_uid: str) -> bool:
    """True if the request's key admits it to the model."""
    key = getattr(request.state, "authenticated_api_key", None)
    if key is not None:
        return bool(key.has_model_access(model_uid, "LLM"))
    token = request.headers.get("authorization", "").partition(" ")[2].strip()
    return bool(auth_service.validate_model_access(token, model_uid, "LLM"))


def supplied_salt(request: Any) -> Any:
    """The `cache_salt` of an extension that supplies salts, with its `value`, or None. Raises
    whatever that extension raises."""
    from xinference.extensions import resolve_cache_salt

    return resolve_cache_salt(request)


def cache_salt(value: str) -> Any:
    """What an extension that supplies salts returns."""
    from xinference.extensions import CacheSalt

    return CacheSalt(value)


def note_own_salt(request: Any, salt: object) -> None:
    """Note the client's salt that our routes have found, for `own_salt`."""
    request.state.xavier_own_salt = salt


def own_salt(request: Any) -> object:
    """The `cache_salt` of the client: noted, or in the body of a text route, which xinference has
    read by then."""
    if hasattr(request.state, "xavier_own_salt"):
        return request.state.xavier_own_salt
    body = getattr(request, "_json", None)
    return body.get("cache_salt") if isinstance(body, dict) else None


def identity(request: Any) -> str:
    """Who asks: a text of its own for each API key, and for each account that asks without one.
    Raises AttributeError for a request that xinference has not authenticated."""
    key = getattr(request.state, "authenticated_api_key", None)
    if key is not None:
        return f"key {key.key_hash}"
    return f"user {request.state.audit_identity['user']}"


def correlated(model: Any) -> Any:
    """Lets the model's log name the request, as xinference's own `require_model` does."""
    from xinference.api.model_request_logging import get_current_model_request_id
    from xinference.core.rpc_context import correlate_model_ref

    return correlate_model_ref(model, get_current_model_request_id())


def anthropic_marks(config: Any) -> Any:
    """What `cache_control` marks in a request to Anthropic's route, as xinference has read it."""
    return config.get(_MARKS) if isinstance(config, dict) else None


async def answering(model: Any) -> int:
    """How many answers the model actor has not handed out completely."""
    return int(await model.generation_serve_count())


def is_full(error: Exception) -> bool:
    """True if a replica refused the request because of its request limit."""
    return _FULL in str(error)


def is_of_actor(error: Exception) -> bool:
    """True if the actor itself raised it, and not the connection: xoscar marks it with the actor's
    process."""
    return hasattr(error, "pid")


def keep_open(stream: Any) -> None:
    """Leave it to us to close a stream. Once it is collected, xoscar would block the event loop."""
    stream._gc_destroy = False
