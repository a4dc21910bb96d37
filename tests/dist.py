"""`python -m tests.dist`: whether what `make dist` has built can be installed and used.

The wheel goes into a clean environment of each Python from 3.11 on that is at hand, without vLLM
and xinference: there the client can be imported, and every command answers in a sentence. With the
first Python, also beside the lowest versions that it declares. Into this environment, which has
xinference, it would bring nothing but itself. The sdist's tests run.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path

DIST = Path(__file__).parents[1] / "dist"
PYTHONS = ("python3.11", "python3.12", "python3.13")
MAX_BYTES = 500_000
COMMANDS = (
    *(("status",), ("doctor",)),
    *((name, "model") for name in ("events", "try", "routing")),
    ("flush", "model", "--yes"),
    ("switch", "model", "off"),
    ("weights", "model", "1"),
    ("prefix", "list", "model"),
    ("explain", "model", "--prompt-file", "-"),
)
"""All that ask xinference, which does not answer."""
NO_ANSWER = 3
SOME_TESTS = ("tests/pool", "tests/routing", "tests/client/test_findings.py")


def main() -> None:
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    size = wheel.stat().st_size
    assert size < MAX_BYTES, f"{wheel.name} has {size} bytes"
    print(f"{wheel.name}: {size >> 10} KiB", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(shutil.which, PYTHONS):
            print(
                f"[{name}] installs the wheel, imports the client, tries the commands …", flush=True
            )
            _try_in_clean_environment(name, [str(wheel)], Path(folder) / name)
        lowest = _lowest_requirements(wheel)
        print(f"[{PYTHONS[0]}] the same with {', '.join(lowest)} …", flush=True)
        _try_in_clean_environment(PYTHONS[0], [str(wheel), *lowest], Path(folder) / "lowest")
        print("[xinference] nothing of it would change …", flush=True)
        _would_bring_only_itself(wheel)
        print("[sdist] some of its tests …", flush=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).glob("xinference_xavier-*")
        _run([sys.executable, "-m", "pytest", "-q", "-m", "not process", *SOME_TESTS], unpacked)


def _lowest_requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    required = metadata.get_all("Requires-Dist", [])
    # The lowest NIXL of the extra `rdma` brings torch.
    requirements = [each for each in required if "extra ==" not in each]
    lowest = [re.sub(r"^([\w-]+).*>=([\d.]+).*", r"\1==\2", each) for each in requirements]
    assert all(map(re.compile(r"[\w-]+==[\d.]+").fullmatch, lowest)), requirements
    return lowest


def _try_in_clean_environment(python: str, packages: Sequence[str], folder: Path) -> None:
    _run([python, "-m", "venv", str(folder)])
    programs = folder / "bin"
    _run([str(programs / "python"), "-m", "pip", "install", "-qq", *packages])
    check = (
        "from importlib.util import find_spec as find; import xinference_xavier.client\n"
        "assert not any(map(find, ('xinference', 'vllm', 'torch')))"
    )
    _run([str(programs / "python"), "-c", check])
    program = str(programs / "xinference-xavier")
    _run([program, "--help"])
    config = ["transfer-config", "model", "--address", "127.0.0.1:9"]
    _run([program, *config, "--xavier-pool-bytes", "1GiB"])
    for words in COMMANDS:
        done = subprocess.run(
            [program, *words, "-e", "http://127.0.0.1:9"],
            check=False,
            input="text",
            capture_output=True,
            text=True,
        )
        said = done.stderr.strip()
        assert done.returncode == NO_ANSWER, (words, done)
        assert said.startswith("Error: http://127.0.0.1:9 does not answer"), (words, said)
        assert "\n" not in said, (words, said)


def _would_bring_only_itself(wheel: Path) -> None:
    asked = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-"]
    report = json.loads(_run([*asked, str(wheel)]))
    names = {each["metadata"]["name"] for each in report["install"]}
    assert names <= {"xinference-xavier"}, names


def _run(words: Sequence[str], folder: Path | None = None) -> str:
    return subprocess.run(words, check=True, cwd=folder, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
