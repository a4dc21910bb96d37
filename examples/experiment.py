"""Measure with one document and two replicas what sharing saves, and compare the answers.

xinference sends requests to the replicas in turn. The replicas' counters show which one answered,
so a wrong guess about whose turn it is stops the experiment and never falsifies it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, NamedTuple

from examples.documents import document, prompt, questions
from examples.local_cluster import ClusterError, Completion, LocalCluster
from examples.processes import until

MIN_REUSED = 0.95
"""The part of a prompt's whole chunks that an answer reuses at least where nothing is missed."""
MAX_LOGPROB_DIFFERENCE = 1e-4
TINY = "Hello"
COUNTERS_TIMEOUT = 60.0


class Answer(NamedTuple):
    """A completion, the incarnation that gave it, and the bytes that it received to do so."""

    completion: Completion
    incarnation: str
    bytes_received: int


@dataclass(frozen=True)
class Measurement:
    """The measurement of one document. Times are seconds at the client for 8 output tokens."""

    request: str
    cold: Completion
    remote: Answer
    local: Completion
    """The remote hit's request, answered by the donor itself, which reused as much."""
    later: tuple[Completion, ...]
    """Other questions, one to each replica."""
    chunk_tokens: int
    row_bytes: int
    unshared: Completion | None = None
    """The remote hit's request, computed without any reuse."""

    @property
    def prompt_tokens(self) -> int:
        return self.remote.completion.prompt_tokens

    @property
    def cold_s(self) -> float:
        return self.cold.seconds

    @property
    def remote_hit_s(self) -> float:
        return self.remote.completion.seconds

    @property
    def local_hit_s(self) -> float:
        return mean(completion.seconds for completion in self.later)

    @property
    def tokens_equal(self) -> bool:
        """Whether remote hit, local hit and unshared answer have the same tokens."""
        references = [self.local, *([self.unshared] if self.unshared else [])]
        return all(self.remote.completion.tokens == other.tokens for other in references)

    @property
    def logprobs_max_abs_diff(self) -> float:
        pairs = zip(self.remote.completion.logprobs, self.local.logprobs, strict=True)
        return max(abs(remote - local) for remote, local in pairs)

    def failures(self) -> list[str]:
        """One sentence for each wrong answer."""
        found = []
        if self.cold.cached_tokens:
            found.append(f"the cold answer reused {self.cold.cached_tokens} tokens")
        if self.unshared and self.unshared.cached_tokens:
            found.append(f"the unshared answer reused {self.unshared.cached_tokens} tokens")
        if not self.tokens_equal:
            found.append("the remote hit's tokens differ from those of the other answers")
        if self.logprobs_max_abs_diff > MAX_LOGPROB_DIFFERENCE:
            found.append(
                f"the remote hit's log-probabilities differ by {self.logprobs_max_abs_diff:.1e}"
            )
        return found

    def shortfalls(self) -> list[str]:
        """One sentence for each answer that reused less than was there: a replica computes what
        takes too long to fetch."""
        reused = self.remote.completion.cached_tokens
        whole = self.prompt_tokens // self.chunk_tokens * self.chunk_tokens
        expected = reused // self.chunk_tokens * self.row_bytes
        found = []
        if reused < MIN_REUSED * whole:
            found.append(f"the remote hit reused {reused} of {whole} tokens in whole chunks")
        if self.remote.bytes_received != expected:
            found.append(f"{self.remote.bytes_received} bytes received instead of {expected}")
        # vLLM's own cache counts blocks, and several of them may make one of our chunks.
        if self.local.cached_tokens // self.chunk_tokens != reused // self.chunk_tokens:
            found.append(
                f"the local hit reused {self.local.cached_tokens} tokens, the remote hit {reused}"
            )
        for completion in self.later:
            if completion.cached_tokens < MIN_REUSED * whole:
                found.append(f"a local hit reused {completion.cached_tokens} of {whole} tokens")
        return found

    def entry(self) -> dict[str, Any]:
        """The measurement as an entry of the report."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cold_s": self.cold_s,
            "local_hit_s": self.local_hit_s,
            "remote_hit_s": self.remote_hit_s,
            "remote_cached_tokens": self.remote.completion.cached_tokens,
            "bytes_received": self.remote.bytes_received,
            "remote_tokens_equal": self.tokens_equal,
            "remote_logprobs_max_abs_diff": self.logprobs_max_abs_diff,
        }


class Experiment:
    """Measures with the two replicas of `model_uid`; nobody else may ask them meanwhile."""

    def __init__(self, cluster: LocalCluster, model_uid: str, chunk_tokens: int) -> None:
        self._cluster = cluster
        self._model_uid = model_uid
        self._chunk_tokens = chunk_tokens
        self._await(lambda: len(self._members()) == 2, "two replicas have joined the tracker")
        self._incarnations = sorted(self._members())
        self._last = ""

    def warm_up(self) -> None:
        """Let each replica compute, send and receive once, and learn whose turn it is."""
        self._last = self._answer(TINY).incarnation
        for donor in range(2):
            text = document(1000 + donor, 20)
            self.share([prompt(text, question) for question in questions(1000 + donor, 20)], donor)

    def share(self, requests: Sequence[str], first: int) -> Measurement:
        """Send four requests with one long prefix, the first to replica `first` (0 or 1)."""
        donor, consumer = self._incarnations[first], self._incarnations[1 - first]
        before = self._members()[donor]
        cold = self._ask(donor, requests[0])
        chunks = cold.completion.prompt_tokens // self._chunk_tokens
        wanted = min(before["holdings"] + chunks, before["pool"]["rows"])
        self._await(
            lambda: self._members()[donor]["holdings"] >= wanted,
            f"{donor} has published {chunks} chunks",
        )
        remote = self._ask(consumer, requests[1])
        local = self._ask(donor, requests[1])
        later = self._ask(consumer, requests[2]), self._ask(donor, requests[3])
        return Measurement(
            request=requests[1],
            cold=cold.completion,
            remote=remote,
            local=local.completion,
            later=tuple(answer.completion for answer in later),
            chunk_tokens=self._chunk_tokens,
            row_bytes=before["pool"]["row_bytes"],
        )

    def compare_with_cold(self, measured: Measurement) -> Measurement:
        """Add an answer to the measurement's request that shared nothing."""
        salt = f"unshared {time.time_ns()}"
        answer = self._cluster.complete(self._model_uid, measured.request, cache_salt=salt)
        return replace(measured, unshared=answer)

    def _ask(self, incarnation: str, request: str) -> Answer:
        """Have `incarnation` answer: its turn comes after an answer of the other replica."""
        if self._last == incarnation:
            self._last = self._answer(TINY).incarnation
        answer = self._answer(request)
        self._last = answer.incarnation
        if answer.incarnation != incarnation:
            raise ClusterError(
                f"{answer.incarnation} answered instead of {incarnation}: "
                "is somebody else asking this model?"
            )
        return answer

    def _answer(self, request: str) -> Answer:
        before = self._members()
        completion = self._cluster.complete(self._model_uid, request)
        self._await(
            lambda: _requests(self._members()) == _requests(before) + 1,
            "the replicas have counted the request",
        )
        after = self._members()
        (incarnation,) = (
            name for name in after if after[name]["requests"] > before[name]["requests"]
        )
        received = after[incarnation]["bytes_received"] - before[incarnation]["bytes_received"]
        return Answer(completion, incarnation, received)

    def _members(self) -> dict[str, dict[str, Any]]:
        return self._cluster.members(self._model_uid)

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        if not until(condition, COUNTERS_TIMEOUT, interval=0.02):
            raise ClusterError(f"not within {COUNTERS_TIMEOUT:.0f} s: {what}")


def _requests(replicas: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(replica["requests"] for replica in replicas.values())
