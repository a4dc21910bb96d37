"""A replica's load is checked by its tracker, and what the tracker says by each router. A request's
id says which replica prefills it."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from xinference_xavier.protocol.load import (
    MAX_KNOWN,
    MAX_PROMPT_KEYS,
    MAX_REPORTS,
    Elsewhere,
    Load,
    Observation,
    ReplicaLoad,
    RequestReport,
    Serving,
    check_load,
    check_observation,
    check_requests,
    mark_of,
    with_mark,
)
from xinference_xavier.protocol.tracker import SHORT_KEY, Change, Member, Settings, Update
from xinference_xavier.runtime.validate import MAX_COUNT, MAX_IDENTIFIER

SERVING = Serving(128, 1 << 20, request_limit=8, routing="backlog", queue=100, slots=256)
LOAD = Load(
    SERVING,
    prefill_tokens=1000,
    prefill_s=0.5,
    requests=2,
    known=("r", "s"),
    rates=(1e-4, 1e-9, 0.01, 1e-9),
    step=(0.02, 1e-4),
    free_tokens=5000,
    kv_tokens=9000,
)
PROMPT = RequestReport("r", 300, b"k" * 2 * SHORT_KEY)
ANSWER = RequestReport("r", 0, b"", answer=50)
UPDATE = Update(
    3,
    "epoch",
    False,
    (Settings(1, True, "off"), Member("a", "h:1"), Change("a", 2, b"key2", b"key1")),
)
OBSERVATION = Observation(
    UPDATE, 7, False, (ReplicaLoad("a", "m-0", 0.1, LOAD),), ("b",), (PROMPT, ANSWER)
)

TOO_LONG = "x" * (MAX_IDENTIFIER + 1)
NO_COUNTS = [-1, MAX_COUNT + 1, 1.0, "1", True, 10**400]
NO_SECONDS = [-0.001, math.nan, math.inf, "1", True, 10**400]
NO_IDENTIFIERS = ["", TOO_LONG, b"a", 7, None, "\ud800"]


def altered(message: Any, **fields: list[Any]) -> list[Any]:
    return [
        message._replace(**{name: value}) for name, values in fields.items() for value in values
    ]


def serving_as(**fields: list[Any]) -> list[Any]:
    return [LOAD._replace(serving=serving) for serving in altered(SERVING, **fields)]


@pytest.mark.parametrize(
    ("check", "messages"),
    [
        (check_load, [LOAD, Load(SERVING, 0, None, 0), Load(Serving(1, 0), 0, 0, 0)]),
        (
            check_requests,
            [
                *((), (PROMPT, ANSWER), (PROMPT,) * 2 * MAX_REPORTS),
                (PROMPT._replace(keys=bytes(MAX_PROMPT_KEYS * SHORT_KEY)),),
            ],
        ),
        (check_observation, [OBSERVATION, Observation(None, 0, True, ())]),
    ],
    ids=["load", "requests", "observation"],
)
def test_a_message_arrives_as_it_was(
    check: Callable[[object], object], messages: list[object]
) -> None:
    for message in messages:
        assert check(pickle.loads(pickle.dumps(message))) == message


MALFORMED: dict[str, tuple[Callable[[object], object], list[Any]]] = {
    "load": (
        check_load,
        [
            *(None, 7, {}, (), "load", SERVING, PROMPT, tuple(LOAD)[:3], (*LOAD, 1)),
            *altered(LOAD, serving=[None, {}, (), (128,)]),
            *altered(LOAD, prefill_tokens=[*NO_COUNTS, None], requests=[*NO_COUNTS, None]),
            *altered(LOAD, prefill_s=NO_SECONDS, free_tokens=NO_COUNTS, kv_tokens=NO_COUNTS),
            *altered(LOAD, known=[None, "r", ["r"], {"r"}, ("r",) * (MAX_KNOWN + 1)]),
            *altered(LOAD, known=[("r", name) for name in NO_IDENTIFIERS]),
            *altered(LOAD, rates=[(), (0.1,) * 3, (0.1,) * 5, [0.1] * 4, 0.1]),
            *altered(LOAD, rates=[(0.1, 0.1, 0.1, each) for each in (*NO_SECONDS, None)]),
            *altered(LOAD, step=[(), (0.1,), (0.1,) * 3, [0.1] * 2, 0.1]),
            *altered(LOAD, step=[(0.1, each) for each in (*NO_SECONDS, None)]),
            *serving_as(chunk_tokens=[0, -128, 1 << 31, None], chunk_bytes=[-1, 0.5, None]),
            *serving_as(request_limit=[-1, 0.5], queue=[-1, None, 0.5], slots=[-1, 0.5]),
            *serving_as(routing=["", "fast", None, 1, ["off"], "OFF"]),
        ],
    ),
    "requests": (
        check_requests,
        [
            *(None, 7, "ab", [PROMPT], PROMPT, (PROMPT, None), (PROMPT, ("r", 1))),
            (PROMPT,) * (2 * MAX_REPORTS + 1),
            *([each] for each in altered(PROMPT, request=NO_IDENTIFIERS)),
            *((PROMPT, each) for each in altered(PROMPT, request=NO_IDENTIFIERS)),
            *((each,) for each in altered(PROMPT, tokens=[*NO_COUNTS, None])),
            *((each,) for each in altered(ANSWER, answer=NO_COUNTS)),
            *((each,) for each in altered(PROMPT, keys=[None, "k" * 12, [b"k" * 12], b"k" * 13])),
            (PROMPT._replace(keys=bytes((MAX_PROMPT_KEYS + 1) * SHORT_KEY)),),
        ],
    ),
    "observation": (
        check_observation,
        [
            *(None, 7, {}, (), UPDATE, tuple(OBSERVATION)[:3], (*OBSERVATION, 1)),
            *altered(OBSERVATION, update=[7, (), {}, LOAD], version=[*NO_COUNTS, None]),
            *altered(OBSERVATION, complete=[0, 1, None, "yes"]),
            *altered(OBSERVATION, loads=[None, [], (None,), (LOAD,)]),
            *altered(OBSERVATION, gone=[None, [], "ab", *((each,) for each in NO_IDENTIFIERS)]),
            *altered(OBSERVATION, requests=[None, [], (None,), (PROMPT._replace(keys=b"k"),)]),
            *(
                OBSERVATION._replace(loads=(each,))
                for each in altered(
                    OBSERVATION.loads[0],
                    incarnation=NO_IDENTIFIERS,
                    replica=NO_IDENTIFIERS,
                    age=[*NO_SECONDS, None],
                    load=[None, LOAD._replace(requests=-1)],
                )
            ),
        ],
    ),
}


@pytest.mark.parametrize(
    ("what", "message"),
    [(what, message) for what, (_, messages) in MALFORMED.items() for message in messages],
)
def test_a_malformed_message_is_refused(what: str, message: object) -> None:
    check, _ = MALFORMED[what]
    with pytest.raises(ValueError, match=rf"^(malformed {what}|keys )") as caught:
        check(message)
    assert len(str(caught.value)) < 1000, "however long the message is"


# -- marks ------------------------------------------------------------------------------------

ELSEWHERE = Elsewhere("4c742c4f-37a2-43ce-99f9-01d1bf27af26_dp1", 0.25, 1.5)
KEY = "3a" * 16
MARKED = with_mark("0b9f", ELSEWHERE, KEY)


@pytest.mark.parametrize("name", [MARKED, f"{MARKED}-12ab34cd", f"3_{MARKED}-12ab34cd"])
def test_the_mark_survives_what_vllm_adds(name: str) -> None:
    assert mark_of(name, KEY) == ELSEWHERE


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0b9f",
        "0b9f:prefill",
        "x:prefill::1:2",
        "x:prefill:a:-1:2",
        f"x:prefill:{'a' * 300}:1:2",
    ],
)
def test_other_ids_have_none(name: str) -> None:
    assert mark_of(name, KEY) is None


def test_a_client_cannot_make_one() -> None:
    """It does not know the replica's key, and another replica's does not help."""
    assert mark_of(with_mark("0b9f", ELSEWHERE, "another key"), KEY) is None
    longer = MARKED.replace(":1500:", ":9500:")
    assert longer != MARKED
    assert mark_of(longer, KEY) is None


def test_no_wait_is_longer_than_ten_minutes() -> None:
    forever = with_mark("0b9f", Elsewhere("a", 1e9, float("inf")), KEY)
    assert mark_of(forever, KEY) == Elsewhere("a", 600.0, 600.0)
