"""The commands of README and of the guides, as they stand there, on a server with accounts, which
are xinference's default. Only names, secrets and what a CPU needs are filled in.

`test_first_minutes.py` has the web UI.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.documents import document
from examples.local_cluster import PASSWORD, USER, LocalCluster
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.engine

MODEL = "small"
ENDPOINT = "http://127.0.0.1:9997"
BLOCK = re.compile(r"^```(?:python)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MORE = {"block_size": 128, "tensor_parallel_size": 1, "enforce_eager": True, "max_model_len": 4096}


@pytest.fixture(scope="module")
def cluster(model_folder: Path) -> Iterator[LocalCluster]:
    log = ROOT / "build" / "test-accounts.log"
    environment = {"PYTHONPATH": str(ROOT)}
    with LocalCluster(log, accounts=True, environment=environment) as cluster:
        cluster.register(model_folder, MODEL)
        yield cluster


class Reader:
    """Does what a page says, in a folder and with a home of its own."""

    def __init__(self, cluster: LocalCluster, home: Path) -> None:
        self._home = home
        key = cluster.call("POST", "/v1/admin/keys", {"name": "reader"})["key"]
        options = "".join(f" --{name} {value}" for name, value in MORE.items())
        self._words = {
            ENDPOINT: cluster.endpoint,
            "NAME": USER,
            "PASSWORD": PASSWORD,
            "KEY": key,
            "MODEL": MODEL,
            "my-model": MODEL,
            "qwen2.5-instruct": MODEL,
            "billions 7": "billions 1",
            "billions=7": "billions=1",
            "--enable_xavier true": f"--enable_xavier true{options}",
            "enable_xavier=True,": f"enable_xavier=True, **{MORE},",
        }
        programs = Path(sys.executable).parent
        self._environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XINFERENCE_HOME": str(home),
            "XINFERENCE_ENDPOINT": cluster.endpoint,
        }

    def follow(self, page: str, beginning: str) -> str:
        """Run the block that begins so; return what it prints."""
        blocks = BLOCK.findall((ROOT / page).read_text())
        (text,) = (block for block in blocks if block.startswith(beginning))
        is_python = "import " in text
        for word, instead in self._words.items():
            quoted = f"'{instead}'" if instead == PASSWORD and not is_python else instead
            text = text.replace(word, quoted)
        words = [sys.executable, "-c", text] if is_python else ["bash", "-ec", text]
        done = subprocess.run(
            words, cwd=self._home, env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def reader(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    home = tmp_path_factory.mktemp("reader")
    (home / "handbook.txt").write_text(document(1, 20))
    return Reader(cluster, home)


def test_from_the_login_to_a_named_prefix(cluster: LocalCluster, reader: Reader) -> None:
    reader.follow("README.md", "xinference login")
    reader.follow("README.md", "xinference launch")
    cluster.wait_ready(MODEL, 2)
    try:
        assert "from: remote" in reader.follow("README.md", "xinference-xavier try")
        reader.follow("docs/python.md", "from xinference_xavier.client")
        answered = reader.follow("docs/named-prefixes.md", "xinference-xavier prefix add")
        assert '"choices"' in answered
    finally:
        cluster.terminate(MODEL)


def test_a_launch_from_python(cluster: LocalCluster, reader: Reader) -> None:
    reader.follow("README.md", "from xinference.client")
    cluster.wait_ready(MODEL, 2)
    assert len(cluster.members(MODEL)) == 2
    cluster.terminate(MODEL)
