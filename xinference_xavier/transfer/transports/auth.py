"""Proof that a peer knows the model's secret.

A proof is an HMAC-SHA256 over the sender's role and the messages so far. The role keeps a peer from
sending our own proof back to us.
"""

import hmac

from xinference_xavier.errors import LinkError

PROOF_BYTES = 32


def prove(secret: bytes, role: str, transcript: bytes) -> bytes:
    return hmac.digest(secret, role.encode() + transcript, "sha256")


def verify(secret: bytes, role: str, transcript: bytes, proof: bytes) -> None:
    """Raises LinkError."""
    if not hmac.compare_digest(proof, prove(secret, role, transcript)):
        raise LinkError("the peer does not know this model's secret")


def seal(secret: bytes, role: str, message: bytes) -> bytes:
    return prove(secret, role, message) + message


def unseal(secret: bytes, role: str, sealed: object, most: int) -> bytes:
    """The message in `sealed`, which has at most `most` bytes. Raises LinkError if it is malformed,
    or not from a replica of this model."""
    if type(sealed) is not bytes or not PROOF_BYTES < len(sealed) <= most:
        raise LinkError(f"malformed {role}: it is not {PROOF_BYTES + 1} to {most} bytes")
    proof, message = sealed[:PROOF_BYTES], sealed[PROOF_BYTES:]
    verify(secret, role, message, proof)
    return message
