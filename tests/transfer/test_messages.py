"""What engines and transfer processes say to each other, and what of it can be believed."""

from __future__ import annotations

import pickle

import pytest

from xinference_xavier.errors import LinkError
from xinference_xavier.transfer.messages import PROTOCOL_VERSION, Startup, Ticket, check_version

KEY = b"k" * 32
TICKET = Ticket.sign(KEY, "consumer", [4, 2], expires=100.25)


def test_a_ticket_is_good_for_whom_and_what_it_was_signed_until_it_expires() -> None:
    arrived: Ticket = pickle.loads(pickle.dumps(TICKET))
    assert arrived.is_valid(KEY, now=0)
    assert arrived.is_valid(KEY, now=100.2)
    assert not arrived.is_valid(KEY, now=100.25)


@pytest.mark.parametrize(
    "forged",
    [
        TICKET._replace(consumer="another"),
        TICKET._replace(slots=(4, 3)),
        TICKET._replace(slots=(4, 2, 3)),
        TICKET._replace(slots=(2, 4)),
        TICKET._replace(slots=()),
        TICKET._replace(expires=1e9),
        TICKET._replace(signature=b"\0" * 32),
        TICKET._replace(signature=b""),
    ],
)
def test_an_altered_ticket_is_worthless(forged: Ticket) -> None:
    assert not forged.is_valid(KEY, now=0)


def test_a_ticket_of_another_engine_is_worthless() -> None:
    assert not TICKET.is_valid(b"x" * 32, now=0)


@pytest.mark.parametrize("port_range", [None, (40000, 40100)])
def test_a_startup_message_arrives_as_it_was(port_range: tuple[int, int] | None) -> None:
    startup = Startup("id", 7, 64, 4096, "::1", port_range, "module:Class", KEY.hex())
    line = startup.to_json()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert Startup.from_json(line) == startup


def test_another_protocol_version_is_refused_with_the_remedy() -> None:
    check_version(PROTOCOL_VERSION)
    with pytest.raises(LinkError, match="run the same version of xinference-xavier everywhere"):
        check_version(PROTOCOL_VERSION + 1)
