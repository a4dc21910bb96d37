"""Checks of the examples that cannot run in a test."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = EXAMPLES.parent
COMPOSE = EXAMPLES / "docker-compose"
SCRIPTS = sorted(EXAMPLES.rglob("*.sh"))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return content


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_valid_and_print_their_usage(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    called = subprocess.run([script], capture_output=True, text=True)
    assert called.returncode != 0
    assert called.stderr


def test_all_parts_of_xinference_have_the_extension(compose: dict[str, Any]) -> None:
    services = compose["services"]
    parts = [name for name, each in services.items() if "xinference-" in each.get("command", "")]
    assert parts == ["supervisor", "worker-1", "worker-2"]
    for part in parts:
        environment = services[part]["environment"]
        assert environment["XINFERENCE_EXTENSIONS"] == "xinference_xavier:extension"
        # Commands need no sign-in, because only this machine reaches the API (see below).
        assert environment["XINFERENCE_AUTH_ADVANCED"] == "false"


def test_only_what_people_use_is_published(compose: dict[str, Any]) -> None:
    published = {
        name: [port.rsplit(":", 1)[0] for port in each["ports"]]
        for name, each in compose["services"].items()
        if "ports" in each
    }
    assert published == {
        "supervisor": ["127.0.0.1:9997"],
        "prometheus": ["127.0.0.1:9090"],
        "grafana": ["127.0.0.1:3000"],
    }


def test_what_it_mounts_and_builds_from_exists(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (COMPOSE / source).is_file(), source
        if "build" in service:
            assert (COMPOSE / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()
    for line in (COMPOSE / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            sources = {*line.split()[1:-1]} - {"dist/*.whl"}  # what `make dist` builds
            assert all((ROOT / source).exists() for source in sources), line


DEPLOY = EXAMPLES / "deploy"


def test_the_image_is_the_one_of_the_documentation() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    assert f"```dockerfile\n{(DEPLOY / 'Dockerfile').read_text()}```" in page


@pytest.mark.long
def test_the_network_policy_is_one_of_kubernetes() -> None:
    """Needs a network, if the validator is not there yet."""
    validate = ("tool", "run", "kubernetes-validate@1.37.0", "--strict")
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, *validate, DEPLOY / "network-policy.yaml"], check=True)


@pytest.mark.long
def test_systemd_has_nothing_to_say_about_the_units(tmp_path: Path) -> None:
    for unit in (DEPLOY / "systemd").glob("*.service"):
        here = re.sub(r"/opt/xinference/bin/\S+", "/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(here)
    words = ["systemd-analyze", "verify", *tmp_path.iterdir()]
    verified = subprocess.run(words, check=True, stderr=subprocess.PIPE, text=True)
    assert verified.stderr == ""


@pytest.mark.parametrize("part", ["supervisor", "worker"])
def test_units_use_variables_of_their_environment_file(part: str) -> None:
    unit = (DEPLOY / "systemd" / f"xinference-{part}.service").read_text()
    variables = dict(
        line.split("=", 1)
        for line in (DEPLOY / "systemd" / "xinference.env").read_text().splitlines()
        if not line.startswith("#")
    )
    assert variables["XINFERENCE_EXTENSIONS"] == "xinference_xavier:extension"
    state = re.findall(r"^StateDirectory=(\w+)$", unit, re.MULTILINE)
    assert state == [Path(variables["XINFERENCE_HOME"]).name]
    used = set(re.findall(r"\$\{(\w+)\}", unit))
    assert used
    assert used <= variables.keys()
