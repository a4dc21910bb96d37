"""Old versions of vLLM are refused, and newer ones unless they may be tried."""

import pytest

from xinference_xavier import vllm_versions
from xinference_xavier.errors import ConfigError

DEV_BUILDS = ["dev", "0.34.1.dev7+g1234", ""]


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.33.1rc2", "0.32.0+cu130", *DEV_BUILDS])
def test_tested_versions_and_builds_from_a_working_tree_are_accepted(version: str) -> None:
    vllm_versions.check(version)
    assert not vllm_versions.is_newer(version)


@pytest.mark.parametrize("version", ["0.21.0", "0.30.1"])
@pytest.mark.parametrize("untested", [True, False])
def test_an_old_version_is_always_refused(version: str, untested: bool) -> None:
    with pytest.raises(ConfigError) as refused:
        vllm_versions.check(version, untested)
    assert str(refused.value) == (
        f"vllm='{version}' is what this model's environment has, and sharing needs 0.31 to 0.33; "
        "launch with virtual_env_packages=['vllm>=0.31,<0.34'], with xavier_backend=builtin, or "
        "without enable_xavier"
    )


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0"])
def test_a_newer_one_may_be_tried(version: str) -> None:
    with pytest.raises(ConfigError, match="with xavier_untested_vllm=true to try it, with xavier_"):
        vllm_versions.check(version)
    vllm_versions.check(version, untested=True)
    assert vllm_versions.is_newer(version)
