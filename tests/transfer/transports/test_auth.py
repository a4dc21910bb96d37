"""Only a peer that knows the model's secret is authentic, and only in its own role."""

from __future__ import annotations

from typing import Any

import pytest

from xinference_xavier.errors import LinkError
from xinference_xavier.transfer.transports.base import PROOF_BYTES, prove, seal, unseal, verify

SECRET = b"s" * 32
MOST = 100


def test_a_proof_is_valid_only_for_its_secret_role_and_transcript() -> None:
    proof = prove(SECRET, "donor", b"transcript")
    assert len(proof) == PROOF_BYTES
    verify(SECRET, "donor", b"transcript", proof)
    for secret, role, transcript, given in (
        (b"t" * 32, "donor", b"transcript", proof),
        (SECRET, "consumer", b"transcript", proof),
        (SECRET, "donor", b"another", proof),
        (SECRET, "donor", b"transcript", proof[:-1]),
        (SECRET, "donor", b"transcript", b""),
    ):
        with pytest.raises(LinkError, match="does not know this model's secret"):
            verify(secret, role, transcript, given)


def test_a_sealed_message_arrives_unchanged_or_is_refused() -> None:
    sealed = seal(SECRET, "hello", b"message")
    assert unseal(SECRET, "hello", sealed, MOST) == b"message"
    for altered in (sealed[:-1], sealed + b"x", b"x" + sealed[1:]):
        with pytest.raises(LinkError, match="does not know this model's secret"):
            unseal(SECRET, "hello", altered, MOST)


@pytest.mark.parametrize("sealed", [None, 7, "x" * 48, b"", b"x" * PROOF_BYTES, b"x" * (MOST + 1)])
def test_a_malformed_sealed_message_is_refused_before_it_is_hashed(sealed: Any) -> None:
    with pytest.raises(LinkError, match=f"malformed hello: it is not 33 to {MOST} bytes"):
        unseal(SECRET, "hello", sealed, MOST)
