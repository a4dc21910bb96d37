"""What the tracker asks its replicas on behalf of an operator.

Threading: on the tracker's event loop. Every call has a deadline, and a replica that fails costs
only its own answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import xoscar as xo

from xinference_xavier.errors import ExplainError
from xinference_xavier.protocol.tracker import Member, check_explanation, check_stats
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.deadline import within
from xinference_xavier.tracker.index import ReplicaState
from xinference_xavier.tracker.namespaces import Namespace, Namespaces

logger = logging.getLogger(__name__)

STATS_DEADLINE = 1.0
FLUSH_DEADLINE = 5.0
MOVE_DEADLINE = 5.0
SELF_CHECK_DEADLINE = 20.0
EXPLAIN_DEADLINE = 60.0
"""Seconds: the first question loads the tokenizer, and long prompts take their time."""


async def flush_all(members: Sequence[Member]) -> dict[str, list[str]]:
    answers = await asyncio.gather(*map(_drop, members))
    told: dict[str, list[str]] = {"flushed": [], "unreachable": []}
    for member, flushed in zip(members, answers, strict=True):
        told["flushed" if flushed else "unreachable"].append(member.incarnation)
    return told


async def stats_of_all(members: Sequence[Member]) -> list[dict[str, Any] | None]:
    """Each one's figures as they are now; None of one that does not answer in time."""
    return await asyncio.gather(*map(_stats, members))


async def send_weights_version(members: Sequence[Member], version: str) -> dict[str, list[str]]:
    """Which of `members` moved to the namespace of weights `version`, and which did not."""
    answers = await asyncio.gather(*(_move(member, version) for member in members))
    told: dict[str, list[str]] = {"joined": [], "not_reset": [], "unreachable": []}
    for member, answer in zip(members, answers, strict=True):
        told[answer].append(member.incarnation)
    return told


async def explain_at(
    groups: Iterable[Sequence[Member]], question: dict[str, Any]
) -> dict[str, Any]:
    """One member of each group, which is a namespace, answers for all of it.

        {"prompt_tokens": …, "chunk_tokens": …,
         "chunks": [{"from": token, "to": token, "replicas": {incarnation: "pool" or "none"}}, …],
         "reuse": {incarnation: {"local_pool": tokens, "remote": tokens, "computed": tokens}}}

    Where namespaces cut a prompt differently, `chunks` is of the first that answered.

    Raises:
        ExplainError: with a reason, if none can answer.
    """
    answers = await asyncio.gather(*(_explain(members, question) for members in groups))
    good = [answer for answer in answers if isinstance(answer, dict)]
    if not good:
        reasons = [answer for answer in answers if isinstance(answer, str)]
        raise ExplainError(reasons[0] if reasons else "no replica has joined yet")
    whole, *others = good
    for other in others:
        whole["reuse"] |= other["reuse"]
        if other["chunk_tokens"] == whole["chunk_tokens"]:
            for chunk, same in zip(whole["chunks"], other["chunks"], strict=False):
                chunk["replicas"] |= same["replicas"]
    return whole


async def self_check_all(members: Sequence[Member]) -> dict[str, dict[str, Any]]:
    """What each replica finds out about itself and its way to its peers; `error` if it does not."""
    answers = await asyncio.gather(*map(_self_check, members))
    return {member.incarnation: answer for member, answer in zip(members, answers, strict=True)}


async def _stats(member: Member) -> dict[str, Any] | None:
    try:
        stats: dict[str, Any] = await within(STATS_DEADLINE, _call(member, "stats"))
        check_stats(stats)
        return stats
    except Exception as error:
        logger.debug("replica %s reports no figures: %r", member.incarnation, error)
        return None


async def _move(member: Member, version: str) -> str:
    try:
        joined = await within(MOVE_DEADLINE, _call(member, "set_weights_version", version))
    except Exception as error:
        logger.warning("replica %s was not told its weights: %r", member.incarnation, error)
        return "unreachable"
    return "joined" if joined else "not_reset"


async def _self_check(member: Member) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = await within(SELF_CHECK_DEADLINE, _call(member, "self_check"))
        check_stats(answer)
        return answer
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


async def _drop(member: Member) -> bool:
    try:
        await within(FLUSH_DEADLINE, _call(member, "flush"))
    except Exception as error:
        logger.warning("replica %s did not flush its pool: %r", member.incarnation, error)
        return False
    return True


async def _explain(members: Sequence[Member], question: dict[str, Any]) -> dict[str, Any] | str:
    """The first answer, or why there is none."""
    reason = "no replica has joined yet"
    for member in members:
        try:
            answer: dict[str, Any] = await within(
                EXPLAIN_DEADLINE, _call(member, "explain", question)
            )
            check_explanation(answer)
            return answer
        except ExplainError as error:
            return error.reason  # the others would say the same
        except Exception as error:
            logger.warning("replica %s explains nothing: %r", member.incarnation, error)
            reason = f"replica {member.incarnation} does not answer ({type(error).__name__})"
    return reason


async def _call(member: Member, method: str, *args: object) -> Any:
    ref = await xo.actor_ref(address=member.address, uid=replica_uid(member.incarnation))
    return await getattr(ref, method)(*args)


async def namespaces_status(
    namespaces: Namespaces, name_of: Callable[[str], str], now: float
) -> dict[str, dict[str, Any]]:
    """JSON-able, by namespace. `stale` marks figures of the last heartbeat, of a replica that did
    not answer in time."""
    present = dict(namespaces.items())
    described = await asyncio.gather(
        *(_describe(known, name_of, now) for known in present.values())
    )
    return dict(zip(present, described, strict=True))


async def _describe(known: Namespace, name_of: Callable[[str], str], now: float) -> dict[str, Any]:
    replicas = known.index.replicas(now)
    keys, revision = known.index.distinct_keys(), known.index.revision
    answers = await stats_of_all([state.member for state in replicas])
    described = [
        _describe_replica(
            state,
            name_of(state.member.incarnation),
            {**known.stats.get(state.member.incarnation, {}), "stale": True}
            if stats is None
            else stats,
        )
        for state, stats in zip(replicas, answers, strict=True)
    ]
    return {"revision": revision, "keys": keys, "replicas": described}


def _describe_replica(state: ReplicaState, name: str, stats: dict[str, Any]) -> dict[str, Any]:
    return {
        "incarnation": state.member.incarnation,
        "address": state.member.address,
        "replica": name,
        "holdings": state.holdings,
        "sequence": state.sequence,
        "lease_left_s": round(state.lease_left, 3),
        "stats": stats,
    }
