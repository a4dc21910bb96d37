"""A trace is played as text that has its tokens and its prefixes, and the simulator is compared."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import bars, replay, traces
from benchmarks.replay import BLOCK, Played, Words
from benchmarks.simulator import Engine
from benchmarks.traces import CHUNK, Request
from tests.benchmarks.parts import shown

KEYS = [b"first".ljust(36), b"second".ljust(36)]


@pytest.fixture
def words(tmp_path: Path) -> Words:
    vocabulary = {"Ġone": 1, "Ġtwo": 2, "three": 3, "Ġ4": 4, "Ġ": 5}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return Words(tmp_path)


def test_every_word_is_a_token(words: Words) -> None:
    text = words.text("seed", 100)
    assert set(text.split(" ")) == {"", "one", "two"}
    assert text.count(" ") == 100


def test_prompts_with_equal_keys_begin_alike(words: Words) -> None:
    requests = [Request(0.0, 2 * BLOCK + 9, KEYS), Request(1.0, 2 * BLOCK + 9, [KEYS[0], b"other"])]
    first, second = ([*text.split(" ")[1:]] for text in words.prompts(requests, 1))
    assert len(first) == len(second) == 2 * BLOCK + 9
    assert first[:BLOCK] == second[:BLOCK]
    assert first[BLOCK : 2 * BLOCK] != second[BLOCK : 2 * BLOCK]
    again = words.prompts(requests, 2)[0].split(" ")[1:]
    assert again[:BLOCK] != first[:BLOCK], "nothing of the last time can be reused"


def test_conversations_stay_whole_and_belong_to_one_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "CONVERSATIONS", 3)
    trace = traces.load("conversation")[:2000]
    parts = [replay.conversations(trace, number) for number in range(3)]
    seen = Counter(key for part in parts for key in {request.keys[1] for request in part})
    assert set(seen.values()) == {1}
    for part in parts:
        assert part[0].at == 0.0
        assert all(len(request.keys) == request.tokens // BLOCK for request in part)
    long_enough = [request for request in trace if request.tokens >= 2 * CHUNK]
    assert sum(map(len, parts)) == len(long_enough)


def test_the_simulator_is_compared_with_what_was_measured() -> None:
    engine = Engine(prefill=1000.0, processors=2.0, step=100)
    measured = {True: [Played([1.0, 2.0], 0.5)] * 5, False: [Played([2.0, 4.0], 0.5)] * 5}
    simulated = {True: [Played([0.6, 1.2], 0.5)] * 5, False: [Played([3.0, 3.6], 0.4)] * 5}
    part = replay.summary([engine] * 5, measured, simulated)
    assert part["ways"]["routed"]["simulated/measured"] == pytest.approx(0.6)
    assert part["compared"]["mean_s"]["ratio"] == pytest.approx(0.5)
    assert "| in turn, simulated | 3.30 | 3.30 | 3.60 | 0.40 |" in shown(replay, part)
    off, better = bars.judge("replay", part)
    assert (off["value"], off["met"]) == (pytest.approx(1 / 0.6), False)
    assert better["met"]


def test_a_simulated_replay_reuses_what_the_trace_repeats() -> None:
    trace = replay.conversations(traces.load("conversation"), 0)
    spread = traces.spread(trace, 1000.0, 1)
    for routed in (True, False):
        played = replay.simulate(Engine(prefill=1000.0, chunk=BLOCK), spread, routed)
        assert len(played.seconds) == len(trace)
        assert 0.1 < played.reused < 0.6
