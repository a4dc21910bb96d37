"""A router that looks from time to time misses no load, no departure and no prompt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from xinference_xavier.protocol.load import Load, ReplicaLoad, ScheduledPrompt, Serving
from xinference_xavier.tracker import observers as loads_module
from xinference_xavier.tracker.observers import Loads, News

SERVING = Serving(128, 1 << 20)
NAMES = {"a": "model-0", "b": "model-1"}


def load(tokens: int = 0) -> Load:
    return Load(SERVING, prefill_tokens=tokens, prefill_s=None, requests=1)


def prompts(*names: str) -> Sequence[ScheduledPrompt]:
    return [ScheduledPrompt(name, 100, b"") for name in names]


def news(loads: Loads, seen: int, now: float = 0.0) -> News:
    return loads.since(seen, lambda incarnation: NAMES.get(incarnation, incarnation), now)


def reported(found: News) -> dict[str, int]:
    """Tokens by incarnation."""
    return {each.incarnation: each.load.prefill_tokens for each in found.loads}


def prompted(found: News) -> list[str]:
    return [prompt.request for prompt in found.prompts]


@pytest.fixture
def loads() -> Loads:
    return Loads()


def test_a_load_carries_its_replica_s_name_and_its_age(loads: Loads) -> None:
    loads.report("a", load(7), (), now=100.0)
    (found,) = news(loads, 0, now=101.5).loads
    assert found == ReplicaLoad("a", "model-0", 1.5, load(7))
    (found,) = news(loads, 0, now=99.0).loads
    assert found.age == 0.0, "if a clock goes back"


def test_a_look_finds_what_is_newer_than_the_last_one(loads: Loads) -> None:
    loads.report("a", load(1), prompts("p"), now=0.0)
    loads.report("b", load(2), prompts("q", "r"), now=0.0)
    first = news(loads, 0)
    assert (reported(first), prompted(first)) == ({"a": 1, "b": 2}, ["p", "q", "r"])
    assert news(loads, first.version) == News(first.version, False, (), (), ())
    loads.report("a", load(3), prompts("s"), now=1.0)
    second = news(loads, first.version)
    assert (reported(second), prompted(second), second.complete) == ({"a": 3}, ["s"], False)
    assert news(loads, second.version) == News(second.version, False, (), (), ())


def test_only_the_latest_load_of_a_replica_counts(loads: Loads) -> None:
    seen = loads.version
    for tokens in range(5):
        loads.report("a", load(tokens), (), now=0.0)
    assert reported(news(loads, seen)) == {"a": 4}


def test_news_come_in_the_order_in_which_they_arrived(loads: Loads) -> None:
    seen = loads.version
    for name in ("a", "b", "a"):
        loads.report(name, load(), prompts(f"of {name}"), now=0.0)
    found = news(loads, seen)
    assert [each.incarnation for each in found.loads] == ["b", "a"]
    assert prompted(found) == ["of a", "of b", "of a"]


def test_a_replica_that_left_is_gone(loads: Loads) -> None:
    loads.report("a", load(), (), now=0.0)
    loads.report("b", load(), (), now=0.0)
    seen = loads.version
    loads.forget("a")
    loads.forget("b")
    found = news(loads, seen)
    assert (found.loads, found.gone, found.complete) == ((), ("a", "b"), False)
    assert found.version > seen, "a look that waits for news must find it"
    assert news(loads, found.version).gone == ()


def test_a_replica_that_left_and_reported_again_is_both(loads: Loads) -> None:
    """What was sent to it before is lost."""
    loads.report("a", load(1), (), now=0.0)
    seen = loads.version
    loads.forget("a")
    loads.report("a", load(2), (), now=0.0)
    found = news(loads, seen)
    assert (found.gone, reported(found)) == (("a",), {"a": 2})


def test_one_that_has_not_reported_cannot_be_gone(loads: Loads) -> None:
    seen = loads.version
    loads.forget("a")
    assert news(loads, seen) == News(seen, False, (), (), ())


@pytest.mark.parametrize("seen", ["nothing", "an earlier tracker", "a later tracker"])
def test_who_has_followed_another_tracker_gets_everything(loads: Loads, seen: str) -> None:
    """The members that are missing have left."""
    first = loads.version
    loads.report("a", load(1), prompts("p"), now=0.0)
    loads.report("b", load(2), (), now=0.0)
    loads.forget("b")
    last = loads.version
    version = {"nothing": 0, "an earlier tracker": first - 1, "a later tracker": last + 1}[seen]
    found = news(loads, version)
    assert (found.version, found.complete, found.gone) == (last, True, ())
    assert (reported(found), prompted(found)) == ({"a": 1}, ["p"])


def test_a_later_tracker_counts_on_from_above(loads: Loads) -> None:
    for _ in range(100):
        loads.report("a", load(), (), now=0.0)
    assert Loads().version > loads.version


def test_who_looks_so_late_that_departures_are_forgotten_gets_everything(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads_module, "MAX_REMEMBERED", 2)
    loads = Loads()
    loads.report("stays", load(1), (), now=0.0)
    seen = loads.version
    for name in ("a", "b"):
        loads.report(name, load(), (), now=0.0)
        loads.forget(name)
        before_last = loads.version
    loads.report("c", load(), (), now=0.0)
    loads.forget("c")
    late = news(loads, seen)
    assert (late.complete, late.gone, reported(late)) == (True, (), {"stays": 1})
    in_time = news(loads, before_last)
    assert (in_time.complete, in_time.gone, in_time.loads) == (False, ("c",), ())


def test_the_latest_prompts_are_remembered(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads_module, "MAX_REMEMBERED", 3)
    loads = Loads()
    loads.report("a", load(), prompts("p", "q"), now=0.0)
    loads.report("a", load(), prompts("r", "s"), now=0.0)
    assert prompted(news(loads, 0)) == ["q", "r", "s"]


def test_prompts_are_remembered_as_far_as_their_keys_fit(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads_module, "MAX_PROMPT_BYTES", 24)
    for name, chunks in {"p": 1, "q": 1, "r": 1, "s": 3, "t": 1}.items():
        loads.report("a", load(), [ScheduledPrompt(name, 100, chunks * b"k" * 12)], now=0.0)
    assert prompted(news(loads, 0)) == ["t"]
    loads.report("a", load(), [ScheduledPrompt("u", 100, b"k" * 12)], now=0.0)
    assert prompted(news(loads, 0)) == ["t", "u"]
