"""What `try` concludes. `e2e/one_launch/test_sharing.py` tries a real model."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from xinference_xavier.cli import trial
from xinference_xavier.cli.commands import main
from xinference_xavier.cli.trial import Answer, CannotTryError, Trial, conclude
from xinference_xavier.errors import ApiError


class Client:
    """Knows two replicas, and their routing from the third question on, or never. What is in
    `fails` cannot be switched to."""

    def __init__(self, *fails: object, knows_routing: bool = True) -> None:
        self._fails = fails
        self._knows_routing = knows_routing
        self._asked = 0
        self.done: list[object] = []

    def status(self, model: str) -> Any:
        self._asked += 1
        mode = "auto" if self._knows_routing and self._asked > 2 else ""
        able = [SimpleNamespace(replica=name, not_sharing=None) for name in ("m-0", "m-1")]
        return SimpleNamespace(replicas=able, routing=SimpleNamespace(mode=mode), enabled=True)

    def set_routing(self, model: str, mode: object) -> None:
        self.done.append(mode)
        if mode in self._fails:
            raise ApiError("no answer", 503)

    switch = set_routing


class StandIn:
    """A `Trial` of two replicas, of which the second one answers with `second`, then the first one
    with `own` from its own cache. Computing takes two seconds."""

    before = type("Status", (), {"replicas": (1, 2)})

    def __init__(self, second: Answer, own: str = "text") -> None:
        self._answers = iter((_computed(2.1), _computed(2.0), second))
        self._repeated = Answer(own, 0.2, 3000, "prefix_cache")
        self.steps: list[object] = []

    def share(self, enabled: bool) -> None:
        self.steps.append(enabled)

    def ask(self, prompt: str) -> Answer:
        self.steps.append(prompt)
        return next(self._answers, self._repeated)

    def await_offered(self, prompt: str) -> None:
        self.steps.append("offered")

    def why_not_fetched(self) -> str:
        return "the network is down"


def _computed(seconds: float) -> Answer:
    return Answer("text", seconds, 3000, "computed")


def test_a_remote_hit_is_compared_with_the_faster_of_two_computed_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tested = StandIn(_computed(0.5)._replace(source="remote"))
    assert conclude(tested, 3) == (0, "helps: 4.0 × as fast from another replica as computed")
    printed = capsys.readouterr().out
    for line in (
        "computed, sharing off",
        "from: remote",
        "from: prefix cache",
        "answers are equal",
    ):
        assert line in printed


def test_the_first_prompt_is_asked_for_without_sharing_and_never_again() -> None:
    tested = StandIn(_computed(0.5)._replace(source="remote"))
    conclude(tested, 3)
    off, alone, on, shared, offered, *rest = tested.steps
    assert (off, on, offered) == (False, True, "offered")
    assert len(str(alone).split()) == 3
    assert alone != shared
    assert {*rest} == {shared}


def test_a_copy_that_is_slower_at_this_moment_is_told_and_no_failure() -> None:
    tested = StandIn(_computed(4.0)._replace(source="remote"))
    code, conclusion = conclude(tested, 3)
    assert (code, conclusion.partition(";")[0]) == (
        0,
        "shares, but is not faster now: 0.5 × as fast from another replica as computed",
    )


def test_without_a_remote_hit_the_counters_say_why() -> None:
    assert conclude(StandIn(_computed(2.0)), 3) == (1, "does not help: the network is down")


def test_a_wrong_answer_does_not_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, conclusion = conclude(StandIn(Answer("other", 0.5, 3000, "remote")), 3)
    assert code == 1
    assert "gives another answer" in conclusion
    assert "answers are not equal" in capsys.readouterr().out


def test_reusing_may_round_otherwise_than_computing() -> None:
    """As long as a replica's own cache gives the same answer as another's."""
    tested = StandIn(Answer("rounded", 0.5, 3000, "remote"), own="rounded")
    assert conclude(tested, 3)[0] == 0


def test_replicas_that_were_just_launched_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_POLL", 0)
    client: Any = Client()
    assert Trial(client, "m").before.routing.mode == "auto"


def test_replicas_that_never_report_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_PATIENCE", 0)
    client: Any = Client(knows_routing=False)
    with pytest.raises(CannotTryError, match="no replica has reported its load"):
        Trial(client, "m")


@pytest.mark.parametrize("fails", ["off", True])
def test_routing_is_put_back_whatever_fails(monkeypatch: pytest.MonkeyPatch, fails: object) -> None:
    monkeypatch.setattr(trial, "_POLL", 0)
    client: Any = Client(fails)
    tested = Trial(client, "m")
    with pytest.raises(ApiError), tested.in_turn():
        pass
    assert client.done == ["off", True, "auto"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_trial_that_is_ended_puts_routing_and_sharing_back(
    monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """Also if its terminal is closed."""
    signals = signal.SIGTERM, signal.SIGHUP
    client: Any = Client()
    handlers = {each: signal.signal(each, signal.SIG_IGN) for each in signals}
    monkeypatch.setattr(trial, "_POLL", 0)
    monkeypatch.setattr(trial, "Trial", lambda _, model: Trial(client, model))
    monkeypatch.setattr(trial, "conclude", lambda *_: signal.raise_signal(how))
    try:
        ended = CliRunner().invoke(main, ["try", "m"])
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert ended.exit_code == 128 + how
    assert client.done == ["off", True, "auto"]
