"""A constant stream of requests, and their outcomes.

A conversation puts the questions about one document to one replica after the other, so that the
second can fetch what the first computed. Many conversations have a salt of their own, which changes
keys but no answer, so that they begin cold. Each request goes directly to a replica's actor, so
that a failure can be attributed to its replica; kinds of faults of the API ask over REST.
"""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from examples.local_cluster import Completion
from tests.chaos.engines_fleet import Fleet, Replica
from tests.chaos.engines_questions import Expected, Question, generation
from xinference_xavier.runtime.aio import within

CONVERSATIONS = 4
SALTED = 0.6
"""The share of conversations that begin cold."""
REQUEST_TIMEOUT = 150.0
_NOBODY = 0.1
_PUBLISHING = 0.5
"""Seconds until peers know what was computed."""


class Failure(NamedTuple):
    replica: Replica
    began: float
    ended: float
    error: str

    @property
    def is_explained(self) -> bool:
        """Whether the replica was killed during the request, or before without being noticed."""
        return self.replica.was_absent(self.began, self.ended)


class Traffic:
    """Belongs to one event loop; other threads read its figures and `pause` it."""

    def __init__(self, fleet: Fleet, expected: Mapping[Question, Expected], seed: int) -> None:
        self._fleet = fleet
        self._expected = expected
        self._seed = seed
        self._by_document: dict[int, list[Question]] = {}
        for question in expected:
            self._by_document.setdefault(question.document, []).append(question)
        self._paused = False
        self.answered = 0
        self.aborted = 0
        self.wrong: list[str] = []
        self.failures: list[Failure] = []

    def pause(self) -> None:
        self._paused = True

    @property
    def in_flight(self) -> int:
        return sum(replica.in_flight for replica in list(self._fleet.replicas.values()))

    async def converse(self, number: int) -> None:
        """Hold conversations, for ever."""
        source = random.Random(f"{self._seed}/{number}")
        last: Replica | None = None
        while True:
            asked = self._by_document[source.choice(list(self._by_document))]
            salt = uuid.uuid4().hex if source.random() < SALTED else None
            for question in source.sample(asked, len(asked)):
                last = await self._another(last, source)
                await self.ask(last, question, salt)

    async def _another(self, last: Replica | None, source: random.Random) -> Replica:
        while True:
            up = [] if self._paused else self._fleet.up()
            if up:
                return source.choice([replica for replica in up if replica is not last] or up)
            await asyncio.sleep(_NOBODY)

    async def ask(self, replica: Replica, question: Question, salt: str | None) -> None:
        """Send one request and compare its answer with the expected one."""
        began = time.monotonic()
        replica.in_flight += 1
        try:
            answer = await within(
                REQUEST_TIMEOUT, replica.model.generate(question.text, _configuration(salt))
            )
            self.compare(
                question, Completion.from_json(json.loads(answer), 0.0), replica.incarnation
            )
        except Exception as error:
            self.failures.append(Failure(replica, began, time.monotonic(), repr(error)))
        finally:
            replica.in_flight -= 1

    async def share(self, donor: Replica, consumer: Replica, question: Question) -> None:
        """Have `consumer` fetch what `donor` computes, if all is well."""
        salt = uuid.uuid4().hex
        await self.ask(donor, question, salt)
        await asyncio.sleep(_PUBLISHING)
        await self.ask(consumer, question, salt)

    def compare(self, question: Question, answer: Completion, by: str) -> None:
        self.answered += 1
        expected = self._expected[question]
        if not expected.matches(answer):
            self.wrong.append(
                f"{by} answered {answer.tokens} {answer.logprobs} with "
                f"{answer.cached_tokens} cached tokens, expected {expected}"
            )

    # -- requests that are aborted -----------------------------------------------------------

    async def ask_and_abort(
        self, replica: Replica, question: Question, salt: str | None, after: float
    ) -> bool:
        """Abort a streaming request `after` seconds; return whether that was before its first
        token."""
        request_id = f"aborted-{uuid.uuid4().hex}"
        replica.in_flight += 1
        try:
            stream = await within(
                REQUEST_TIMEOUT,
                replica.model.generate(
                    question.text, _configuration(salt, stream=True), request_id=request_id
                ),
            )
            first = asyncio.ensure_future(anext(stream, None))
            await asyncio.wait({first}, timeout=after)
            began_to_answer = first.done()
            await within(REQUEST_TIMEOUT, replica.model.abort_request(request_id, 1))
            chunk = await within(REQUEST_TIMEOUT, first)
            while chunk is not None:
                chunk = await within(REQUEST_TIMEOUT, anext(stream, None))
            stream._gc_destroy = False  # it has ended; xoscar would connect again to say so
        except Exception as error:
            if replica.is_up:
                raise
            self.failures.append(Failure(replica, time.monotonic(), time.monotonic(), repr(error)))
            return False
        finally:
            replica.in_flight -= 1
        self.aborted += not began_to_answer
        return not began_to_answer

    def any_question(self, strength: float) -> Question:
        asked = list(self._expected)
        return asked[int(strength * len(asked))]


def _configuration(salt: str | None, **more: Any) -> dict[str, Any]:
    return generation(**more) if salt is None else generation(cache_salt=salt, **more)
