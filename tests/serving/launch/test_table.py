"""What a launch becomes, by its options and its server: what the engine of each replica is told,
what is left to xinference and the Xavier built into it, and what is refused before anything exists.

Both parts of a launch are ours, the supervisor's and the worker's. xinference between them is the
stand-in of `launching`. `tests/test_options.py` has the values of each option.
"""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.logged import messages
from tests.serving.launch.launching import (
    ARGUMENTS,
    Device,
    Placement,
    Worker,
    config_of,
    has_tracker,
    supervisor_class,
)
from xinference_xavier.config import ENABLE, UPSTREAM_OPTIONS, XavierConfig
from xinference_xavier.errors import ConfigError
from xinference_xavier.serving import seam
from xinference_xavier.vllm_versions import SHARES, UNTESTED

NOWHERE = "127.0.0.1:1"
"""A supervisor's address at which nothing can be made."""
Given = dict[str, Any]


class Server(NamedTuple):
    """Its number of workers, perhaps in one process with the supervisor, and the cluster's default
    of an option."""

    workers: int = 1
    local: bool = True
    default: tuple[str, str] = ("QUEUE", "")


def default(name: str, value: str) -> Server:
    return Server(default=(name, value))


HERE, BUILTIN = Server(), default("BACKEND", "builtin")


def asked(given: Given) -> Given:
    """A launch with sharing, unless `given` says otherwise."""
    switched = any(name.replace("-", "_") == ENABLE for name in given)
    return ({} if switched else {ENABLE: "true"}) | given


class Launch:
    """xinference gives the launch to a worker for each replica, and keeps what reaches it there."""

    def __init__(self, server: Server, address: str = NOWHERE) -> None:
        self.supervisor = supervisor_class()(address, server.workers, server.local)
        self.supervisor.start = self._start
        self.kept: list[Given] = []

    async def run(self, given: Given) -> list[Given]:
        plain = {name: value for name, value in ARGUMENTS.items() if name != ENABLE}
        await self.supervisor._launch_builtin_model(**plain | given)
        return self.kept

    async def _start(self, _: Any, model_uid: str) -> None:
        (call,) = self.supervisor.calls
        given = {name: call[name] for name in call.keys() - {"model_uid", "replica"}}
        for number in range(call["replica"]):
            worker = Worker()
            self.kept.append(await worker.launch_builtin_model(f"{model_uid}-rep{number}", **given))


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server, with the environment of all its processes."""
    server: Server = request.param
    name, value = server.default
    monkeypatch.setenv(f"XINFERENCE_XAVIER_{name}", value)
    return server


def table(names: str, rows: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Rows of what a launch is given, its server, and what then is so."""
    return pytest.mark.parametrize(f"given, server, {names}", rows, indirect=["server"], ids=str)


# -- what shares -------------------------------------------------------------------------------

REMOTE = {workers: Server(workers, local=False) for workers in (2, 4)}
SPREAD = [Placement([Device(worker)]) for worker in ("10.0.0.2", "10.0.0.1", "10.0.0.2")]
MEMORY = {"xavier_transport": "shared_memory"}
SHARED: list[tuple[Given, Server, Given]] = [
    *(({ENABLE: yes}, HERE, {}) for yes in (True, 1, "1", "true", "True", " TRUE ", "yes", "on")),
    ({"enable-xavier": "yes"}, HERE, {}),
    ({"xavier-queue": "7", "xavier_chunk_tokens": "256"}, HERE, {"queue": 7, "chunk_tokens": 256}),
    ({"xavier_pool_bytes": None, "xavier_host": None}, HERE, {}),
    ({"replica": 3}, HERE, {"replicas_per_host": 3}),
    ({"replica": 3}, REMOTE[2], {"replicas_per_host": 2}),
    ({"replica": 3}, REMOTE[4], {"replicas_per_host": 1}),
    ({"replica": 3, "worker_ip": "10.0.0.1"}, REMOTE[4], {"replicas_per_host": 3}),
    ({"replica_config": SPREAD}, REMOTE[4], {"replicas_per_host": 2}),
    # A launch knows the hosts of some replicas only; a local xinference ignores the placement.
    ({**MEMORY, "replica_config": SPREAD[::2]}, REMOTE[2], {"transport": "shared_memory"}),
    ({**MEMORY}, REMOTE[2], {"transport": "shared_memory", "replicas_per_host": 1}),
    ({**MEMORY, "replica_config": SPREAD}, HERE, {"transport": "shared_memory"}),
    ({"request_limits": 8}, HERE, {"request_limit": 8}),
    # Anything else is left to xinference.
    *(({"request_limits": limit}, HERE, {}) for limit in (None, 0, -1, "8", True)),
    ({"data_parallel_size": 4}, HERE, {"engines": 4}),
    ({"data_parallel_size": 8, "data_parallel_size_local": 2}, HERE, {"engines": 2}),
    ({"data_parallel_size": None, "envs": {"A": "b"}}, HERE, {}),
    ({"xavier_untested_vllm": True}, HERE, {"untested_vllm": True}),
    # The cluster's defaults.
    ({}, default("QUEUE", "7"), {"queue": 7, "from_environment": ("queue",)}),
    ({"xavier_queue": "8"}, default("QUEUE", "7"), {"queue": 8}),
    ({"xavier_queue": 8}, default("QUEUE", "long"), {"queue": 8}),
    # Whatever is ours makes the launch ours.
    ({"xavier_pool_bytes": "1GiB"}, BUILTIN, {"pool_bytes": 1 << 30}),
    ({"xavier_backend": "extension"}, BUILTIN, {}),
]


@table("told", SHARED)
async def test_what_each_replicas_engine_is_told(
    address: str, given: Given, server: Server, told: Given
) -> None:
    launch = Launch(server, address)
    kept = await launch.run(asked(given))
    assert len(kept) == given.get("replica", 2)
    config = replace(
        XavierConfig("m", address, worker_address="127.0.0.1:70", replicas_per_host=2),
        supervisor_address="10.0.0.1:9999",
        **told,
    )
    sharing = UNTESTED if config.untested_vllm else "1"
    others = {name: given[name] for name in given if name.startswith("data")}
    for each in kept:
        assert config_of(each) == config
        assert each == {
            **others,
            "kv_transfer_config": each["kv_transfer_config"],
            "envs": given.get("envs", {}) | {SHARES: sharing},
            "virtual_env_packages": None,  # what is installed does
        }
    # xinference replays the launch, perhaps on another worker.
    again = await Worker().launch_builtin_model("m-rep0", **json.loads(json.dumps(kept[0])))
    assert config_of(again) == config
    assert await has_tracker(launch.supervisor)


async def test_a_replica_has_the_role_of_its_number(address: str) -> None:
    launch = Launch(HERE, address)
    kept = await launch.run(asked({"xavier_roles": "prefill:1,decode:1", "replica": 3}))
    assert [config_of(each).role for each in kept] == ["prefill", "decode", "any"]
    again = await Worker().launch_builtin_model("m-rep1", **kept[0])
    assert config_of(again).role == "decode"


RETIRED = "prefill-threshold"


@table(
    "said",
    [
        ({"replica": 1}, HERE, "with one replica: nothing is shared until another is added"),
        ({f"xavier-{RETIRED}": 500}, HERE, f"xavier-{RETIRED}=500 is ignored; that option is gone"),
        ({}, default("PREFILL_THRESHOLD", "500"), "_THRESHOLD=500 is ignored; that option is gone"),
        ({}, default("POOL_SIZE", "4"), "_POOL_SIZE is no default of an option; did you mean XINF"),
        ({}, default("PROFILE", "1"), ""),  # xinference's own
        ({f"xavier-{RETIRED}": None}, HERE, ""),
    ],
)
async def test_what_shares_with_a_warning(
    address: str, given: Given, server: Server, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = await Launch(server, address).run(asked(given))
    assert kept[0].keys() == {"kv_transfer_config", "envs", "virtual_env_packages"}
    assert [said in each for each in messages(caplog)] == [True] * bool(said)


# -- what is left to xinference ----------------------------------------------------------------

ON, BUILT_IN, OFF = {ENABLE: "yes"}, {ENABLE: True}, {ENABLE: False}
UPSTREAM = dict.fromkeys(sorted(UPSTREAM_OPTIONS), 1) | {"xavier_new_upstream_option": 2}
FOREIGN: list[tuple[Given, str]] = [
    ({"model_engine": "SGLang"}, "model_engine='SGLang' cannot share its cache; use vLLM"),
    ({"model_engine": None}, "model_engine=None cannot share"),
    ({"model_type": "embedding"}, "model_type='embedding' has no prefixes"),
    ({"replica_config": [Placement(role="prefill")]}, "role='prefill' splits prefill"),
    ({"replica_config": [Placement(model_engine="mlx")]}, "model_engine='mlx' cannot share"),
]
"""What only the built-in Xavier may do something for, and why we cannot."""
LEFT: list[tuple[Given, Server, Given]] = [
    # Without sharing. xinference takes bool("false") for True, so it must get a real False.
    ({"dtype": "float32"}, HERE, {"dtype": "float32"}),
    *(({ENABLE: no}, HERE, OFF) for no in (False, 0, "0", "false", "False", "no", "off", None)),
    ({"enable-xavier": "false", "n_worker": 4, "model_engine": "sglang"}, HERE, OFF),
    ({**UPSTREAM, "kv_transfer_config": {}}, HERE, {**UPSTREAM, "kv_transfer_config": {}}),
    ({**UPSTREAM, ENABLE: "false"}, HERE, {**UPSTREAM, **OFF}),
    # With the built-in one, which knows its options by one spelling, and none of ours.
    (ON, BUILTIN, BUILT_IN),
    ({**ON, "xavier_backend": " Builtin "}, HERE, BUILT_IN),
    ({"enable-xavier": 1, "xavier-backend": "builtin", "xavier-host": None}, HERE, BUILT_IN),
    ({**ON, "xavier-cache-bytes": 1}, HERE, {**BUILT_IN, "xavier_cache_bytes": 1}),
    *(({**ON, name: 1}, HERE, {**BUILT_IN, name: 1}) for name in sorted(UPSTREAM_OPTIONS)),
    *(({**ON, **foreign}, HERE, BUILT_IN) for foreign, _ in FOREIGN),
]


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    """xinference lacks something that we use."""
    monkeypatch.setattr(seam, "_missing", ("SupervisorActor.launches is gone",))


@pytest.mark.parametrize("extension", ["on", "off"])
@table("passed", LEFT)
async def test_what_is_left_to_xinference(
    given: Given, server: Server, passed: Given, extension: str, request: pytest.FixtureRequest
) -> None:
    if extension == "off":
        request.getfixturevalue("off")
    launch = Launch(server)
    await launch.run(given)
    assert launch.supervisor.calls == [{"model_uid": "m", "replica": 2, **passed}]
    assert launch.supervisor._xavier_cache_mapping == {}


async def test_our_options_without_sharing_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    launch = Launch(HERE)
    await launch.run({"xavier-pool-bytes": "nonsense", "xavier_backend": "builtin"})
    assert launch.supervisor.calls == [{"model_uid": "m", "replica": 2}]
    assert "xavier-pool-bytes, xavier_backend ignored" in caplog.text


# -- what is refused ---------------------------------------------------------------------------

EXCLUDED = "belongs to the Xavier built into xinference, which excludes this one; leave it out, or "
NEITHER: list[object] = ["maybe", "", 2, [], "tru"]
NO_SIZE = "is not a size; use a positive number of bytes or a size like 4GiB or 512MiB"
REFUSED: list[tuple[Given, Server, str]] = [
    *(({ENABLE: what}, HERE, "is neither true nor false") for what in NEITHER),
    ({ENABLE: True, "enable-xavier": False}, HERE, "is given twice and contradicts itself"),
    ({"xavier-transport": "gloo", "xavier_transport": "auto"}, HERE, "is given twice; give xav"),
    ({"xavier_pool_bytes": "4QiB"}, HERE, f"xavier_pool_bytes='4QiB' {NO_SIZE}"),
    ({}, default("POOL_BYTES", "all"), f"XINFERENCE_XAVIER_POOL_BYTES='all' {NO_SIZE}"),
    ({"xavier_pool_size": 1}, HERE, "is not an option; did you mean xavier_pool_bytes?"),
    ({"xavier-timeout": 1}, HERE, "did you mean xavier_fetch_timeout?"),
    ({"xavier_hooks": "nowhere:hook"}, HERE, "xavier_hooks='nowhere:hook' cannot be imported"),
    # Two Xaviers.
    *(({name: 1, "xavier_queue": 1}, HERE, EXCLUDED) for name in sorted(UPSTREAM_OPTIONS)),
    ({"xavier_cache_bytes": 1, "xavier_backend": "extension"}, HERE, EXCLUDED),
    ({"xavier_queue": 3, "xavier_backend": "builtin"}, HERE, "xavier_queue=3 is an option of this"),
    ({"xavier_backend": "lmcache"}, HERE, "use one of extension, builtin"),
    ({}, default("BACKEND", "mine"), "XINFERENCE_XAVIER_BACKEND='mine' is not a choice; use one"),
    *(({**given, "xavier_backend": "extension"}, HERE, why) for given, why in FOREIGN),
    *(({**given, "xavier_queue": 1}, BUILTIN, why) for given, why in FOREIGN),
    # What could never share.
    ({"n_worker": 2}, HERE, "n_worker=2 spreads one replica over several workers"),
    ({"n_worker": "2"}, HERE, "n_worker='2' spreads"),
    ({"model_uid": "org/m"}, HERE, "model_uid='org/m' has a slash"),
    ({"model_uid": "."}, HERE, "model_uid='.' has"),
    ({"kv_transfer_config": {"kv_connector": "Other"}}, HERE, "is set by enable_xavier"),
    ({"xavier_roles": "prefill:1,decode:2"}, HERE, "has 3 replicas, but 2 are launched"),
    ({"xavier_roles": "any:2", "replica": 1}, HERE, "has 2 replicas, but 1 is launched"),
    ({**MEMORY, "replica_config": SPREAD}, REMOTE[2], "but replica_config names 10.0.0.1, 10."),
]


@table("why", REFUSED)
async def test_what_is_refused_before_anything_exists(
    given: Given, server: Server, why: str
) -> None:
    launch = Launch(server)
    with pytest.raises(ConfigError) as refused:
        await launch.run(asked(given))
    assert why in str(refused.value)
    assert launch.supervisor.calls == []
    assert launch.supervisor._xavier_cache_mapping == {}


async def test_where_the_extension_is_off_sharing_is_refused(off: None) -> None:
    launch = Launch(HERE)
    with pytest.raises(ConfigError, match=r"lacks what sharing uses \(SupervisorActor\.launches"):
        await launch.run(asked({}))
    assert launch.supervisor.calls == []


async def test_a_vllm_that_does_not_share_is_refused_by_the_worker(address: str) -> None:
    """Before anything is downloaded."""
    launch = Launch(HERE, address)
    given = {"virtual_env_packages": ["vllm==0.27.1"], "enable_virtual_env": True}
    with pytest.raises(ConfigError, match="is what the launch asks for, and sharing needs"):
        await launch.run(asked(given))
    assert launch.kept == []
    assert not await has_tracker(launch.supervisor)
