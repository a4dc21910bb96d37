"""The engine's configuration, and the values that each worker fills in."""

from __future__ import annotations

import copy
import json
from typing import Any

from xinference_xavier.config import (
    XavierConfig,
    for_worker,
    kv_transfer_config,
    own_transfer_config,
)

CONFIG = XavierConfig("m", "0.0.0.0:9999", replicas_per_host=2)


def config_in(transfer: dict[str, Any]) -> XavierConfig:
    return XavierConfig.from_dict(transfer["kv_connector_extra_config"]["xavier"])


def test_it_names_our_connector_and_spec_and_survives_json() -> None:
    transfer = json.loads(json.dumps(kv_transfer_config(CONFIG)))
    assert transfer["kv_connector_module_path"] == "xinference_xavier.engine.entry"
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_connector_extra_config"]["spec_name"] == "XavierSpec"
    assert config_in(transfer) == CONFIG


def test_ours_is_recognized_even_as_text() -> None:
    ours = kv_transfer_config(CONFIG)
    assert own_transfer_config(ours) == ours
    assert own_transfer_config(json.dumps(ours)) == ours
    for other in (None, {}, {"kv_connector": "XavierConnector"}, "{}", "not JSON", "[]", 7):
        assert own_transfer_config(other) is None


def test_a_worker_fills_in_its_own_values() -> None:
    transfer = kv_transfer_config(CONFIG)
    before = copy.deepcopy(transfer)
    here = config_in(
        for_worker(transfer, worker_address="10.0.0.2:70", supervisor_address="10.0.0.1:9999")
    )
    assert transfer == before
    assert here.worker_address == "10.0.0.2:70"
    assert here.tracker_address == "10.0.0.1:9999"
    assert here.pool_bytes is not None
    assert here.pool_bytes > 0


def test_wildcards_everywhere_mean_this_host() -> None:
    here = config_in(
        for_worker(
            kv_transfer_config(CONFIG),
            worker_address="0.0.0.0:70",
            supervisor_address="0.0.0.0:9999",
        )
    )
    assert (here.worker_address, here.tracker_address) == ("127.0.0.1:70", "127.0.0.1:9999")


def test_a_replica_added_on_another_worker_starts_from_the_supervisor_s_values() -> None:
    """xinference replays the first worker's launch arguments on the second."""
    first = for_worker(
        kv_transfer_config(CONFIG), worker_address="0.0.0.0:70", supervisor_address="0.0.0.0:9999"
    )
    replayed = json.loads(json.dumps(first))
    second = config_in(
        for_worker(replayed, worker_address="10.0.0.2:70", supervisor_address="10.0.0.1:9999")
    )
    assert (second.worker_address, second.tracker_address) == ("10.0.0.2:70", "10.0.0.1:9999")


def test_a_pool_size_that_was_given_stays() -> None:
    config = XavierConfig("m", "10.0.0.1:9999", pool_bytes=1 << 20)
    here = config_in(
        for_worker(kv_transfer_config(config), worker_address="w:1", supervisor_address=None)
    )
    assert here.pool_bytes == 1 << 20
