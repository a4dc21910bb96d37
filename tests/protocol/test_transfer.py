"""Messages between engines and transfer processes, and what a receiver checks of them."""

import json
from typing import Any

import pytest

from xinference_xavier.errors import LinkError, TransportError
from xinference_xavier.protocol.transfer import (
    PROTOCOL_VERSION,
    Endpoint,
    Grant,
    GrantRequest,
    Startup,
    check_grant,
    check_slots,
    prove,
)

OTHER_VERSION = "run the same version of xinference-xavier everywhere"


@pytest.mark.parametrize("port_range", [None, (40000, 40100)])
def test_a_startup_message_arrives_as_it_was(port_range: tuple[int, int] | None) -> None:
    transports = ("module:Class", "another:Class")
    startup = Startup("id", 7, 64, 4096, "::1", port_range, transports, parent=77)
    line = startup.to_json()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert Startup.from_json(line) == startup


def test_the_startup_message_of_another_version_is_refused_with_the_remedy() -> None:
    """After an upgrade, an engine runs the old version and its next transfer process the new
    one."""
    line = json.dumps({"version": PROTOCOL_VERSION + 1, "another": 1}).encode()
    with pytest.raises(LinkError, match=OTHER_VERSION):
        Startup.from_json(line)


def test_a_transfer_process_reports_where_it_is_or_why_it_failed() -> None:
    endpoint = Endpoint("host:1")
    assert Endpoint.from_json(endpoint.to_json()) == endpoint
    for line, error in [
        (b'{"error": "no such host"}\n', "no such host"),
        (b"", "ended without an answer"),
    ]:
        with pytest.raises(TransportError, match=error):
            Endpoint.from_json(line)


REQUEST = GrantRequest(PROTOCOL_VERSION, "namespace", "consumer", 1, (b"key1", b"key2"), False)
GRANT = Grant((4, 2), (7, 8), 100.25, Endpoint("host:1"), False, 3)


@pytest.mark.parametrize(
    ("changes", "asked"), [({}, 1), ({"slots": (4,)}, 2), ({"checksums": (7, 8, 9)}, 3)]
)
def test_a_grant_has_one_checksum_for_each_slot_and_no_more_than_were_asked_for(
    changes: dict[str, Any], asked: int
) -> None:
    check_grant(GRANT, 2)
    with pytest.raises(LinkError, match=f"malformed grant: {asked} rows were asked for"):
        check_grant(GRANT._replace(**changes), asked)


def test_slots_are_those_of_the_pool() -> None:
    for good in ((), (0, 4)):
        check_slots(good, 5)
    for wrong in ((0, 5), (-1, 4)):
        with pytest.raises(LinkError, match="the donor's pool has 5"):
            check_slots(wrong, 5)


def test_a_proof_is_valid_only_for_its_secret_and_link() -> None:
    proofs = {prove(secret, link) for secret in (b"one", b"other") for link in ("1", "2")}
    assert len(proofs) == 4
