"""The command line, as people and scripts use it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.harness.api import ApiProcess, Pair
from tests.harness.replicas import MODEL, fresh_numbers, make_key, wait_until
from xinference_xavier.cli.commands import main
from xinference_xavier.cli.tables import size
from xinference_xavier.client import XavierClient
from xinference_xavier.stats.schema import ModelStatus

pytestmark = pytest.mark.process

PROGRAM = Path(sys.executable).parent / "xinference-xavier"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide the user's own login."""
    monkeypatch.setenv("XINFERENCE_HOME", str(tmp_path))
    for name in ("XINFERENCE_ENDPOINT", "XINFERENCE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(endpoint: str, *words: str, text: str | None = None) -> Result:
    command, *rest = words
    return CliRunner().invoke(main, [command, "-e", endpoint, *rest], input=text)


def done(endpoint: str, *words: str, text: str | None = None) -> str:
    result = run(endpoint, *words, text=text)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_program_starts_without_slow_imports() -> None:
    """Neither the client nor `--help` needs them."""
    program = (
        "import sys; import xinference_xavier.cli.commands, xinference_xavier.client\n"
        "import xinference_xavier.cli.tables\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'vllm', 'xoscar', 'xinference', 'numpy'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    shown = subprocess.run([PROGRAM, "--help"], check=True, capture_output=True, text=True)
    for code in ("1  doctor found", "2  wrong usage", "3  xinference does not", "4  no such model"):
        assert code in shown.stdout


@pytest.mark.parametrize(
    ("missing", "words"),
    [("click", ["--help"]), ("xoscar", ["tracker", "model", "--address", "127.0.0.1:1"])],
)
def test_a_missing_package_is_named(missing: str, words: list[str]) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from xinference_xavier.cli import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *words], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert ran.stderr == (
        f"Error: {missing} is not installed; run `pip install xinference-xavier`\n"
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_as_documented(shell: str) -> None:
    environment = {"_XINFERENCE_XAVIER_COMPLETE": f"{shell}_source", "PATH": "/usr/bin:/bin"}
    script = subprocess.run(
        [PROGRAM], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert "xinference-xavier" in script
    assert f"_XINFERENCE_XAVIER_COMPLETE={shell}_source" in " ".join(
        CliRunner().invoke(main, ["--help"]).output.split()
    )


def test_status_shows_replicas_and_where_tokens_came_from(pair: Pair) -> None:
    for words in (["status"], ["status", MODEL]):
        shown = done(pair.api.endpoint, *words)
        for word in (MODEL, "sharing on", "first", "second", "local pool", "remote", "rolled back"):
            assert word in shown


def test_status_as_json_is_the_servers_answer(pair: Pair) -> None:
    one = json.loads(done(pair.api.endpoint, "status", MODEL, "--json"))
    assert [replica["incarnation"] for replica in one["replicas"]] == ["first", "second"]
    everything = json.loads(done(pair.api.endpoint, "status", "--json"))
    assert [each["model_uid"] for each in everything["models"]] == [MODEL]
    assert everything["unavailable"] == {}


def test_status_tells_that_a_tracker_does_not_answer() -> None:
    """Otherwise, in an outage, it would seem that no model shares."""
    reason = f"model {MODEL!r} does not share its cache here"
    with ApiProcess() as api:
        api.lose_tracker()
        table, plain = run(api.endpoint, "status"), run(api.endpoint, "status", "--json")
    assert (table.stdout, table.stderr, table.exit_code) == ("", f"Error: {reason}\n", 3)
    assert json.loads(plain.stdout) == {"models": [], "unavailable": {MODEL: reason}}
    assert (plain.stderr, plain.exit_code) == (f"Error: {reason}\n", 3)


def test_watching(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on until the model ends, here after two statuses."""
    watch = XavierClient.watch

    def twice(client: XavierClient, model_uid: str) -> Iterator[ModelStatus]:
        statuses = watch(client, model_uid)
        for _ in range(2):
            yield next(statuses)

    monkeypatch.setattr(XavierClient, "watch", twice)
    lines = done(pair.api.endpoint, "status", MODEL, "--watch", "--json").splitlines()
    assert [json.loads(line)["model_uid"] for line in lines] == [MODEL] * 2
    assert "first" in done(pair.api.endpoint, "status", MODEL, "--watch")
    assert run(pair.api.endpoint, "status", "--watch").exit_code == 2


def test_events(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    events = XavierClient.events
    monkeypatch.setattr(XavierClient, "events", lambda self, uid: [next(events(self, uid))])
    assert "ReplicaJoined  model_uid=model  replica=" in done(pair.api.endpoint, "events", MODEL)
    event = json.loads(done(pair.api.endpoint, "events", MODEL, "--json"))
    assert event["event"] == "ReplicaJoined"


def test_explain(pair: Pair, tmp_path: Path) -> None:
    numbers = fresh_numbers(3)
    pair.first.store([make_key(number) for number in numbers[:2]])
    wait_until(
        lambda: pair.second.holders(make_key(numbers[1])) == ("first",),
        "the second knows what the first holds",
    )
    file = tmp_path / "prompt"
    file.write_text(" ".join(map(str, numbers)))
    shown = done(pair.api.endpoint, "explain", MODEL, "--prompt-file", str(file))
    assert "384 tokens: 3 whole chunks of 128" in shown
    table = [line.split() for line in shown.splitlines() if "·" in line][1:]
    rows = {name: cells for name, *cells in table}
    assert rows == {
        "first": ["■■·", "256"],
        "second": ["···", "0"],
    }
    assert "Missing: no replica holds tokens 256 to 384" in " ".join(shown.split())
    raw = json.loads(
        done(pair.api.endpoint, "explain", MODEL, "--prompt-file", "-", "--json", text="1 2")
    )
    assert raw["prompt_tokens"] == 256


def test_flush_and_switch(pair: Pair) -> None:
    stored = [make_key(number) for number in fresh_numbers(2)]
    pair.first.store(stored)
    wait_until(lambda: all(map(pair.second.holders, stored)), "its peer knows the chunks")
    refused = run(pair.api.endpoint, "flush", MODEL, text="n\n")
    assert (refused.exit_code, set(stored) <= set(pair.first.held())) == (1, True)
    assert f"Empty the pools of all replicas of {MODEL}? [y/N]" in refused.output
    assert run(pair.api.endpoint, "flush", MODEL, text="").exit_code == 1  # nobody answers
    assert "pools of 2 replicas are empty" in done(pair.api.endpoint, "flush", MODEL, text="y\n")
    assert "pools of 2 replicas are empty" in done(pair.api.endpoint, "flush", MODEL, "--yes")
    assert pair.first.held() == []
    wait_until(lambda: not any(map(pair.second.holders, stored)), "its peer knows of none")
    assert "sharing of model is off" in done(pair.api.endpoint, "switch", MODEL, "off")
    assert "sharing off" in done(pair.api.endpoint, "status", MODEL)
    assert "sharing of model is on" in done(pair.api.endpoint, "switch", MODEL, "on")


def test_weights(pair: Pair) -> None:
    result = run(pair.api.endpoint, "weights", MODEL, "step-1")
    assert result.exit_code == 3
    assert "0 replicas share as step-1" in result.output
    assert "not reset since the last version: " in result.output


def test_routing(pair: Pair) -> None:
    assert "routing of model is off" in done(pair.api.endpoint, "routing", MODEL, "off")
    wait_until(
        lambda: "routing of model is off" in done(pair.api.endpoint, "routing", MODEL),
        "the process has heard of it",
    )
    assert "routing of model is auto" in done(pair.api.endpoint, "routing", MODEL, "auto")
    assert run(pair.api.endpoint, "routing", MODEL, "fast").exit_code == 2


@pytest.mark.parametrize("words", [["status"], ["status", "--watch"], ["events"], ["weights", "1"]])
def test_an_unknown_model_has_an_exit_code_of_its_own(pair: Pair, words: list[str]) -> None:
    command, *rest = words
    result = run(pair.api.endpoint, command, "other", *rest)
    assert result.exit_code == 4
    assert "model 'other' does not share its cache here" in result.output


@pytest.mark.parametrize("words", [["status"], ["status", MODEL, "--watch"], ["doctor"]])
def test_a_missing_server_extension_or_permission_has_an_exit_code_of_its_own(
    pair: Pair, words: list[str]
) -> None:
    for endpoint, message in (
        ("http://127.0.0.1:1", "is xinference running there, and is this its endpoint?"),
        (pair.api.bare, "start it with XINFERENCE_EXTENSIONS=xinference_xavier:extension"),
        (pair.api.guarded, "log in with `xinference login`"),
    ):
        result = run(endpoint, *words)
        assert result.exit_code == 3
        assert message in result.output


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert size(count) == text
