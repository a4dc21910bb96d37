"""What `try` does and concludes. `e2e/one_launch/test_running_model.py` tries a real model."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from xinference_xavier.cli import trial
from xinference_xavier.cli.commands import main
from xinference_xavier.errors import ApiError
from xinference_xavier.stats.schema import Hits

BEGIN, END = ("off", 320.0), ("off", 0)
COMPUTE, REUSE = 2.0, 0.2  # seconds


@dataclass
class Client:
    """Two replicas that answer in turn. What one has computed, the other fetches in so many
    seconds; None: it computes it, too. They answer with these texts. No answer comes to the changes
    in `fails`, each a value and for how long."""

    remote: float | None = 0.5
    says_remote: str = "text"
    says_own: str = "text"
    offers: bool = True
    cannot: str | None = None
    fails: tuple[Any, ...] = ()
    changes: list[Any] = field(default_factory=list)
    """Changes of sharing and routing, and prompts."""
    now: float = 0.0
    ended_by: signal.Signals | None = None
    """While it waits until a replica offers the prompt."""
    at_end: dict[str, Any] = field(default_factory=dict)
    """What replicas have counted at the end."""

    def __post_init__(self) -> None:
        self._hits = Hits()
        self._held: tuple[set[str], ...] = (set(), set())
        self._sharing = True

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def status(self, model: str) -> Any:
        counted = self.at_end if any(self._held) else {}
        decisions = SimpleNamespace(computed=counted.get("computed", 0))
        fetches = SimpleNamespace(rolled_back=counted.get("rolled_back", {}))
        replicas = [
            SimpleNamespace(replica=name, not_sharing=reason, fetch_decisions=decisions)
            for name, reason in (("m-0", None), ("m-1", self.cannot))
        ]
        totals = SimpleNamespace(hits=Hits(**vars(self._hits)), fetches=fetches)
        return SimpleNamespace(replicas=replicas, totals=totals)

    def complete(self, model: str, prompt: str, *, max_tokens: int) -> Any:
        prompts = [each for each in self.changes if isinstance(each, str)]
        own, other = self._held[:: 1 if len(prompts) % 2 else -1]
        self.changes.append(prompt)
        text, source, seconds = "text", "computed", COMPUTE if self._sharing else 2.1
        if prompt in own:
            text, source, seconds = self.says_own, "prefix_cache", REUSE
        elif prompt in other and self._sharing and self.remote is not None:
            text, source, seconds = self.says_remote, "remote", self.remote
        own.add(prompt)
        self.now += seconds
        tokens = len(prompt.split())
        setattr(self._hits, source, getattr(self._hits, source) + tokens)
        return {"usage": {"prompt_tokens": tokens}, "choices": [{"text": text}]}

    def explain(self, model: str, prompt: str) -> Any:
        if self.ended_by is not None:
            signal.raise_signal(self.ended_by)
        held = self.offers and any(prompt in each for each in self._held)
        return SimpleNamespace(chunks=[SimpleNamespace(holders=held)])

    def set_routing(self, model: str, mode: object, *, for_s: float) -> None:
        self.changes.append((mode, for_s))
        if (mode, for_s) in self.fails:
            raise ApiError("no answer", 503)

    def switch(self, model: str, enabled: bool, *, for_s: float) -> None:
        self._sharing = enabled
        self.set_routing(model, enabled, for_s=for_s)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Client], Result]]:
    """Runs the command with this client."""
    signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    handlers = {each: signal.signal(each, signal.SIG_IGN) for each in signals}

    def run(client: Client) -> Result:
        made = trial.Trial
        monkeypatch.setattr(trial, "time", client)
        monkeypatch.setattr(trial, "Trial", lambda _, model: made(client, model))  # type: ignore[arg-type]
        return CliRunner().invoke(main, ["try", "m", "--tokens", "3"])

    yield run
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(
    ("client", "code", "concluded"),
    [
        (Client(), 0, "helps: 4.0 × as fast from another replica as computed"),
        (Client(4.0), 0, "shares, but is not faster now: 0.5 × as fast from another replica"),
        (Client(says_remote="other"), 1, "does not help: what another replica has computed gives"),
        # Reusing may round otherwise than computing: a replica's own cache says the same.
        (Client(says_remote="rounded", says_own="rounded"), 0, "helps: 4.0 × as fast"),
        (Client(None), 1, "does not help: no replica has fetched it"),
        (Client(None, at_end={"computed": 1}), 1, "does not help: computing is faster here"),
        (
            Client(None, at_end={"rolled_back": {"link": 1}}),
            1,
            "does not help: fetches were rolled back: link",
        ),
        (Client(offers=False), 2, "not tried: no replica offers the prompt that it has computed"),
        (
            Client(cannot="no peers"),
            2,
            "not tried: a trial needs two replicas that can share, and m has 1 (m-1: no peers)",
        ),
    ],
)
def test_what_it_concludes(
    tries: Callable[[Client], Result], client: Client, code: int, concluded: str
) -> None:
    tried = tries(client)
    assert (tried.exit_code, concluded in tried.output) == (code, True), tried.output
    if code < 2 and client.remote is not None:
        for line in ("computed, sharing off", "from: remote", "from: prefix cache"):
            assert line in tried.output
        same = client.says_remote == client.says_own
        assert ("answers are equal" in tried.output) is (same and client.says_own == "text")


def test_the_first_prompt_is_asked_for_without_sharing_and_never_again(
    tries: Callable[[Client], Result],
) -> None:
    """Each question keeps routing off for longer."""
    client = Client()
    tries(client)
    begin, off, again, alone, on, *questions, end = client.changes
    assert (begin, off, again, on, end) == (BEGIN, (False, 320.0), BEGIN, (True, 320.0), END)
    assert {*questions[::2]} == {BEGIN}
    (shared,) = {*questions[1::2]}
    assert len(shared.split()) == 3
    assert alone != shared


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_trial_that_is_ended_puts_routing_and_sharing_back(
    tries: Callable[[Client], Result], how: signal.Signals
) -> None:
    """Also if its terminal is closed."""
    client = Client(ended_by=how)
    assert tries(client).exit_code == 128 + how
    assert (client.changes[0], client.changes[-1]) == (BEGIN, END)


@pytest.mark.parametrize("fails", [BEGIN, END])
def test_what_a_trial_cannot_put_back_the_server_does(
    tries: Callable[[Client], Result], fails: tuple[str, float]
) -> None:
    client = Client(fails=(fails,))
    tried = tries(client)
    assert (tried.exit_code, client.changes[-1]) == (3, END)
    assert ("put back within 320 s" in tried.output) == (fails == END)


@pytest.mark.parametrize("tokens", ["0", "-5"])
def test_a_prompt_has_tokens(tokens: str) -> None:
    assert CliRunner().invoke(main, ["try", "m", "--tokens", tokens]).exit_code == 2
