"""Whatever a user, a member of a tracker or a process at a socket sends passes all checks or is
refused with one of our errors.

There is no other exception, nothing is half done, and no memory grows with the sizes that a few
bytes claim. Each decoder gets an equal share of XAVIER_FUZZ_SECONDS (10), with new examples every
time; a failure shows its example.
"""

import asyncio
import itertools
import json
import math
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.harness.comparisons import compared_index, report, usable_holders
from tests.protocol.test_load import LOAD, PROMPT, SERVING
from xinference_xavier.config import XavierConfig, take_launch_options
from xinference_xavier.errors import ConfigError, RegionError
from xinference_xavier.options import PARSERS
from xinference_xavier.pool import region as region_module
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.load import check_load, check_observation, check_requests
from xinference_xavier.protocol.tracker import Member, Settings
from xinference_xavier.tracker.actor import BlockTracker

Check = Callable[[Any], None]
KEY = b"key 00000001"


def nest(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


NASTY = [
    *(None, True, False, 0, 1, 2, 3, 4, -1, 7, 8, 1 << 63, 1 << 64, 10**4200, -(10**400)),
    *(0.0, -0.0, 0.5, math.nan, math.inf, -math.inf, 1e308),
    *("", "id", "ns", "h:1", "h:", "[::1]:1", "h:99999", "x" * 257, "\ud800", "\0"),
    *(b"", KEY, b"key1", b"key", b"\0" * 32, b"x" * 1025, bytearray(4)),
    *([], {}, (), {1}, {"a": {}}, [KEY], (KEY, "key2"), (0, 0), (1, -1), object),
]
plain = (
    st.sampled_from(NASTY) | st.integers() | st.integers(-2, 9) | st.text(max_size=9) | st.binary()
)
anything = plain | st.lists(plain, max_size=4) | st.lists(plain, max_size=4).map(tuple)
nested = st.integers(1, 5000).map(nest)


def altered(message: Any) -> st.SearchStrategy[Any]:
    """Messages like `message`, with other values in some fields."""
    value = anything | nested
    fields = st.dictionaries(st.sampled_from(message._fields), value, min_size=1, max_size=3)
    return fields.map(lambda changes: message._replace(**changes)) | value


def explore(check: Check, examples: st.SearchStrategy[Any], seconds: float) -> int:
    """Check as many examples as time allows; return their number."""
    end = time.monotonic() + seconds
    count = 0

    def counted(example: Any) -> None:
        nonlocal count
        count += 1
        check(example)

    for number in itertools.count(random.getrandbits(32)):
        wanted = settings(max_examples=200, database=None, suppress_health_check=list(HealthCheck))
        seed(number)(wanted(given(examples)(counted)))()
        if time.monotonic() > end:
            return count
    raise AssertionError


def a_load(example: Any) -> None:
    with suppress(ValueError):
        load = check_load(example)
        assert load.requests >= 0 <= load.prefill_tokens
        assert 0 <= (load.prefill_s or 0.0) < math.inf
        assert all(0 <= rate < math.inf for rate in load.rates or ())
        assert all(0 <= seconds < math.inf for seconds in load.step or ())
        assert load.serving.chunk_tokens > 0
        assert {type(name) for name in load.known} <= {str}


def some_requests(example: Any) -> None:
    with suppress(ValueError):
        for report in check_requests(example):
            assert len(report.keys) % 12 == 0
            assert report.tokens >= 0 <= (report.answer or 0)
            hash(report)


def a_call(example: tuple[str, tuple[Any, ...]]) -> None:
    """A report of a member to the tracker. The others, and routers, do not notice."""
    method, arguments = example
    tracker = BlockTracker("model")

    async def call() -> None:
        for name in ("a", "b"):
            joining = tracker.join("ns", Member(name, "h:1"), Settings(), report=report(short=1))
            await joining
        with suppress(ValueError):
            await getattr(tracker, method)(*arguments)
        await tracker.publish("ns", "b", 1, KEY, b"")
        index = compared_index()
        index.apply(await tracker.watch("ns", "a", "", 0, 0.0))
        assert "b" in usable_holders(index, KEY)
        json.loads(await tracker.history())
        check_observation(await tracker.observe("", 0, 0, 0.0))
        await tracker.report_load("ns", "b", LOAD, (PROMPT,))

    asyncio.run(call())


PACKED = st.binary(max_size=36) | anything
CALLS = st.one_of(
    *(
        st.tuples(st.just(method), st.tuples(st.just("ns"), st.just("a"), *arguments))
        for method, *arguments in (
            ("heartbeat", anything),
            ("publish", st.just(1), PACKED, PACKED, st.booleans()),
            ("claim", PACKED, st.just(1.0)),
            ("release", PACKED),
            ("report_load", altered(LOAD)),
            ("report_load", st.just(LOAD), st.tuples(altered(PROMPT)) | anything),
        )
    )
)


def a_region(example: tuple[bytes, int]) -> None:
    data, count = example
    ours, theirs = socket.socketpair()
    offered = Region.create(2, 4096)
    others = [os.dup(offered.fd) for _ in range(count)]
    with ours, theirs:
        socket.send_fds(theirs, [data], others)
        theirs.shutdown(socket.SHUT_WR)
        before = len(os.listdir("/proc/self/fd"))
        try:
            region = region_module.take_region(ours)
        except RegionError:
            assert len(os.listdir("/proc/self/fd")) == before
        else:
            assert region.rows * region.row_bytes == region.size == 8192
            region.close()
    for fd in others:
        os.close(fd)
    offered.close()


HEADERS = st.tuples(
    st.sampled_from([b"XAVIER01", b"XAVIER02"]),
    st.integers(0, 9) | st.integers(0, (1 << 64) - 1),
    st.sampled_from([4096, 8192, 0]) | st.integers(0, (1 << 64) - 1),
).map(lambda fields: region_module._HEADER.pack(*fields))


def options(example: dict[str, Any]) -> None:
    """Launch options from a user, through JSON."""
    with suppress(ConfigError):
        taken = take_launch_options({"enable_xavier": True, **example})
        if taken is not None:
            json.dumps(XavierConfig("m", "h:1", **vars(taken)).to_dict())


OPTIONS = st.dictionaries(
    st.sampled_from([*PARSERS, "xavier_pool-bytes", "xavier_x", "xavier_config"]),
    anything | st.from_regex(r"\d{1,9}([kmgt]i?b)?|\d+-\d+|[\w.:]+", fullmatch=True),
    max_size=3,
)

DECODERS: dict[str, tuple[Check, st.SearchStrategy[Any]]] = {
    "load": (
        a_load,
        altered(LOAD) | altered(SERVING).map(lambda serving: LOAD._replace(serving=serving)),
    ),
    "requests": (
        some_requests,
        st.lists(st.just(PROMPT) | altered(PROMPT), max_size=3).map(tuple) | anything,
    ),
    "call": (a_call, CALLS),
    "region": (
        a_region,
        st.tuples(HEADERS | st.binary(min_size=1, max_size=40), st.integers(0, 2)),
    ),
    "options": (options, OPTIONS),
}

SECONDS = float(os.environ.get("XAVIER_FUZZ_SECONDS", "10")) / len(DECODERS)


@pytest.mark.parametrize("name", DECODERS)
def test_anything_but_a_message_is_refused(name: str) -> None:
    print(f"{explore(*DECODERS[name], SECONDS)} examples of a {name}")
