"""What a tracker asks of replicas for named prefixes, and what they answer.

The engine knows the request that computes a prefix by its id. So the replica keeps exactly the
chunks that the model makes of the text, whatever its chat template. The id of a request whose own
prompt is to be kept says so, too. A client could write such an id, and would get what it may ask
for with `prompt_cache_retention`.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from xinference_xavier.protocol.tracker import checked, checker
from xinference_xavier.runtime.validate import Count

MAX_PREFIXES = 10_000
"""Most prefixes of a model."""
PrefixId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
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

    tokens: Count
    chunks: Count
    held: Count
    firm: bool


class Kept(NamedTuple):
    """What one replica keeps. Of its `pool_chunks`, it may keep `budget_chunks` firmly."""

    prefixes: dict[PrefixId, KeptPrefix]
    pool_chunks: Count
    budget_chunks: Count
    firm_chunks: Count


_WANTED = TypeAdapter(
    Annotated[dict[PrefixId, Annotated[bool, Field(strict=True)]], Field(max_length=MAX_PREFIXES)]
)
check_kept = checker(Kept, "kept prefixes")


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


def check_wanted(wanted: object) -> Mapping[str, bool]:
    """The prefixes to keep, and whether firmly. Raises ValueError."""
    return checked(_WANTED, "prefixes", wanted)
