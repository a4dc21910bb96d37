"""What a replica reports to routers about its load, and how a router marks an offloaded prefill.

Reports travel through the tracker. The mark travels in the request's id, the only field that every
version of xinference passes to vLLM unchanged. Clients choose ids, too. So the router signs the
mark with a key that the decode replica makes and that only routers receive (`Serving.mark_key`).
"""

import hmac
import re
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from xinference_xavier.limits import LONGEST
from xinference_xavier.options import DEFAULT_DRAIN, Role, Routing
from xinference_xavier.protocol.tracker import SHORT_KEY, Update, check_packed, checked, checker
from xinference_xavier.runtime.validate import MAX_IDENTIFIER, Count, Identifier

MAX_KNOWN = 4096  # requests of one report
MAX_REPORTS = 100  # of prompts in one report, and as many of answers
MAX_NEAR = 64  # neighbours
MAX_PROMPT_KEYS = 1 << 16
"""Most keys of one prompt. A tracker remembers thousands of prompts."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def reported_id(request: str) -> str:
    """The name that a replica and a router use for a request: clients choose ids of any length."""
    return request[:MAX_IDENTIFIER]


class Serving(NamedTuple):
    """How the replica was launched. A chunk is one of the KV-cache group whose keys the replica
    reports."""

    chunk_tokens: Annotated[int, Field(ge=1, le=1 << 30)]
    chunk_bytes: Count
    """Bytes of one chunk in all groups."""
    request_limit: Count | None = None
    routing: Routing = "auto"
    queue: Count = 0
    """Requests that may wait for any of the model's replicas."""
    role: Role = "any"
    mark_key: Annotated[str, Field(max_length=64)] = ""
    """The key with which routers sign the mark in a request's id."""
    drain: Seconds = DEFAULT_DRAIN
    """How long the replica may drain before it is removed."""
    slots: Count | None = None
    """Requests that vLLM runs at once (`max_num_seqs`)."""


class Load(NamedTuple):
    """A replica's load now."""

    serving: Serving
    prefill_tokens: Count
    """Prompt tokens still to compute, of requests that wait or run."""
    prefill_s: Seconds | None
    """The same in seconds; None before the first measurement."""
    requests: Count
    """Waiting and running requests."""
    decoding: Count = 0
    """The requests whose prompts have been computed."""
    known: Annotated[tuple[Identifier, ...], Field(max_length=MAX_KNOWN)] = ()
    """The ids of those whose tokens are counted here. vLLM has not looked at the others yet."""
    rates: tuple[Seconds, Seconds, Seconds, Seconds] | None = None
    """The fields of `routing.replica.Rates`."""
    step: tuple[Seconds, Seconds] | None = None
    """Seconds in which each answer gets a token, in a step that only decodes: without requests, and
    for each running one. None before the first measurement."""
    free_tokens: Count | None = None
    """Tokens for which there are free KV blocks; None if unknown."""
    kv_tokens: Count | None = None
    """Tokens for which there are KV blocks in all; None if unknown."""
    retention_s: Seconds = 0.0
    """How long the engine's own prefix cache keeps what it holds."""
    near: Annotated[tuple[Identifier, ...], Field(max_length=MAX_NEAR)] = ()
    """The incarnations whose chunks it loads in place: they cost it what its own do."""


class Drain(NamedTuple):
    """How far a replica is that drains."""

    seconds: Seconds = 0.0
    """How long it may take; 0 if it does not drain."""
    requests: Count = 0
    """Still waiting or running."""
    handing_over: bool = False
    """Peers still fetch what only it holds."""
    chunks: Count = 0
    """What they have fetched of that."""


class RequestReport(NamedTuple):
    """What a replica reports of a request: its prompt when it is first scheduled, and its answer
    when that has ended. The second report has neither tokens nor keys."""

    request: Identifier
    tokens: Count
    """Tokens of the prompt."""
    keys: Annotated[bytes, Field(max_length=MAX_PROMPT_KEYS * SHORT_KEY)]
    """The packed short keys of the prompt's first chunks."""
    answer: Count | None = None
    """Tokens of its answer, once it has ended."""


class ReplicaLoad(NamedTuple):
    incarnation: Identifier
    replica: Identifier
    """xinference's name for it."""
    age: Seconds
    """Seconds since the tracker received it."""
    load: Load
    draining: bool = False
    """It ends the requests that it has, and gets no more."""


class Observation(NamedTuple):
    """What changed for a router since its last one.

    `update` is of the index of the namespace with the most members; None while there is no member.
    With `complete`, the `loads` are those of all replicas; without, `gone` are incarnations that
    left.
    """

    update: Update | None
    version: Count
    complete: bool
    loads: Annotated[tuple[ReplicaLoad, ...], Field(fail_fast=True)]
    gone: Annotated[tuple[Identifier, ...], Field(fail_fast=True)] = ()
    requests: Annotated[tuple[RequestReport, ...], Field(fail_fast=True)] = ()


_REQUESTS = TypeAdapter(
    Annotated[tuple[RequestReport, ...], Field(max_length=2 * MAX_REPORTS, fail_fast=True)]
)
_OBSERVATION = TypeAdapter(Observation)


check_load = checker(Load, "load")


def check_requests(requests: object) -> tuple[RequestReport, ...]:
    good = checked(_REQUESTS, "requests", requests)
    for report in good:
        check_packed("keys", report.keys)
    return good


def check_observation(observation: object) -> Observation:
    """Check all but the update, which the index checks."""
    good = checked(_OBSERVATION, "observation", observation)
    for report in good.requests:
        check_packed("keys", report.keys)
    return good


_PREFILL = ":prefill"
_MARK = re.compile(_PREFILL + r":([^:]{1,256}):(\d{1,6}):(\d{1,6}):([0-9a-f]{32})", re.ASCII)


class Elsewhere(NamedTuple):
    """`replica` is the incarnation of the one that prefills. It begins after about `queue` seconds,
    and takes about `seconds`."""

    replica: str
    queue: float
    seconds: float


def with_mark(request: str, elsewhere: Elsewhere, key: str) -> str:
    """The id with the mark, signed with the `key` of the replica that decodes."""
    queue, seconds = (min(each, LONGEST) * 1000 for each in elsewhere[1:])
    mark = f"{elsewhere.replica}:{queue:.0f}:{seconds:.0f}"
    return f"{request}{_PREFILL}:{mark}:{_signature(mark, key)}"


def prefill_id(request: str) -> str:
    """The id of the request that a prefill replica computes for another one's `request`."""
    return f"{request}{_PREFILL}"


def is_prefill(request: str) -> bool:
    return request.endswith(_PREFILL)


def mark_of(request: str, key: str) -> Elsewhere | None:
    """`request` is an id, to which vLLM may have added something. None unless its mark is signed
    with `key`."""
    match = _MARK.search(request)
    if match is None:
        return None
    replica, queue, seconds, signature = match.groups()
    if not hmac.compare_digest(signature, _signature(f"{replica}:{queue}:{seconds}", key)):
        return None
    return Elsewhere(replica, int(queue) / 1000, int(seconds) / 1000)


def _signature(mark: str, key: str) -> str:
    return hmac.digest(key.encode(), mark.encode(), "sha256").hex()[:32]
