"""Messages between engines and transfer processes, and how they are checked."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.protocol.test_load import altered
from xinference_xavier.errors import GrantRefusedError, LinkError, TransportError
from xinference_xavier.protocol.transfer import (
    MAX_HOT,
    MAX_LINE,
    MAX_ROWS_PER_FETCH,
    PROTOCOL_VERSION,
    Endpoint,
    Grant,
    GrantRequest,
    HotChunks,
    PullOrder,
    Startup,
    Ticket,
    check_grant,
    check_hot,
    check_order,
    check_request,
    check_ticket,
    parse_started,
)

KEY = b"k" * 32
TRANSPORTS = ("module:Class", "another:Class")
TICKET = Ticket.sign(KEY, "consumer", [4, 2], expires=100.25)
EMPTY = Ticket.sign(KEY, "consumer", [], expires=100.25)


def test_a_ticket_is_valid_until_it_expires() -> None:
    arrived: Ticket = pickle.loads(pickle.dumps(TICKET))
    assert arrived.is_valid(KEY, now=0)
    assert arrived.is_valid(KEY, now=100.2)
    assert not arrived.is_valid(KEY, now=100.25)


@pytest.mark.parametrize(
    "forged",
    altered(
        TICKET,
        consumer=["another"],
        slots=[(4, 3), (4, 2, 3), (2, 4), ()],
        expires=[1e9],
        signature=[b"\0" * 32, b""],
    ),
)
def test_an_altered_ticket_is_worthless(forged: Ticket) -> None:
    assert not forged.is_valid(KEY, now=0)


def test_a_ticket_of_another_engine_is_worthless() -> None:
    assert not TICKET.is_valid(b"x" * 32, now=0)


@pytest.mark.parametrize("port_range", [None, (40000, 40100)])
def test_a_startup_message_arrives_as_it_was(port_range: tuple[int, int] | None) -> None:
    startup = Startup("id", 7, 64, 4096, "::1", port_range, TRANSPORTS, KEY.hex(), parent=77)
    line = startup.to_json()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert Startup.from_json(line) == startup


REQUEST = GrantRequest(PROTOCOL_VERSION, "namespace", "consumer", (b"key1", b"key2"))
GRANT = Grant(1, (7, 8), TICKET, "host:1", "boot 1 0", False, 3)
ORDER = PullOrder("donor", "host:1", None, TICKET, (b"key1", b"key2"), (7, 8), (0, 1), 1.0)
ROWS = 5
"""Rows of the region that the slots belong to."""


def test_correct_messages_pass() -> None:
    nothing = GRANT._replace(grant_id=0, checksums=(), ticket=EMPTY)
    assert check_request(REQUEST) == REQUEST
    assert check_ticket(TICKET, ROWS) == TICKET
    for grant in (GRANT, GRANT._replace(host=None), nothing):
        assert check_grant(grant, asked=2) == grant
    assert check_order(ORDER, ROWS) == ORDER


NO_NAMES = [None, "", "x" * 257, 7, []]
NO_NUMBERS = [None, -1, True, 1.0, "1", 1 << 64, 10**5000]
NO_SLOTS = [None, [4, 2], (4, ROWS), (4, -1), (4, True), (4, 2.0), (4, "2"), (0,) * ((1 << 16) + 1)]
NO_KEYS = [None, [b"key1", b"key2"], (b"key1", "key2"), (b"key1", b""), (b"key1", b"x" * 2000)]


MALFORMED: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
    "request": (
        check_request,
        [
            *(None, {}, tuple(REQUEST)[:-1]),
            *altered(REQUEST, namespace=NO_NAMES, consumer=NO_NAMES, keys=[*NO_KEYS, ([],)]),
        ],
    ),
    "ticket": (
        lambda ticket: check_ticket(ticket, ROWS),
        [
            *(None, tuple(TICKET)[:-1]),
            *altered(TICKET, consumer=NO_NAMES, slots=NO_SLOTS),
            *altered(TICKET, expires=[None, "1", 0, -1.0, float("nan"), float("inf")]),
            *altered(TICKET, signature=[None, b"", "x" * 32, b"x" * 33, bytearray(32)]),
        ],
    ),
    "grant": (
        lambda grant: check_grant(grant, asked=2),
        [
            None,
            *altered(GRANT, grant_id=[*NO_NUMBERS, 0], sequence=NO_NUMBERS),
            *altered(GRANT, checksums=[None, [7, 8], (7,), (), (7, -1), (7, 1 << 64), (7, 8, 9)]),
            *altered(GRANT, ticket=[None, EMPTY, TICKET._replace(slots=(4,))]),
            *altered(GRANT, address=[None, "", "host", "unixsocket:///1", "host:x", "host:99999"]),
            *altered(GRANT, host=["", "x" * 257, 7, []], more_is_held=[None, 1, "yes"]),
        ],
    ),
    "order": (
        lambda order: check_order(order, ROWS),
        [
            None,
            *altered(ORDER, donor=NO_NAMES, address=["", "host"], host=["", 7]),
            *altered(ORDER, ticket=[None, EMPTY], keys=[*NO_KEYS, (b"key1",)]),
            *altered(ORDER, checksums=[None, (7,), (7, -1)], slots=[*NO_SLOTS, (0,), (1, 1)]),
            *altered(ORDER, timeout=[None, 0, -1, 3600.0, float("nan"), float("inf")]),
        ],
    ),
}


@pytest.mark.parametrize(
    ("what", "message"),
    [(what, message) for what, (_, messages) in MALFORMED.items() for message in messages],
)
def test_a_malformed_message_is_refused(what: str, message: object) -> None:
    check, _ = MALFORMED[what]
    with pytest.raises(LinkError, match=f"malformed {what}"):
        check(message)


@pytest.mark.parametrize(
    "version",
    [0, PROTOCOL_VERSION + 1, None, "1", True, 1.0, [], 10**4000],
    ids=lambda version: f"{version!r:.9}",
)
def test_an_unknown_version_is_refused_before_anything_else(version: Any) -> None:
    with pytest.raises(LinkError, match="run the same version of xinference-xavier everywhere"):
        check_request(REQUEST._replace(version=version, keys=None))


def test_more_rows_than_one_grant_may_have_are_refused_unread() -> None:
    with pytest.raises(GrantRefusedError, match="too many rows"):
        check_request(REQUEST._replace(keys=(None,) * (MAX_ROWS_PER_FETCH + 1)))


def test_a_grant_of_more_rows_than_requested_is_refused() -> None:
    with pytest.raises(LinkError, match="it has 2 rows, and 1 were asked for"):
        check_grant(GRANT, asked=1)


HOT = HotChunks(b"aaaabbbb", (3, 2), 1)


def test_the_hot_chunks_of_a_peer_arrive_one_by_one() -> None:
    assert check_hot(HOT, 4) == (HOT, [b"aaaa", b"bbbb"])


@pytest.mark.parametrize(
    "answer",
    [
        None,
        ("aaaabbbb", (3, 2), 1),
        *altered(HOT, uses=[(3,), (3, -1)], named=[-1], keys=[b"aaaabbb"]),
        HotChunks(b"a" * 4 * (MAX_HOT + 1), (1,) * (MAX_HOT + 1), 0),
    ],
    ids=["nothing", "text", "too few uses", "negative", "named", "half a key", "too many"],
)
def test_a_malformed_answer_about_hot_chunks_is_refused(answer: object) -> None:
    with pytest.raises(LinkError):
        check_hot(answer, 4)


STARTUP = Startup("id", 7, 64, 4096, "::1", (40000, 40100), TRANSPORTS, KEY.hex())


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("incarnation", [""]),
        ("region_fd", [-1]),
        ("rows", [0]),
        ("row_bytes", ["4096"]),
        ("host", [None]),
        ("port_range", [[1], [1, 99999], 7]),
        ("transports", [7, [], ["module:Class", 7]]),
        ("key", ["xyz", None]),
        ("parent", [0, "7"]),
        ("another", [1]),
    ],
)
def test_a_malformed_startup_message_is_refused(field: str, values: list[Any]) -> None:
    for value in values:
        line = json.dumps(json.loads(STARTUP.to_json()) | {field: value}).encode()
        with pytest.raises(LinkError, match="malformed start-up message"):
            Startup.from_json(line)


def test_the_startup_message_of_another_version_is_refused_with_the_remedy() -> None:
    """After an upgrade, an engine runs the old version and its next transfer process the new
    one."""
    line = json.dumps(
        json.loads(STARTUP.to_json()) | {"version": PROTOCOL_VERSION + 1, "another": 1}
    ).encode()
    with pytest.raises(LinkError, match="run the same version of xinference-xavier everywhere"):
        Startup.from_json(line)


def test_a_transfer_process_reports_its_address_or_why_it_failed() -> None:
    assert parse_started(b'{"address": "host:1", "host": "boot"}\n') == Endpoint("host:1", "boot")
    assert parse_started(b'{"address": "host:1", "host": null}\n') == Endpoint("host:1", None)
    for line, error in [
        (b'{"error": "no such host"}\n', "no such host"),
        (b"", "ended without an answer"),
        (b'{"address": 7}', "address=7"),
        (b'{"address": "host", "host": null}', "not of the form host:port"),
        (b'{"address": "host:1", "host": 7}', "host=7"),
        (b"{}", "address={}: Field required"),
        (b"[]", "Field required"),
        (b'{"address": "host:1"', "EOF while parsing"),
        (b"x" * (MAX_LINE + 1), "expected value"),
    ]:
        with pytest.raises(TransportError, match=error):
            parse_started(line)
