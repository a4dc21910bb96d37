"""`xinference-xavier try`: does a running model answer a long prompt sooner because it shares?

One prompt is computed while sharing is off. Another one is computed by the replica whose turn it
is, then asked for until it has come from another replica and from the one that answers. Meanwhile
requests go round-robin; then sharing and routing are as before. The server puts them
back, even if this program is killed. The replicas' counters show where the tokens came from.
"""

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import click

from xinference_xavier.cli.endpoint import with_client
from xinference_xavier.client import XavierClient
from xinference_xavier.client.client import ANSWER_TIMEOUT
from xinference_xavier.errors import ApiError
from xinference_xavier.limits import LOOK
from xinference_xavier.stats.schema import Hits, ModelStatus

DOES_NOT_HELP, NOT_TRIED = 1, 2
"""Exit codes."""
_ANSWER_TOKENS = 8
_PATIENCE = 10.0
"""Seconds for replicas to count a request, or to offer what they have computed."""
_FOR_S = ANSWER_TIMEOUT + 2 * _PATIENCE
"""Seconds after which the server puts sharing and routing back: longer than from one question to
the next."""
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "world", "hand", "part")


class CannotTryError(Exception):
    """The message says why, and what to do."""


class Answer(NamedTuple):
    """The answer to a prompt, the seconds until it was complete, and the source of most of the
    prompt's tokens, as in `Hits`."""

    text: str
    seconds: float
    prompt_tokens: int
    source: str


def words(count: int) -> str:
    """A prompt that nobody has asked before. Almost every word is a token."""
    return " ".join(random.SystemRandom().choices(_WORDS, k=count))


class Trial:
    """Raises CannotTryError if fewer than two replicas of the model can share."""

    def __init__(self, client: XavierClient, model: str) -> None:
        self._client = client
        self._model = model
        self.before = self._status()
        cannot = {each.replica: each.not_sharing for each in self.before.replicas}
        able = [replica for replica, reason in cannot.items() if reason is None]
        if len(able) < 2:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in cannot.items() if reason)
            raise CannotTryError(
                f"a trial needs two replicas that can share, and {model} has {len(able)}"
                f"{reasons and f' ({reasons})'}; launch more, or see `xinference-xavier doctor`"
            )

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Send requests round-robin, and leave routing and sharing as they were."""
        try:
            self._route_in_turn()
            yield
        finally:
            try:
                self._route_in_turn(for_s=0)
            except ApiError:
                click.echo(f"sharing and routing are put back within {_FOR_S:.0f} s", err=True)
                raise

    def _route_in_turn(self, for_s: float = _FOR_S) -> None:
        self._client.set_routing(self._model, "off", for_s=for_s)

    def share(self, enabled: bool) -> None:
        self._client.switch(self._model, enabled, for_s=_FOR_S)

    def ask(self, prompt: str) -> Answer:
        self._route_in_turn()
        before = self._status().totals.hits
        began = time.monotonic()
        answer = self._client.complete(self._model, prompt, max_tokens=_ANSWER_TOKENS)
        seconds = time.monotonic() - began
        tokens = answer["usage"]["prompt_tokens"]

        def new() -> Hits:
            now = self._status().totals.hits
            return Hits(**{name: count - vars(before)[name] for name, count in vars(now).items()})

        self._await(lambda: new().total >= tokens, "the replicas have not counted a request")
        return Answer(answer["choices"][0]["text"], seconds, tokens, new().main)

    def await_offered(self, prompt: str) -> None:
        """Wait until a replica could fetch the prompt."""

        def is_offered() -> bool:
            return any(chunk.holders for chunk in self._client.explain(self._model, prompt).chunks)

        self._await(is_offered, "no replica offers the prompt that it has computed")

    def why_not_fetched(self) -> str:
        """What replicas have counted since the trial began."""
        now = self._status()
        if _chosen_to_compute(now) > _chosen_to_compute(self.before):
            return "computing is faster here: so the replicas' measurements predict"
        earlier = self.before.totals.fetches.rolled_back
        new = {
            reason: count
            for reason, count in now.totals.fetches.rolled_back.items()
            if count > earlier.get(reason, 0)
        }
        return f"fetches were rolled back: {', '.join(new)}" if new else "no replica has fetched it"

    def _status(self) -> ModelStatus:
        return self._client.status(self._model)

    def _await(self, condition: Callable[[], object], otherwise: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise CannotTryError(
                    f"{otherwise} within {_PATIENCE:.0f} s; see `xinference-xavier doctor`"
                )
            time.sleep(LOOK)


def _chosen_to_compute(status: ModelStatus) -> int:
    return sum(replica.fetch_decisions.computed for replica in status.replicas)


@click.command(name="try")
@click.argument("model")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=4000,
    show_default=True,
    help="Length of the two prompts, about as long.",
)
@with_client
def trial(client: XavierClient, model: str, tokens: int) -> None:
    """Ask MODEL two long prompts to see if sharing helps here.

    For these seconds, routing is off for all requests, and sharing for one of the prompts. Exits
    with 0 if the replicas shared, however fast, 1 if nothing was shared or an answer is wrong, 2
    if that could not be tried.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # put all back first
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    try:
        tested = Trial(client, model)
        with tested.in_turn():
            code, conclusion = conclude(tested, tokens)
    except CannotTryError as error:
        click.echo(f"not tried: {error}", err=True)
        sys.exit(NOT_TRIED)
    click.echo(conclusion)
    sys.exit(code)


def conclude(tested: Trial, tokens: int) -> tuple[int, str]:
    """Print each measurement. Return the exit code, and whether sharing helps and by how much or
    why not."""

    def say(what: str, answer: Answer) -> Answer:
        click.echo(f"{what:30} {answer.seconds:8.3f} s  {answer.prompt_tokens} tokens")
        return answer

    tested.share(False)
    alone = say("computed, sharing off", tested.ask(words(tokens)))
    tested.share(True)
    shared = words(tokens)
    computed = say("computed", tested.ask(shared))
    tested.await_offered(shared)
    found: dict[str, Answer] = {}
    for _ in range(len(tested.before.replicas) + 1):
        answer = tested.ask(shared)
        if answer.source not in found:
            found[answer.source] = say(f"from: {answer.source.replace('_', ' ')}", answer)
    remote = found.pop("remote", None)
    if remote is None:
        return DOES_NOT_HELP, f"does not help: {tested.why_not_fetched()}"
    own = {computed.text, *(answer.text for answer in found.values())}
    click.echo(f"answers are {'equal' if own == {remote.text} else 'not equal'}")
    if remote.text not in own:  # computing may round otherwise than reusing
        return DOES_NOT_HELP, (
            "does not help: what another replica has computed gives another answer; switch sharing "
            "off, and see `xinference-xavier doctor`"
        )
    times = round(min(alone.seconds, computed.seconds) / remote.seconds, 1)
    measured = f"{times} × as fast from another replica as computed"
    if times > 1:
        return 0, f"helps: {measured}"
    return (
        0,
        f"shares, but is not faster now: {measured}; busy processors or a short prompt do that",
    )
