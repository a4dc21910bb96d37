"""The command that lets replicas share again after a change of weights."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.pair import Pair
from tests.replica_process import MODEL, ReplicaProcess, TrackerProcess, replicas, wait_until
from xinference_xavier.cli import standalone
from xinference_xavier.cli.commands import main
from xinference_xavier.client import AsyncXavierClient, XavierClient
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import ModelStatus

SETTLED = ("first", "second")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["weights", *words])


def rows(result: Result) -> dict[str, str]:
    lines = [line.strip().split(maxsplit=1) for line in result.stdout.splitlines()]
    return {name: outcome for name, outcome in lines if name != "replica"}


def status(namespaces: dict[str, str], **answers: list[str]) -> ModelStatus:
    """Replicas in these namespaces by incarnation; each is called its own name and -rep."""
    known = [
        {"incarnation": each, "address": "", "namespace": namespace, "replica": f"{each}-rep"}
        for each, namespace in namespaces.items()
    ]
    outcomes = {"joined": [], "not_reset": [], "unreachable": [], **answers}
    raw: dict[str, Any] = {"model_uid": MODEL, "enabled": True, "replicas": known, "totals": {}}
    return read(ModelStatus, {**raw, "answers": outcomes})


class TestOutcome:
    @staticmethod
    def of(monkeypatch: pytest.MonkeyPatch, answer: ModelStatus) -> Result:
        monkeypatch.setattr(XavierClient, "set_weights_version", lambda *_: answer)
        return run(MODEL, "2")

    def test_all_joined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answer = status({"a": "n@2"}, joined=["a", "moving"])
        result = self.of(monkeypatch, answer)
        assert rows(result) == {"a-rep": "joined", "moving": "joined"}
        assert result.exit_code == 0

    @pytest.mark.parametrize(
        ("outcome", "sentence"),
        [("not_reset", "not reset: reset its prefix cache"), ("unreachable", "no answer: see")],
    )
    def test_one_did_not(
        self, monkeypatch: pytest.MonkeyPatch, outcome: str, sentence: str
    ) -> None:
        others = {outcome: ["b"]}
        result = self.of(monkeypatch, status({"a": "n@2", "b": "n@1"}, joined=["a"], **others))
        assert rows(result)["a-rep"] == "joined"
        assert rows(result)["b-rep"].startswith(sentence)
        assert result.exit_code == 1

    def test_a_replica_that_joined_before_has_joined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.of(monkeypatch, status({"a": "n@2"}, not_reset=["a"]))
        assert (rows(result), result.exit_code) == ({"a-rep": "joined"}, 0)

    def test_there_is_no_replica(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.of(monkeypatch, status({}))
        assert (result.stdout, result.exit_code) == ("No replica has joined yet.\n", 1)


def test_a_name_that_is_none_is_wrong_usage() -> None:
    for name in ("", "x" * 65):
        result = run(MODEL, name)
        assert result.exit_code == 2
        assert "is not a text of 1 to 64 characters; choose another name" in result.output


@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.0:9920", "10.0.0.1:0"])
def test_an_address_that_is_none_is_wrong_usage(address: str) -> None:
    result = run(MODEL, "2", "--tracker", address)
    assert result.exit_code == 2
    assert f"address='{address}'" in result.output


@pytest.mark.process
class TestReplicas:
    @pytest.fixture
    def two(self, tracker_process: TrackerProcess) -> Iterator[list[ReplicaProcess]]:
        with replicas(tracker_process.address, dict.fromkeys(SETTLED, "gloo")) as started:
            yield started

    @staticmethod
    def reset(*who: ReplicaProcess) -> None:
        for replica in who:
            replica.reset()
            wait_until(lambda replica=replica: "+" in replica.namespace(), "it is alone")
            wait_until(replica.is_up, "it has joined")

    def test_without_xinference(
        self, tracker_process: TrackerProcess, two: list[ReplicaProcess]
    ) -> None:
        first, second = two
        words = (MODEL, "2", "--tracker", tracker_process.address)
        self.reset(first)
        one = run(*words)
        assert one.exit_code == 1
        assert rows(one)["first"] == "joined"
        assert rows(one)["second"].startswith("not reset")
        self.reset(second)
        wait_until(lambda: run(*words).exit_code == 0, "both have joined")
        assert rows(run(*words)) == dict.fromkeys(SETTLED, "joined"), "as often as one likes"
        assert first.namespace() == second.namespace() == "namespace@2"

    def test_another_model_has_no_tracker_there(self, tracker_process: TrackerProcess) -> None:
        result = run("other", "2", "--tracker", tracker_process.address)
        assert result.exit_code == 4
        assert "has no tracker of model 'other'; give the name" in result.output

    def test_with_xinference(self, pair: Pair) -> None:
        result = run(MODEL, "2", "-e", pair.api.endpoint)
        assert result.exit_code == 1, "nobody was reset"
        assert set(rows(result)) == set(SETTLED)
        assert run("other", "2", "-e", pair.api.endpoint).exit_code == 4

    async def test_the_asynchronous_client(self, pair: Pair) -> None:
        async with AsyncXavierClient(pair.api.endpoint) as client:
            answers = (await client.set_weights_version(MODEL, "2")).raw["answers"]
        assert sorted(answers["not_reset"]) == [*SETTLED]


def test_where_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_ANSWER", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        hung = run(MODEL, "2", "--tracker", f"127.0.0.1:{port}")
    gone = run(MODEL, "2", "--tracker", f"127.0.0.1:{port}")
    for result in (hung, gone):
        assert result.exit_code == 3
        assert f"no tracker answers at 127.0.0.1:{port}" in result.output
        assert "running there?" in result.output
