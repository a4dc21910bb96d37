"""A launch that could never share is refused before anything exists."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.launch.launching import Device, Placement, has_tracker, start, supervisor_class
from xinference_xavier.errors import ConfigError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n_worker": 2}, "n_worker=2 spreads one replica over several workers"),
    ({"n_worker": "2"}, "n_worker='2' spreads"),
    ({"kv_transfer_config": {"kv_connector": "Other"}}, "is set by enable_xavier"),
    ({"xavier_cache_bytes": 1, "xavier_queue": 1}, "built into xinference"),
    ({"xavier_pool_bytes": "4QiB"}, "is not a size"),
    ({"xavier_roles": "prefill:1,decode:2", "replica": 2}, "has 3 replicas, but 2 are launched"),
    ({"xavier_roles": "prefill:1,decode:1", "replica": 1}, "has 2 replicas, but 1 is launched"),
]


FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"model_engine": "SGLang"}, "model_engine='SGLang' cannot share its cache; use vLLM"),
    ({"model_engine": None}, "model_engine=None cannot share"),
    ({"model_type": "embedding"}, "model_type='embedding' has no prefixes"),
    ({"replica_config": [Placement(role="prefill")]}, "role='prefill' splits prefill"),
    ({"replica_config": [Placement(model_engine="mlx")]}, "model_engine='mlx' cannot share"),
]
THEIRS: list[dict[str, Any]] = [
    *(arguments for arguments, _ in FOREIGN),
    {"xavier_cache_bytes": 1 << 30, "xavier_cache_backend": "lmcache"},
    {"xavier_backend": "builtin"},
]


@pytest.mark.parametrize("arguments", THEIRS, ids=str)
async def test_what_the_built_in_xavier_can_do_is_left_to_it(
    supervisor: Any, arguments: dict[str, Any]
) -> None:
    await start(supervisor, **arguments)
    (call,) = supervisor.calls
    assert call["enable_xavier"] == "true"
    assert "kv_transfer_config" not in call
    assert "xavier_backend" not in call
    for name in arguments.keys() & call.keys():
        assert call[name] == arguments[name]
    assert supervisor._xavier_cache_mapping == {}
    assert not await has_tracker(supervisor)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *REFUSED,
        *((arguments | {"xavier_backend": "extension"}, text) for arguments, text in FOREIGN),
        *((arguments | {"xavier_queue": 1}, text) for arguments, text in FOREIGN),
    ],
)
async def test_what_cannot_share_is_refused_before_anything_exists(
    supervisor: Any, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await start(supervisor, **wrong)
    assert message in str(caught.value)
    assert supervisor.calls == []
    assert supervisor._xavier_cache_mapping == {}
    assert not await has_tracker(supervisor)


async def test_one_replica_is_allowed_with_a_warning(
    supervisor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await start(supervisor, replica=1)
    assert "nothing is shared until another is added" in caplog.text
    assert await has_tracker(supervisor)


async def test_memory_that_hosts_cannot_share_is_not_demanded(address: str) -> None:
    """A launch knows the hosts of some replicas only."""
    spread = [Placement([Device(worker)]) for worker in ("10.0.0.2", "10.0.0.1", "10.0.0.2")]
    supervisor = supervisor_class()(address, 2, False)
    with pytest.raises(
        ConfigError, match=r"one host, but replica_config names 10\.0\.0\.1, 10\.0\.0\.2"
    ):
        await start(supervisor, replica_config=spread, xavier_transport="shared_memory")
    assert supervisor.calls == []
    for options in (
        {"replica_config": spread},
        {"replica_config": spread[::2], "xavier_transport": "shared_memory"},
        {"replica": 2, "xavier_transport": "shared_memory"},
    ):
        await start(supervisor, model_uid=f"m{len(supervisor.calls)}", **options)
    assert len(supervisor.calls) == 3
    local = supervisor_class()(address, 1, True)  # where xinference ignores the placement
    await start(local, model_uid="l", replica_config=spread, xavier_transport="shared_memory")
