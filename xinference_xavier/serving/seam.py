"""What the serving side uses of xinference, and of xoscar, beyond what extensions are given.

Such names are used only here, in functions that say what they are for. `NEEDS` lists them by what
is off without them; `tests/serving/test_seam.py` holds the installed versions against it.
"""

import dis
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from packaging.version import Version
from starlette.middleware import Middleware

logger = logging.getLogger(__name__)


class Feature(StrEnum):
    """What follows if something is missing that it needs, as the log and `doctor` say it."""

    SHARING = "no model shares its cache"
    ROLLBACKS = "xavier_hooks does not learn of launches that fail in the background"
    CANCELS = "replicas of a cancelled launch may go on"
    CAUSES = "a launch that fails does not say why its engine did not start"
    READINESS = "replicas take requests before their peers can fetch from them"
    ENVIRONMENTS = "nothing chooses the vLLM of a model's own environment"
    WORKERS = "doctor does not see the workers"
    PLACEMENT = "metrics of replicas lack worker_address"
    FINDING = "requests go to replicas in turn, and named prefixes are not computed in advance"
    ROUTING = "requests go to replicas in turn, and those that name a prefix go without it"
    CHATS = "requests to /v1/messages and /v1/responses may go where their prefix is not"
    ENDPOINTS = "requests of its route go to replicas in turn"
    LOGS = "the logs of models do not name routed requests"
    LIMITS = "a request to a replica at its limit is refused, even if another one has room"
    PLACES = "a stream that is abandoned keeps its place in the replica's limit"
    STREAMS = "a stream that is abandoned may block the API"
    ACCESS = "nobody may see the prefixes and explanations of models"
    KEYS = "no API key may change anything"
    MIDDLEWARES = "what xinference refuses costs more"
    FOLDER = "named prefixes are stored in ~/.xinference"
    POOLS = "cancelled calls to a pool on 0.0.0.0 may occupy a core"
    SALTS = "the cache_salt that another extension supplies is not known"
    MARKS = "what cache_control marks is not kept"
    DRAINING = "open streams delay the end of an API process"
    REMOVALS = "a replica is removed before its answers end"
    ANSWERS = "a client that reads slowly loses the end of an answer when its replica is removed"


NEWER = frozenset({Feature.SALTS, Feature.MARKS, Feature.DRAINING, Feature.ANSWERS})
"""Features that need xinference 4.1."""

_SUPERVISOR = "xinference.core.supervisor:SupervisorActor"
_WORKER = "xinference.core.worker:WorkerActor"
_MODEL = "xinference.core.model:ModelActor"
_FULL = "Rate limit reached"
_MARKS = "_anthropic_cache_control"
NEEDS: dict[Feature, dict[str, tuple[str, ...]]] = {
    Feature.SHARING: {
        _SUPERVISOR: (
            # 4.1 has an inner method for REST, versioned launch and autostart; 4.0 has only the
            # outer one.
            "_launch_builtin_model|launch_builtin_model(model_uid, model_name, model_engine, "
            "model_type, replica, n_worker, request_limits, worker_ip, replica_config, kwargs)",
            "_gen_model_uid(model_name)",
            "is_local_deployment",
            "_model_uid_to_replica_info",
            "_replica_model_uid_to_worker",
            "_replica_model_uid_to_worker_shards",
            "_worker_address_to_worker",
            "_xavier_cache_mapping",
        ),
        _WORKER: (
            "launch_builtin_model(model_uid, virtual_env_packages, envs, kwargs)",
            "_supervisor_address",
        ),
        "xinference.core.replica_config:ReplicaConfig": ("model_engine", "role", "devices"),
        "xinference.core.replica_config:DeviceConfig": ("worker_ip",),
        "xinference.core.utils": ("parse_replica_model_uid(replica_model_uid)",),
    },
    Feature.ROLLBACKS: {_SUPERVISOR: ("terminate_model(model_uid)",)},
    Feature.CANCELS: {
        _SUPERVISOR: (
            "cancel_launch_builtin_model(model_uid)",
            "_model_uid_to_replica_info",
            "_replica_model_uid_to_worker",
            "_replica_model_uid_to_worker_shards",
        ),
        "xinference.core.supervisor:ReplicaInfo": ("active_replica_ids", "replica_to_worker_refs"),
        _WORKER: ("terminate_model(model_uid)",),
    },
    Feature.CAUSES: {_WORKER: ("wait_for_load(model_uid)", "_model_uid_to_launch_args")},
    Feature.READINESS: {
        _WORKER: (
            "_update_model_state(model_uid, state)",
            "_model_uid_to_model",
            "_model_uid_to_launch_args",
        )
    },
    Feature.ENVIRONMENTS: {
        "xinference.constants": ("XINFERENCE_ENABLE_VIRTUAL_ENV",),
        "xinference.core.utils": ("filter_virtualenv_packages_by_markers",),
        "xinference.core.virtual_env_manager": ("expand_engine_dependency_placeholders",),
        "xinference.model.llm.custom": ("get_user_defined_llm_families",),
        "xinference.model.llm.llm_family": ("BUILTIN_LLM_FAMILIES",),
    },
    Feature.WORKERS: {_SUPERVISOR: ("_worker_address_to_worker",)},
    Feature.PLACEMENT: {
        _SUPERVISOR: ("_model_uid_to_replica_info", "_replica_model_uid_to_worker"),
        "xinference.core.supervisor:ReplicaInfo": ("active_replica_ids",),
    },
    Feature.FINDING: {
        _SUPERVISOR: ("get_model(model_uid)", "_replica_model_uid_to_worker"),
        _WORKER: ("get_model(model_uid)",),
    },
    Feature.ROUTING: {
        "xinference.api.restful_api": ("require_model(get_supervisor_ref, model_uid)",)
    },
    Feature.CHATS: {
        "xinference.api.restful_api": ("parse_anthropic_request", "parse_responses_request"),
        "xinference.api.protocols.anthropic:CanonicalChatRequest": ("to_openai_body",),
        "xinference.api.protocols.openai_responses:ResponsesRequest": ("chat_body",),
    },
    Feature.ENDPOINTS: {
        "xinference.api.restful_api:RESTfulAPI": (
            "create_chat_completion(request)",
            "create_completion(request)",
            "create_message(request)",
            "create_response(request)",
        )
    },
    Feature.LOGS: {
        "xinference.api.model_request_logging": ("get_current_model_request_id",),
        "xinference.core.rpc_context": ("correlate_model_ref",),
    },
    Feature.LIMITS: {"xinference.core.model": (f"'{_FULL}'",)},
    Feature.PLACES: {_MODEL: ("decrease_serve_count",)},
    Feature.STREAMS: {"xoscar.api:IteratorWrapper": ("destroy", "_gc_destroy")},
    Feature.ACCESS: {
        "xinference.api.oauth2.advanced.auth_service:AdvancedAuthService": (
            "validate_model_access(token, model_uid, model_type)",
        ),
        "xinference.api.oauth2.advanced.cache:ApiKeyCacheEntry": (
            "has_model_access(model_uid, model_type)",
        ),
    },
    Feature.KEYS: {
        "xinference.api.oauth2.advanced.auth_service:AdvancedAuthService": (
            "__call__(request, security_scopes, token)",
            "validate_api_key(key)",
            "db",
        ),
        "xinference.api.oauth2.advanced.database:Database": ("get_user_by_id(user_id)",),
        "xinference.api.oauth2.advanced.cache:ApiKeyCacheEntry": (
            "has_model_access(model_uid, model_type)",
            "model_permissions",
            "user_id",
        ),
        "xinference.api.oauth2.advanced.cache:ModelPermission": (
            "permission_type",
            "permission_value",
        ),
    },
    Feature.MIDDLEWARES: {"fastapi:FastAPI": ("user_middleware",)},
    Feature.FOLDER: {"xinference.constants": ("XINFERENCE_HOME",)},
    Feature.POOLS: {  # which `runtime.net` mends
        "xoscar.backends.indigen.pool:MainActorPool": ("_message_handler",),
        "xoscar.backends.message:MessageType": ("cancel",),
    },
    Feature.SALTS: {"xinference.extensions": ("resolve_cache_salt(request)",)},
    Feature.MARKS: {
        _MODEL: ("prepare_anthropic_request",),
        "xinference.api.protocols.anthropic": (f"'{_MARKS}'",),
    },
    Feature.REMOVALS: {
        _SUPERVISOR: (
            "terminate_model_replica(model_uid, replica_id)",
            "_model_uid_to_replica_info",
            "_replica_model_uid_to_worker",
            "_xavier_cache_mapping",
        ),
        "xinference.core.supervisor:ReplicaInfo": ("active_replica_ids",),
        _WORKER: ("get_model(model_uid)",),
    },
    Feature.ANSWERS: {_MODEL: ("generation_serve_count",)},
    Feature.DRAINING: {"xinference.deploy.api_worker:HostedServer": ("draining",)},
}
"""Names of a module or class, or texts in its source. Either name of `a|b` will do, and a function
must take the named parameters."""


_missing_of: dict[Feature, list[str]] = {}


def works(feature: Feature) -> bool:
    """Whether the installed xinference has what it needs. The first call looks, which may import
    much of xinference; a warning says what is missing."""
    if feature not in _missing_of:
        _missing_of[feature] = faults([feature])
        if _missing_of[feature]:
            missing = "; ".join(_missing_of[feature])
            logger.warning("this xinference lacks what we use: %s", missing)
    return not _missing_of[feature]


def known_faults() -> dict[str, bool]:
    """What `works` has found missing, and whether it keeps replicas from sharing."""
    return {
        fault: feature is Feature.SHARING
        for feature, found in _missing_of.items()
        for fault in found
    }


def faults(features: Iterable[Feature] = Feature) -> list[str]:
    """What the installed xinference lacks of what we use, a sentence each."""
    return [
        f"{missing}: {feature}"
        for feature in features
        if feature not in NEWER or Version(metadata.version("xinference")) >= Version("4.1")
        for missing in _missing(feature)
    ]


def _missing(feature: Feature) -> Iterator[str]:
    for path, needs in NEEDS[feature].items():
        try:
            owner = _find(path)
        except (ImportError, AttributeError):
            yield f"{path.replace(':', '.')} is gone"
        else:
            known = _names(owner)
            for need in needs:
                yield from _compared(owner, known, need)


def _find(path: str) -> Any:
    module, _, name = path.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


def _actor(path: str) -> type[Any] | None:
    try:
        return _find(path)  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        return None


def _compared(owner: Any, known: set[str], need: str) -> Iterator[str]:
    if need.startswith("'"):
        if not _contains(owner, need.strip("'")):
            yield f"{owner.__name__} lacks {need}"
        return
    names, _, parameters = need.removesuffix(")").partition("(")
    name = next((each for each in names.split("|") if each in known), None)
    if name is None:
        yield f"{owner.__name__}.{names} is gone"
    elif parameters:
        function = getattr(owner, name)
        taken = inspect.signature(function).parameters if callable(function) else {}
        lacking = [each for each in parameters.split(", ") if each not in taken]
        if lacking:
            yield f"{owner.__name__}.{name} takes no {', '.join(lacking)}"


def _contains(owner: Any, text: str) -> bool:
    try:
        return text in inspect.getsource(owner)
    except OSError:  # no sources are installed
        return True


def _names(owner: Any) -> set[str]:
    """Names of its attributes, and of those that its methods give its instances."""
    names = {*dir(owner)}
    for kind in getattr(owner, "__mro__", ()):
        names |= {*vars(kind).get("__annotations__", ())}
        codes = (getattr(inspect.unwrap(each), "__code__", None) for each in vars(kind).values())
        for code in filter(None, codes):
            made = dis.get_instructions(code)
            names |= {each.argval for each in made if each.opname == "STORE_ATTR"}
    return names


# -- the supervisor --------------------------------------------------------------------------------


def supervisor_actor() -> type[Any] | None:
    """xinference's supervisor; None if it is gone. Its module loads the extension, so it cannot be
    imported earlier."""
    return _actor(_SUPERVISOR)


def launch_method(supervisor: type[Any]) -> str:
    """The method that every launch passes."""
    inner = "_launch_builtin_model"
    return inner if hasattr(supervisor, inner) else "launch_builtin_model"


def control_address(supervisor: Any) -> str:
    # 4.0 has only the actor's own address.
    address: str = getattr(supervisor, "control_address", supervisor.address)
    return address


def new_model_uid(supervisor: Any, model_name: str) -> str:
    return str(supervisor._gen_model_uid(model_name))


def trackers(supervisor: Any) -> dict[str, Any]:
    """References to trackers by model, which xinference destroys when the model ends. The built-in
    Xavier keeps its own there, too."""
    return getattr(supervisor, "_xavier_cache_mapping", {})


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
    """Raises KeyError."""
    worker = supervisor._replica_model_uid_to_worker[replica]
    return worker[0] if isinstance(worker, (list, tuple)) else worker  # a replica of several


def worker_addresses(supervisor: Any, model_uid: str) -> dict[str, str]:
    """The address of the worker of each of the model's replicas."""
    found: dict[str, str] = {}
    if works(Feature.PLACEMENT):
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
    return getattr(supervisor, "_worker_address_to_worker", {})


# -- a worker --------------------------------------------------------------------------------------


def worker_actor() -> type[Any] | None:
    """xinference's worker, in the same way."""
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
    """Whether a model gets one, if its launch asks for it, does not, or leaves it open (None)."""
    from xinference.constants import XINFERENCE_ENABLE_VIRTUAL_ENV

    return bool(XINFERENCE_ENABLE_VIRTUAL_ENV if asked is None else asked)


def defined_packages(launch: Mapping[str, Any]) -> list[str]:
    """The packages that xinference would install for the model; empty if it is not known here."""
    from xinference.core.utils import filter_virtualenv_packages_by_markers
    from xinference.core.virtual_env_manager import expand_engine_dependency_placeholders
    from xinference.model.llm.custom import get_user_defined_llm_families
    from xinference.model.llm.llm_family import BUILTIN_LLM_FAMILIES

    name, engine = launch.get("model_name"), launch.get("model_engine")
    families = [*get_user_defined_llm_families(), *BUILTIN_LLM_FAMILIES]
    family = next((family for family in families if family.model_name == name), None)
    settings = getattr(family, "virtualenv", None)
    if settings is None:
        return []
    packages = expand_engine_dependency_placeholders([*(settings.packages or ())], engine)
    return filter_virtualenv_packages_by_markers(packages, engine, None)  # type: ignore[no-any-return]


# -- the API ---------------------------------------------------------------------------------------

COMPLETION, MESSAGE = "create_completion", "create_message"
TEXT_ENDPOINTS = {"create_chat_completion", COMPLETION, MESSAGE, "create_response"}
"""xinference's functions that answer with a text, at whatever paths."""


def data_folder() -> Path:
    from xinference import constants

    return Path(getattr(constants, "XINFERENCE_HOME", Path.home() / ".xinference"))


def add_middleware(app: Any, middleware: Any, **options: object) -> None:
    """Inside xinference's own, so that what those refuse (addresses, too many requests) costs
    nothing here."""
    if hasattr(app, "user_middleware"):
        # Not add_middleware: the last one added is the outermost.
        app.user_middleware.append(Middleware(middleware, **options))
    else:
        app.add_middleware(middleware, **options)


def metrics_registry(app: Any, default: Any) -> Any:
    """The registry of xinference's own `/metrics`."""
    return getattr(app.state, "registry", default)


def wrap_require_model(wrap: Callable[[Any], Any]) -> None:
    """Wrap the function by which text routes find a model."""
    _wrap_anew("require_model", wrap)


def _wrap_anew(name: str, wrap: Callable[[Any], Any]) -> None:
    """Only the latest wrapper counts: if its port is taken, xinference 4.0 makes its API again."""
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
    """Whether the request's key admits it to the model. Without an `auth_service` all may."""
    # From 4.1 on, xinference keeps the request's key there; with 4.0, look it up again.
    key = getattr(request.state, "authenticated_api_key", None)
    if key is not None:
        return bool(key.has_model_access(model_uid, "LLM"))
    validate = getattr(auth_service, "validate_model_access", None)
    token = request.headers.get("authorization", "").partition(" ")[2].strip()
    return validate is None or bool(validate(token, model_uid, "LLM"))


CHANGES = ("xavier", "write")
"""Type and value of a permission of ours among a key's `model_permissions`. xinference keeps those
that it does not know, and none of its own routes opens to them."""


def key_may_change(auth_service: Any, token: str, model_uid: str) -> bool:
    """Whether this is an API key for the model with that permission, whose owner may change models.

    The owner counts because accounts make keys for themselves, with any permissions.
    """
    validate = getattr(auth_service, "validate_api_key", None)
    key = validate(token) if validate is not None and works(Feature.KEYS) else None
    if key is None or not key.has_model_access(model_uid, "LLM"):
        return False
    given = {(each.permission_type, each.permission_value) for each in key.model_permissions}
    owner = auth_service.db.get_user_by_id(key.user_id) if CHANGES in given else None
    return owner is not None and not {"admin", "models:write"}.isdisjoint(owner["permissions"])


def supplied_salt(request: Any) -> Any:
    """The `cache_salt` of an extension that supplies salts, with its `value`, or None. Raises
    whatever that extension raises."""
    from xinference import extensions

    resolve = getattr(extensions, "resolve_cache_salt", None)  # from 4.1 on
    return None if resolve is None else resolve(request)


def correlated(model: Any) -> Any:
    """Lets the model's log name the request, as xinference's own `require_model` does."""
    try:
        from xinference.api.model_request_logging import get_current_model_request_id
        from xinference.core.rpc_context import correlate_model_ref
    except ImportError:
        return model
    return correlate_model_ref(model, get_current_model_request_id())


def anthropic_marks(config: Any) -> Any:
    """What `cache_control` marks in a request to Anthropic's route, as xinference has read it."""
    return config.get(_MARKS) if isinstance(config, dict) else None


async def answering(model: Any) -> int:
    """How many answers the model actor has not handed out completely. From 4.1 on."""
    return int(await model.generation_serve_count())


def is_full(error: Exception) -> bool:
    """Whether a replica refused the request because of its request limit."""
    return _FULL in str(error)


def is_of_actor(error: Exception) -> bool:
    """Whether the actor itself raised it, and not the connection: xoscar marks it with the actor's
    process."""
    return hasattr(error, "pid")


def keep_open(stream: Any) -> None:
    """Leave it to us to close a stream. Once it is collected, xoscar would block the event loop."""
    stream._gc_destroy = False


def drains(server: Any) -> bool:
    """Whether the server takes no more connections, and waits until all are closed. Only that of
    xinference 4.1 and later has such a state."""
    return bool(getattr(server, "draining", False))
