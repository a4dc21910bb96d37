"""The configuration that an engine gets, and the values that each worker fills in.
`serving/launch/test_table.py` has what launches become."""

import json

import pytest

from xinference_xavier.config import (
    ENABLE,
    XavierConfig,
    for_worker,
    kv_transfer_config,
    own_config,
    take_launch_options,
)
from xinference_xavier.errors import ConfigError


def test_a_retired_option_of_an_earlier_configuration_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = XavierConfig("m", "10.0.0.1:9999")
    assert XavierConfig.from_dict({**config.to_dict(), "prefill_threshold": None}) == config
    assert not caplog.messages
    assert XavierConfig.from_dict({**config.to_dict(), "prefill_threshold": 500}) == config
    assert "xavier_prefill_threshold=500 is ignored; that option is gone: pref" in caplog.text


def test_a_refusal_leaves_the_arguments_as_they_were() -> None:
    kwargs = {ENABLE: "true", "xavier_pool_bytes": "1GiB", "xavier_transport": "nccl"}
    before = dict(kwargs)
    with pytest.raises(ConfigError):
        take_launch_options(kwargs)
    assert kwargs == before


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("routing", "fast"),
        ("routing", None),
        ("queue", -1),
        ("queue", "100"),
        ("queue", None),
        ("request_limit", 0),
        ("request_limit", -1),
        ("request_limit", 1.5),
    ],
)
def test_a_configuration_written_by_hand_is_checked(field: str, wrong: object) -> None:
    """With a wrong value, a tracker would refuse all that the replica reports."""
    plain = XavierConfig("m", "10.0.0.1:9999").to_dict()
    with pytest.raises(ConfigError, match=f"{field}=.* is malformed"):
        XavierConfig.from_dict({**plain, field: wrong})


def test_config_refuses_unknown_fields() -> None:
    plain = XavierConfig("m", "10.0.0.1:9999").to_dict()
    with pytest.raises(ConfigError, match="is not known to this version"):
        XavierConfig.from_dict({**plain, "colour": "red"})
    del plain["model_uid"]
    with pytest.raises(ConfigError, match="model_uid"):
        XavierConfig.from_dict(plain)


# -- the engine's configuration ---------------------------------------------------------------

CONFIG = XavierConfig("m", "0.0.0.0:9999", replicas_per_host=2, port_range=(40000, 40100))


def test_the_engine_is_told_our_connector_and_spec_in_json() -> None:
    transfer = json.loads(json.dumps(kv_transfer_config(CONFIG)))
    assert transfer["kv_connector_module_path"] == "xinference_xavier.engine.entry"
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_connector_extra_config"]["spec_name"] == "XavierSpec"
    assert own_config(transfer) == CONFIG


def test_ours_is_recognized_even_as_text() -> None:
    ours = kv_transfer_config(CONFIG)
    assert own_config(ours) == own_config(json.dumps(ours)) == CONFIG
    for other in (None, {}, {"kv_connector": "XavierConnector"}, "{}", "not JSON", "[]", 7):
        assert own_config(other) is None


def test_a_replica_added_on_another_worker_starts_from_the_supervisor_s_values() -> None:
    """xinference replays the first worker's launch arguments on the second."""
    first = for_worker(CONFIG, worker_address="0.0.0.0:70", supervisor_address="0.0.0.0:9999")
    assert (first.worker_address, first.tracker) == ("127.0.0.1:70", "127.0.0.1:9999")
    replayed = own_config(json.loads(json.dumps(kv_transfer_config(first))))
    assert replayed is not None
    second = for_worker(replayed, worker_address="10.0.0.2:70", supervisor_address="10.0.0.1:9999")
    assert (second.worker_address, second.tracker) == ("10.0.0.2:70", "10.0.0.1:9999")
