"""Calls to all replicas of a model at once, on behalf of an operator.

Threading: on the tracker's event loop. Every call has a deadline, and a replica that fails costs
only its own answer.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from xinference_xavier.errors import ExplainError
from xinference_xavier.limits import CALL_DEADLINE
from xinference_xavier.protocol.load import Drain
from xinference_xavier.protocol.prefixes import Kept
from xinference_xavier.protocol.tracker import Member, check_stats
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import ask
from xinference_xavier.tracker.journal import Lease
from xinference_xavier.tracker.namespaces import Namespace, Namespaces

logger = logging.getLogger(__name__)

STATS_DEADLINE = 1.0
SELF_CHECK_DEADLINE = 20.0
DRAIN_DEADLINE = 1.0
EXPLAIN_DEADLINE = 60.0
"""Seconds: the first question loads the tokenizer, and long prompts take their time."""
_STATS = {"stats", "self_check"}
"""Calls whose answers become part of all replicas' JSON."""
_ASKED_OFTEN = {"stats", "drain", "keep"}


async def flush_all(members: Sequence[Member]) -> dict[str, list[str]]:
    """Make the replicas drop what they hold. Returns incarnations as "flushed" or "unreachable"."""
    outcomes: dict[str, list[str]] = {"flushed": [], "unreachable": []}
    for incarnation, answer in (await _call_all(members, "flush", CALL_DEADLINE)).items():
        outcomes["unreachable" if isinstance(answer, Exception) else "flushed"].append(incarnation)
    return outcomes


async def set_weights_version(members: Sequence[Member], version: str) -> dict[str, list[str]]:
    """Tell the replicas which version their weights are. Returns incarnations as

    - "joined": reset since the last version; they share with one another from now on,
    - "not_reset": they still hold what the old weights computed,
    - "unreachable": they did not answer.
    """
    outcomes: dict[str, list[str]] = {"joined": [], "not_reset": [], "unreachable": []}
    answers = await _call_all(members, "set_weights_version", CALL_DEADLINE, version)
    for incarnation, joined in answers.items():
        outcome = "joined" if joined else "not_reset"
        outcomes["unreachable" if isinstance(joined, Exception) else outcome].append(incarnation)
    return outcomes


async def self_check_all(members: Sequence[Member]) -> dict[str, dict[str, Any]]:
    """What each replica finds out about itself and its links to peers; `error` if it fails to."""
    answers = await _call_all(members, "self_check", SELF_CHECK_DEADLINE)
    return {
        incarnation: {"error": str(answer) or type(answer).__name__}
        if isinstance(answer, Exception)
        else answer
        for incarnation, answer in answers.items()
    }


async def keep(member: Member, changes: Mapping[str, bool | None] | None) -> Kept:
    """See `KeptPrefixes.keep`. Raises what the replica raises, TimeoutError."""
    kept: Kept = await _call(member, "keep", CALL_DEADLINE, changes)
    return kept


async def drain(members: Sequence[Member], stay: Sequence[str], seconds: float) -> Drain:
    """Have the engines of a replica drain for at most `seconds`; how far they are, as far as they
    answer. What only they hold goes to the peers that `stay`."""
    asked = await _call_all(members, "drain", DRAIN_DEADLINE, stay, seconds)
    answers = [each for each in asked.values() if isinstance(each, Drain)]
    return Drain(
        seconds,
        sum(each.requests for each in answers),
        any(each.handing_over for each in answers),
        sum(each.chunks for each in answers),
    )


async def explain(namespaces: Namespaces, packed: bytes) -> dict[str, Any]:
    """Locates the chunks of a packed question. One member answers for its whole namespace.

        {"prompt_tokens": …, "context_tokens": …, "chunk_tokens": …,
         "chunks": [{"from": token, "to": token, "replicas": {incarnation: place}}, …]}

    A place is "pool", "none" or, for the member that answers, "disk". If namespaces cut a prompt
    into different chunks, `chunks` are those of the first that answered. Raises ExplainError if no
    replica can answer.
    """
    answers = await asyncio.gather(
        *(
            _explain(namespace.journal.leases.values(), packed)
            for _, namespace in namespaces.items()
        )
    )
    good = [answer for answer in answers if isinstance(answer, dict)]
    if not good:
        reasons = [answer for answer in answers if isinstance(answer, str)]
        raise ExplainError(reasons[0] if reasons else "no replica has joined yet")
    merged, *others = good
    for other in others:
        if other["chunk_tokens"] == merged["chunk_tokens"]:
            for chunk, same in zip(merged["chunks"], other["chunks"], strict=False):
                chunk["replicas"] |= same["replicas"]
    return merged


async def _explain(leases: Iterable[Lease], packed: bytes) -> dict[str, Any] | str:
    """A member's answer, or the reason why none answered. The member heard from last is asked
    first: one that hangs would take the whole deadline."""
    reason = "no replica has joined yet"
    for lease in sorted(leases, key=attrgetter("expires"), reverse=True):
        member = lease.member
        try:
            answer: dict[str, Any] = await _call(member, "explain", EXPLAIN_DEADLINE, packed)
        except ExplainError as error:
            return error.reason  # the others would say the same
        except Exception as error:
            reason = f"replica {member.incarnation} does not answer ({type(error).__name__})"
        else:
            return answer
    return reason


async def namespaces_status(
    namespaces: Namespaces, name_of: Callable[[str], str], draining: Collection[str]
) -> dict[str, dict[str, Any]]:
    """JSON-able, by namespace. `draining` are incarnations. Stats with `stale` are those of the
    last heartbeat, from a replica that did not answer in time."""
    current = dict(namespaces.items())
    statuses = await asyncio.gather(
        *(_status(each, name_of, draining) for each in current.values())
    )
    return dict(zip(current, statuses, strict=True))


async def _status(
    namespace: Namespace, name_of: Callable[[str], str], draining: Collection[str]
) -> dict[str, Any]:
    journal = namespace.journal
    replicas: list[dict[str, Any]] = [
        {
            "incarnation": lease.member.incarnation,
            "address": lease.member.address,
            "serves": lease.member.serves,
            "verdict": lease.member.comparison.verdict.value,
            "verdict_reason": lease.member.comparison.reason,
            "replica": name_of(lease.member.incarnation),
            "draining": lease.member.incarnation in draining,
            "holdings": len(lease.keys),
            "sequence": lease.sequence,
        }
        for lease in journal.leases.values()
    ]
    answers = await _call_all(journal.members(), "stats", STATS_DEADLINE)
    for replica in replicas:
        incarnation = replica["incarnation"]
        stats = answers[incarnation]
        if isinstance(stats, Exception):
            stats = {**namespace.stats.get(incarnation, {}), "stale": True}
        replica["stats"] = stats
    return {"replicas": replicas}


async def _call_all(
    members: Sequence[Member], method: str, deadline: float, *args: object
) -> dict[str, Any]:
    """Answers by incarnation; an exception in place of a missing one, or of one that is no JSON."""
    calls = (_call(member, method, deadline, *args) for member in members)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    return {member.incarnation: answer for member, answer in zip(members, answers, strict=True)}


async def _call(member: Member, method: str, deadline: float, *args: object) -> Any:
    """Raises what the replica raises, ValueError for stats that are no JSON, TimeoutError."""
    incarnation = member.incarnation
    try:
        answer = await ask(deadline, member.address, replica_uid(incarnation), method, *args)
        if method in _STATS:
            check_stats(answer)
    except ExplainError:
        raise  # an answer as well
    except Exception as error:
        # An open status page asks for stats every second, the keeper, too; a removal four times.
        level = logging.DEBUG if method in _ASKED_OFTEN else logging.WARNING
        text = "call to replica failed: method=%s incarnation=%s error=%r"
        logger.log(level, text, method, incarnation, error)
        raise
    return answer
