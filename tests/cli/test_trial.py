"""What `try` concludes. `e2e/one_launch/test_sharing.py` tries a real model."""

import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from xinference_xavier.cli import trial
from xinference_xavier.cli.commands import main
from xinference_xavier.cli.trial import Answer, Trial, conclude
from xinference_xavier.errors import ApiError
from xinference_xavier.stats.schema import Hits


class Client:
    """Knows two replicas. It gets no answer to the changes in `fails`, each a value and for how
    long."""

    def __init__(self, *fails: tuple[object, float]) -> None:
        self._fails = fails
        self._computed = 0
        self.done: list[tuple[object, float]] = []

    def status(self, model: str) -> Any:
        able = [SimpleNamespace(replica=name, not_sharing=None) for name in ("m-0", "m-1")]
        totals = SimpleNamespace(hits=Hits(computed=self._computed))
        return SimpleNamespace(replicas=able, totals=totals)

    def complete(self, model: str, prompt: str, *, max_tokens: int) -> Any:
        self._computed += 3
        return {"usage": {"prompt_tokens": 3}, "choices": [{"text": "text"}]}

    def set_routing(self, model: str, mode: object, *, for_s: float) -> None:
        self.done.append((mode, for_s))
        if (mode, for_s) in self._fails:
            raise ApiError("no answer", 503)

    switch = set_routing


BEGIN, END = ("off", 320.0), ("off", 0)


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
    """It is not wrong if a replica's own cache gives the same answer as another's."""
    tested = StandIn(Answer("rounded", 0.5, 3000, "remote"), own="rounded")
    assert conclude(tested, 3)[0] == 0


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Runs the command with this client, and with this conclusion of a trial."""
    signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    handlers = {each: signal.signal(each, signal.SIG_IGN) for each in signals}

    def run(client: Any, concludes: Callable[[], object]) -> Result:
        monkeypatch.setattr(trial, "Trial", lambda _, model: Trial(client, model))
        monkeypatch.setattr(trial, "conclude", lambda *_: concludes())
        return CliRunner().invoke(main, ["try", "m"])

    yield run
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_trial_that_is_ended_puts_routing_and_sharing_back(
    tries: Callable[..., Result], how: signal.Signals
) -> None:
    """Also if its terminal is closed."""
    client = Client()
    assert tries(client, lambda: signal.raise_signal(how)).exit_code == 128 + how
    assert client.done == [BEGIN, END]


@pytest.mark.parametrize("fails", [BEGIN, END])
def test_what_a_trial_cannot_put_back_the_server_does(
    tries: Callable[..., Result], fails: tuple[str, float]
) -> None:
    client = Client(fails)
    tried = tries(client, lambda: (0, "fast"))
    assert (tried.exit_code, client.done) == (3, [BEGIN, END])
    assert ("put back within 320 s" in tried.output) == (fails == END)


def test_each_question_keeps_routing_off_for_longer() -> None:
    client: Any = Client()
    tested = Trial(client, "m")
    tested.share(False)
    assert tested.ask("a b c").source == "computed"
    assert client.done == [(False, 320.0), BEGIN]


@pytest.mark.parametrize("tokens", ["0", "-5"])
def test_a_prompt_has_tokens(tokens: str) -> None:
    assert CliRunner().invoke(main, ["try", "m", "--tokens", tokens]).exit_code == 2
