"""What a tracker asks of replicas for named prefixes, and what they answer.

The engine knows the request that computes a prefix by its id. So the replica keeps exactly the
chunks that the model makes of the text, whatever its chat template. The id of a request whose own
prompt is to be kept says so, too. A client could write such an id, and would get what it may ask
for with `prompt_cache_retention`.
"""

import math
import re
from typing import NamedTuple

MAX_PREFIXES = 10_000
"""Most prefixes of a model."""
_REQUEST = "xavier-prefix-"
_REQUEST_ID = re.compile(re.escape(_REQUEST) + r"([0-9a-f]{16})(-\d+)?")
_KEEPING = "xavier-keep-"
_KEEPING_ID = re.compile(re.escape(_KEEPING) + r"(\d{1,5})-(\d{1,4})-", re.ASCII)


class Keeping(NamedTuple):
    """A request asks to keep the leading `share` of its prompt, for `seconds` after its last
    use."""

    seconds: float
    share: float


class KeptPrefix(NamedTuple):
    """A prefix at one replica: `held` of its `chunks` are in the pool. They are not evicted if it
    is `firm`."""

    tokens: int
    chunks: int
    held: int
    firm: bool


class Kept(NamedTuple):
    """What one replica keeps. Of its `pool_chunks`, it may keep `budget_chunks` firmly."""

    prefixes: dict[str, KeptPrefix]
    pool_chunks: int
    budget_chunks: int
    firm_chunks: int


def request_id(prefix: str, number: int) -> str:
    """The id of the `number`-th request that computes the prefix."""
    return f"{_REQUEST}{prefix}-{number}"


def prefix_of(request_id: str) -> str | None:
    """The prefix that a request computes; None for other requests."""
    match = _REQUEST_ID.fullmatch(request_id)
    return match[1] if match else None


def with_keeping(request: str, keeping: Keeping) -> str:
    """The id of a request that asks for it. In front, because long ids are cut."""
    return f"{_KEEPING}{keeping.seconds:.0f}-{math.ceil(keeping.share * 1000)}-{request}"


def keeping_of(request_id: str) -> Keeping | None:
    match = _KEEPING_ID.match(request_id)
    if match is None:
        return None
    return Keeping(float(match[1]), min(1.0, int(match[2]) / 1000))
