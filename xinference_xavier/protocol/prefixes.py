"""Named prefixes between processes: what clients say of them, what a tracker asks of replicas for
them, and what these answer.

The engine knows the request that computes a prefix by its id. So the replica keeps exactly the
chunks that the model makes of the text, whatever its chat template. The id of a request whose own
prompt is to be kept says so, too. A client could write such an id, and would get what it may ask
for with `prompt_cache_retention`.
"""

import math
import re
from typing import Literal, NamedTuple

MAX_PREFIXES = 1000
"""Most prefixes of a model. Each second the keeper looks through all: so many, at 16 replicas each,
take 16 ms of the tracker's loop."""
QUESTION = ("prompt", "messages", "tools")
"""The fields of a content that make its tokens."""
Retention = Literal["soft", "hard"]
Copies = Literal[1, "all"]
DEFAULT_TTL = 3600.0
LORA = "lora_name"
"""The field of a request, and of a content, that names an adapter. Its rows are the adapter's."""
_REQUEST = "xavier-prefix-"
_REQUEST_ID = re.compile(re.escape(_REQUEST) + r"([0-9a-f]{16})(-\d+)?")
_KEEPING = "xavier-keep-"
_KEEPING_ID = re.compile(re.escape(_KEEPING) + r"(\d{1,5})-(\d{1,4})-", re.ASCII)


class Terms(NamedTuple):
    """How a prefix is kept: each use begins its lifetime of `ttl` seconds anew. Soft ones may be
    evicted after everything else."""

    ttl: float = DEFAULT_TTL
    copies: Copies = 1
    retention: Retention = "soft"


class NewPrefix(NamedTuple):
    """`tenant` is the `cache_salt` of its requests, or empty. `content` is JSON: a prompt, or
    messages and perhaps tools; and perhaps an adapter's name."""

    tenant: str
    name: str
    content: str
    terms: Terms = Terms()


class Keeping(NamedTuple):
    """A request asks to keep the leading `share` of its prompt, for `seconds` after its last
    use."""

    seconds: float
    share: float


class KeptPrefix(NamedTuple):
    """A prefix at one replica: `held` of its `chunks` are in the pool. They are not evicted if it
    is `firm`. Without chunks, the replica has not computed it."""

    tokens: int = 0
    chunks: int = 0
    held: int = 0
    firm: bool = False


class Kept(NamedTuple):
    """What has changed of what one replica keeps. It keeps `firm_chunks` firmly, and may keep
    `budget_chunks`."""

    prefixes: dict[str, KeptPrefix]
    budget_chunks: int
    firm_chunks: int


def request_id(prefix: str, number: int) -> str:
    """The id of a request that computes the prefix; each has another `number`."""
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
