"""What a peer says of its hot chunks is checked."""

from __future__ import annotations

import pytest

from xinference_xavier.errors import LinkError
from xinference_xavier.protocol.transfer import MAX_HOT, HotChunks, check_hot

GOOD = HotChunks(b"aaaabbbb", (3, 2), 1)


def test_an_answer() -> None:
    assert check_hot(GOOD, 4) == (GOOD, [b"aaaa", b"bbbb"])


@pytest.mark.parametrize(
    "answer",
    [
        None,
        ("aaaabbbb", (3, 2), 1),
        GOOD._replace(uses=(3,)),
        GOOD._replace(uses=(3, -1)),
        GOOD._replace(named=-1),
        GOOD._replace(keys=b"aaaabbb"),
        HotChunks(b"a" * 4 * (MAX_HOT + 1), (1,) * (MAX_HOT + 1), 0),
    ],
    ids=["nothing", "text", "too few uses", "negative", "named", "half a key", "too many"],
)
def test_a_peer_cannot_claim_nonsense(answer: object) -> None:
    with pytest.raises(LinkError):
        check_hot(answer, 4)
