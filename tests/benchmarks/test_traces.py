"""Traces keep their prefixes, whatever they are scaled to."""

from itertools import takewhile
from statistics import mean

import pytest

from benchmarks import traces
from benchmarks.traces import CHUNK, Common, Request, Rounds

REQUESTS = [Request(float(at), 1000, [b"first", b"%d" % at], 10) for at in range(8)]


@pytest.mark.parametrize(
    ("name", "count", "reuse", "answer"),
    [("conversation", 12_031, 0.36, 343), ("synthetic", 3993, 0.65, 149)],
)
def test_a_trace_has_its_requests_in_order_of_arrival(
    name: str, count: int, reuse: float, answer: int
) -> None:
    trace = traces.load(name)
    assert len(trace) == count
    assert trace == sorted(trace, key=lambda request: request.at)
    assert all(len(request.keys) == request.tokens // CHUNK for request in trace)
    known: set[bytes] = set()
    hits = 0
    for request in trace:
        hits += sum(1 for _ in takewhile(known.__contains__, request.keys))
        known.update(request.keys)
    tokens = sum(request.tokens for request in trace)
    assert hits * CHUNK / tokens == pytest.approx(reuse, abs=0.02)
    assert round(mean(request.answer for request in trace)) == answer


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_trace_is_scaled_to_a_load(pieces: int) -> None:
    spread = traces.spread(REQUESTS, tokens_per_s=100.0, pieces=pieces)
    assert spread[-1].at == pytest.approx(80.0)
    assert sorted(request.keys[1] for request in spread) == [b"%d" % n for n in range(8)]


def test_pieces_are_played_at_once() -> None:
    spread = traces.spread(REQUESTS, tokens_per_s=100.0, pieces=4)
    assert [request.at for request in spread] == pytest.approx([0.0] * 4 + [80.0] * 4)


def test_copies_share_nothing() -> None:
    copied = traces.copied(REQUESTS, 3)
    assert len(copied) == 24
    first, second, third = ({k for r in copied[n : n + 8] for k in r.keys} for n in (0, 8, 16))
    assert len(first | second | third) == 3 * len(first) == 27
    assert len(copied[9].keys) == 2
    assert copied[8].keys[0] == copied[9].keys[0]
    assert [request.at for request in copied[7:9]] == [7.0, 7.0]


def test_rounds_begin_with_the_system_prompt_and_what_the_user_has_said() -> None:
    requests = Rounds(pause=1.0).requests(tokens_per_s=10_000.0, seconds=200.0)
    assert requests == sorted(requests, key=lambda request: request.at)
    assert all(len(request.keys) == request.tokens // CHUNK for request in requests)
    assert len({request.keys[0] for request in requests}) == 1
    longest: dict[bytes, Request] = {}
    for request in requests:
        before = longest.get(request.keys[1])
        assert before is None or list(before.keys) == list(request.keys[: len(before.keys)])
        longest[request.keys[1]] = request
    assert len(longest) * Rounds().new / 200.0 == pytest.approx(10_000.0, rel=0.2)


@pytest.mark.parametrize("fixed", [False, True])
def test_common_questions_differ_only_after_the_system_prompt(fixed: bool) -> None:
    requests = Common(fixed=fixed).requests(per_s=10, seconds=300.0)
    assert len(requests) == pytest.approx(3000, rel=0.1)
    assert {request.tokens for request in requests} == {5200}
    assert {tuple(request.keys) for request in requests} == {tuple(requests[0].keys)}
    answers = [request.answer for request in requests]
    assert mean(answers) == pytest.approx(1000, rel=0.1)
    assert (len(set(answers)) == 1) is fixed
