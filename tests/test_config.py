"""Launch options: which are accepted, which are refused, and the messages; the configuration that
an engine gets, and the values that each worker fills in."""

import json
from typing import Any

import pytest

from tests.launch_options import parsed, refusal
from xinference_xavier.config import (
    ENABLE,
    UPSTREAM_OPTIONS,
    XavierConfig,
    for_worker,
    kv_transfer_config,
    own_config,
    take_launch_options,
)
from xinference_xavier.errors import ConfigError
from xinference_xavier.options import LaunchOptions

GiB = 1 << 30


@pytest.mark.parametrize("yes", [True, 1, "1", "true", "True", " TRUE ", "yes", "on"])
@pytest.mark.parametrize("name", ["enable_xavier", "enable-xavier"])
def test_enabled(name: str, yes: object) -> None:
    assert take_launch_options({name: yes}) == LaunchOptions()


@pytest.mark.parametrize("no", [False, 0, "0", "false", "False", "no", "off", None])
def test_text_that_means_no_is_no(no: object) -> None:
    """xinference takes bool("false") for True, so it must get a real False."""
    kwargs = {"enable-xavier": no}
    assert take_launch_options(kwargs) is None
    assert kwargs == {ENABLE: False}


@pytest.mark.parametrize("neither", ["maybe", "", 2, [], "tru"])
def test_values_that_are_neither_true_nor_false_are_refused(neither: object) -> None:
    assert "neither true nor false" in refusal(enable_xavier=neither)


def test_options_are_taken_out_in_both_spellings_and_others_stay() -> None:
    kwargs = {
        "enable-xavier": "true",
        "xavier-pool-bytes": "4GiB",
        "xavier_chunk_tokens": "256",
        "max_model_len": 16384,
    }
    options = take_launch_options(kwargs)
    assert options == LaunchOptions(pool_bytes=4 * GiB, chunk_tokens=256)
    assert kwargs == {"max_model_len": 16384}


def test_the_same_option_in_both_spellings_is_refused() -> None:
    assert "given twice" in refusal(**{"xavier-transport": "gloo", "xavier_transport": "auto"})
    assert "contradicts itself" in refusal(**{"enable-xavier": False})


def test_none_means_not_given() -> None:
    assert parsed(xavier_pool_bytes=None, xavier_host=None) == LaunchOptions()


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    assert refusal(xavier_pool_size=1) == (
        "xavier_pool_size=1 is not an option; did you mean xavier_pool_bytes?"
    )
    assert "did you mean xavier_fetch_timeout?" in refusal(**{"xavier-timeout": 1})


def test_a_refusal_names_value_reason_and_remedy_in_one_sentence() -> None:
    assert refusal(xavier_pool_bytes="4QiB") == (
        "xavier_pool_bytes='4QiB' is not a size; "
        "use a positive number of bytes or a size like 4GiB or 512MiB"
    )


class TestWhoseLaunchItIs:
    """Ours, or that of the Xavier built into xinference, which gets its arguments as xinference
    spells them."""

    @pytest.fixture(autouse=True)
    def _no_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XINFERENCE_XAVIER_BACKEND", raising=False)

    def is_ours(self, foreign: bool = False, **options: Any) -> bool:
        kwargs = {"enable-xavier": "yes", "dtype": "float32", "xavier-host": None, **options}
        ours = take_launch_options(kwargs, foreign) is not None
        theirs = {
            plain: value
            for name, value in options.items()
            if (plain := name.replace("-", "_")) in UPSTREAM_OPTIONS
        }
        assert kwargs == {"dtype": "float32", **({} if ours else {ENABLE: True, **theirs})}
        return ours

    def test_it_is_ours_unless_something_speaks_for_theirs(self) -> None:
        assert self.is_ours()
        assert not self.is_ours(foreign=True)

    @pytest.mark.parametrize("name", sorted(UPSTREAM_OPTIONS))
    def test_their_options_make_it_theirs(self, name: str) -> None:
        assert not self.is_ours(**{name: 1})
        assert not self.is_ours(**{name.replace("_", "-"): 1})

    def test_ours_make_it_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XINFERENCE_XAVIER_BACKEND", "builtin")
        assert self.is_ours(xavier_pool_bytes="1GiB")
        assert self.is_ours(xavier_pool_bytes="1GiB", foreign=True), "which its launch refuses"

    @pytest.mark.parametrize("name", sorted(UPSTREAM_OPTIONS))
    def test_both_are_refused(self, name: str) -> None:
        message = refusal(**{name: 1, "xavier_pool_bytes": "1GiB"})
        assert "built into xinference, which excludes this one" in message
        assert "use xavier_backend=builtin" in message

    @pytest.mark.parametrize("name", ["xavier_backend", "xavier-backend"])
    def test_a_word_decides(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not self.is_ours(**{name: " Builtin "})
        monkeypatch.setenv("XINFERENCE_XAVIER_BACKEND", "builtin")
        assert self.is_ours(xavier_backend="extension")
        assert self.is_ours(xavier_backend="extension", foreign=True), "which its launch refuses"

    def test_a_word_against_the_options_is_refused(self) -> None:
        assert refusal(xavier_backend="builtin", xavier_queue=3) == (
            "xavier_queue=3 is an option of this extension, which xavier_backend=builtin leaves "
            "out; leave it out, or use xavier_backend=extension"
        )
        message = refusal(xavier_backend="extension", xavier_cache_bytes=1)
        assert "belongs to the Xavier built into xinference" in message
        assert "use one of extension, builtin" in refusal(xavier_backend="lmcache")

    def test_the_cluster_has_a_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XINFERENCE_XAVIER_BACKEND", "builtin")
        assert not self.is_ours()
        monkeypatch.setenv("XINFERENCE_XAVIER_BACKEND", "")
        assert self.is_ours()
        monkeypatch.setenv("XINFERENCE_XAVIER_BACKEND", "mine")
        assert refusal().startswith("XINFERENCE_XAVIER_BACKEND='mine' is not a choice; use one of")


class TestDefaultsOfTheCluster:
    def test_they_are_environment_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XINFERENCE_XAVIER_POOL_BYTES", "4GiB")
        monkeypatch.setenv("XINFERENCE_XAVIER_QUEUE", "7")
        monkeypatch.setenv("XINFERENCE_XAVIER_HOST", "")
        options = parsed(xavier_queue="8", xavier_audit=False, xavier_pool_bytes=None)
        assert options == LaunchOptions(
            pool_bytes=4 * GiB, queue=8, audit=False, from_environment=("pool_bytes",)
        )
        config = XavierConfig("m", "10.0.0.1:9999", **vars(options))
        assert XavierConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    def test_a_misspelt_one_is_named(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("XINFERENCE_XAVIER_PROFILE", "1")  # xinference's own
        monkeypatch.setenv("XINFERENCE_XAVIER_POOL_SIZE", "4GiB")
        assert parsed() == LaunchOptions()
        (said,) = caplog.messages
        assert said.startswith("XINFERENCE_XAVIER_POOL_SIZE is no default of an option; did you")
        assert said.endswith("mean XINFERENCE_XAVIER_POOL_BYTES?")

    def test_a_retired_one_is_ignored_with_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("XINFERENCE_XAVIER_PREFILL_THRESHOLD", "500")
        assert parsed() == LaunchOptions()
        (said,) = caplog.messages
        assert said.startswith("XINFERENCE_XAVIER_PREFILL_THRESHOLD=500 is ignored; that option")

    def test_a_wrong_one_is_refused_by_its_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XINFERENCE_XAVIER_POOL_BYTES", "all")
        assert refusal().startswith("XINFERENCE_XAVIER_POOL_BYTES='all' is not a size; use a")
        assert parsed(xavier_pool_bytes="1GiB") == LaunchOptions(pool_bytes=GiB)


@pytest.mark.parametrize("off", [{}, {ENABLE: False}, {ENABLE: "false"}])
def test_upstream_options_stay_untouched_without_ours(off: dict[str, Any]) -> None:
    upstream = dict.fromkeys(UPSTREAM_OPTIONS, 1) | {"xavier_new_upstream_option": 2}
    kwargs = {**upstream, **off}
    take_launch_options(kwargs)
    assert {name: kwargs[name] for name in upstream} == upstream
    assert kwargs.get(ENABLE, False) is False


def test_our_options_without_enable_are_dropped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kwargs: dict[str, Any] = {
        "xavier-pool-bytes": "nonsense",
        "xavier_backend": "builtin",
        "dtype": "float32",
    }
    assert take_launch_options(kwargs) is None
    assert kwargs == {"dtype": "float32"}
    assert "xavier-pool-bytes, xavier_backend ignored" in caplog.text


@pytest.mark.parametrize("name", ["xavier_prefill_threshold", "xavier-prefill-threshold"])
def test_a_retired_option_is_ignored_with_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An old launch that means this extension may have it, and an old configuration of vLLM."""
    kwargs = {ENABLE: True, name: 500}
    assert take_launch_options(kwargs) == LaunchOptions()
    assert kwargs == {}
    warning = "=500 is ignored; that option is gone: prefills go to a prefill replica"
    assert f"{name}{warning}" in caplog.text
    caplog.clear()
    config = XavierConfig("m", "10.0.0.1:9999")
    assert XavierConfig.from_dict({**config.to_dict(), "prefill_threshold": 500}) == config
    assert f"xavier_prefill_threshold{warning}" in caplog.text
    caplog.clear()
    assert XavierConfig.from_dict({**config.to_dict(), "prefill_threshold": None}) == config
    assert parsed(**{name: None}) == LaunchOptions()
    assert not caplog.messages


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
