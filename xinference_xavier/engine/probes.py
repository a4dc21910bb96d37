"""Prompts that this engine computes only for a comparison.

The first are canaries, equal in all engines of a model: see `replica.canary`. One is a single
chunk; the other is long, as some differences begin deep in a prompt. The rest are audits.

The engine gives itself these requests (`OwnRequests`). They go the way of clients' requests: into
the queue that vLLM's input thread fills. Their outputs go to the first API process, which ignores
outputs of requests that it does not know. Their salts are secrets, as clients choose salts, too.
The rows that are compared are sampled and dropped; no others are stored.

Threading: `work` is for the replica's background thread, everything else is for the scheduler
thread, which samples nothing: it pins rows, or keeps them in quarantine, until `work` has done so.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc

from xinference_xavier.engine import compat
from xinference_xavier.engine.audits import Audit, Audits, CanAudit
from xinference_xavier.engine.sketcher import Sketcher
from xinference_xavier.limits import LONGEST
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.sketches import Sketch
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.replica.canary import Computed, Lost, ProbeResult
from xinference_xavier.runtime.backoff import Backoff
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

_NO_WAVE = -1
"""A wave number that makes an idle engine wake the ranks that compute in step with it."""


class OwnRequests:
    def __init__(self, core: Any, cannot: str = "") -> None:
        """`cannot` is why this `core` never computes one."""
        self.cannot = cannot
        self._core = core

    @classmethod
    def at(cls, config: VllmConfig) -> OwnRequests:
        """The queue of the engine that is being made on this thread."""
        core, cannot = compat.engine_core(), ""
        if config.model_config.runner_type != "generate":
            cannot = "its model generates nothing"
        elif not hasattr(core, "input_queue"):
            cannot = "it runs in its caller's process; leave out VLLM_ENABLE_V1_MULTIPROCESSING=0"
        elif isinstance(core, DPEngineCoreProc) and not core.has_coordinator:
            # Nobody would wake the ranks that compute in step with it.
            cannot = "its data-parallel ranks have no coordinator; start them with one"
        return cls(core, cannot)

    def ask(self, tokens: Sequence[int], salt: str) -> str | None:
        """Compute `tokens` and one more. Returns the request's id; None if the engine takes none
        now."""
        core = self._core
        if self.cannot or not _takes_requests(core):
            return None
        request = EngineCoreRequest(
            request_id=f"xavier-probe-{secrets.token_hex(8)}",
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
            current_wave=_NO_WAVE,
        )
        core.input_queue.put_nowait(
            (EngineCoreRequestType.ADD, core.preprocess_add_request(request))
        )
        return request.request_id

    def abort(self, req_id: str) -> None:
        """Abort a request, unless it has ended."""
        self._core.input_queue.put_nowait((EngineCoreRequestType.ABORT, [req_id]))


def _takes_requests(core: Any) -> bool:
    if getattr(core, "request_block_hasher", None) is None:  # it is being made
        return False
    return bool(core.scheduler.pause_state.name == "UNPAUSED")


DEEP = 8192
"""The long canary's last chunk begins here, if the model takes so many tokens: Llama 4 changes its
attention there."""
_STORE_TIME = 10.0  # seconds from the end of a probe's request until its last row is stored
_PAUSE, _LONGEST_PAUSE = 10.0, 3600.0  # seconds until another probe, after one that was lost
_EXCLUSIVE = 3  # special tokens are at the ends of most vocabularies


@dataclass(eq=False, slots=True)
class Probe:
    """A prompt, and the layers that are to be sampled of each of its chunks that are compared, by
    where these end."""

    tokens: Sequence[int]
    layers: Mapping[int, Set[str]]
    audit: Audit | None = None  # None for a canary
    salt: str = field(default_factory=lambda: f"xavier-probe-{secrets.token_hex(16)}")
    sketches: dict[int, dict[str, tuple[str, Sequence[float]]]] = field(default_factory=dict)
    req_id: str = ""
    deadline: float = 0.0

    def add(self, end: int, sketch: Sketch) -> bool:
        """Add what was sampled of a chunk, group by group. True once nothing is missing."""
        self.sketches.setdefault(end, {}).update(sketch)
        return all(
            self.sketches.get(end, {}).keys() >= layers for end, layers in self.layers.items()
        )


@dataclass(eq=False, slots=True)
class _Era:
    """What is asked for between two resets. `canaries` are where those end that are still to be
    computed."""

    canaries: deque[int]
    began: float
    running: Probe | None = None
    not_before: float = 0.0  # the next request, after one was lost
    backoff: Backoff = field(default_factory=lambda: Backoff(_PAUSE, _LONGEST_PAUSE))

    def wait(self, now: float) -> None:
        """Longer each time in a row: each try costs the engine a prompt."""
        self.running = None
        self.not_before = now + self.backoff.pause()


class Probes:
    """`sketcher` samples rows of `pool`; a chunk has `chunk_tokens`, and a probe at most
    `max_tokens`. Without `audits` there are only canaries."""

    def __init__(
        self,
        can_audit: CanAudit,
        requests: OwnRequests,
        sketcher: Sketcher,
        pool: Pool,
        *,
        chunk_tokens: int,
        max_tokens: int,
        vocabulary: int,
        audits: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.audits = (
            Audits(
                can_audit,
                sketcher,
                pool,
                chunk_tokens=chunk_tokens,
                max_tokens=max_tokens,
                clock=clock,
            )
            if audits
            else None
        )
        self._requests = requests
        self._sketcher = sketcher
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._vocabulary = vocabulary
        self._can_audit = can_audit
        self._clock = clock
        most = (max_tokens - 1) // chunk_tokens
        chunks = sorted({1, min(DEEP // chunk_tokens + 1, most)} - {0})
        self._canaries = [number * chunk_tokens for number in chunks]  # where they end
        self._era = _Era(deque(self._canaries), clock())
        self._asked: dict[str, Probe] = {}
        """Probes by salt. A reset may overtake the request of one."""
        self._log = RateLimitedLog(logger)
        self._stored: deque[tuple[Probe, int, Sequence[Row]]] = deque()

    # -- called by the background thread ------------------------------------------------------

    def work(self) -> list[ProbeResult]:
        """Go on: sample what was loaded and stored, and ask for the next probe. Returns what there
        is to compare."""
        era, now = self._era, self._clock()
        if self.audits is not None:
            self.audits.sample()
        results = self._sample_stored(era)
        probe = era.running
        if probe is not None and now >= probe.deadline:
            self._requests.abort(probe.req_id)
            era.wait(now)
            self._log.warn("lost", "the engine did not compute a probe: id=%s", probe.req_id)
            results.append(Lost())
        if era.running is None and now >= era.not_before and not self._requests.cannot:
            self._ask(era, now)
        return results if era is self._era else []

    def _sample_stored(self, era: _Era) -> list[ProbeResult]:
        results: list[ProbeResult] = []
        while self._stored:
            probe, end, rows = self._stored.popleft()
            try:
                sketch = self._sketcher.sample(rows)
            finally:
                self._pool.abort(*rows)
            if probe is era.running and probe.add(end, sketch):
                era.running = None
                era.backoff.reset()
                if probe.audit is None:
                    era.canaries.popleft()
                    results.append(Computed(_canary_name(end), probe.sketches[end]))
                else:
                    results.append(probe.audit.result(probe.sketches))
        return results

    def _ask(self, era: _Era, now: float) -> None:
        probe = self._next_canary(era, now) or self._next_audit(era, now)
        if probe is None:
            return
        probe.deadline = now + LONGEST
        recent = (each for each in self._asked.values() if now < each.deadline)
        self._asked = {each.salt: each for each in (*recent, probe)}
        era.running = probe
        try:
            req_id = self._requests.ask(probe.tokens, probe.salt)
        except Exception as error:  # whatever it is, the engine serves
            self._log.warn("ask", "cannot compute a probe: error=%r", error)
            era.wait(now)
            req_id = None
        if req_id is None:
            era.running = None
            del self._asked[probe.salt]
            return
        probe.req_id = req_id
        if self.audits is not None and probe.audit is not None:
            self.audits.asked(probe.audit, now)

    def _next_canary(self, era: _Era, now: float) -> Probe | None:
        if not era.canaries:
            return None
        end = era.canaries[0]
        if end > self._chunk_tokens and not self._can_audit(0) and now < era.began + LONGEST:
            return None
        return Probe(_canary(end, self._vocabulary), {end: self._sketcher.layers})

    def _next_audit(self, era: _Era, now: float) -> Probe | None:
        audit = None if self.audits is None else self.audits.next(now, era)
        return None if audit is None else Probe(audit.tokens, audit.layers, audit)

    # -- called by the scheduler thread -------------------------------------------------------

    def by_salt(self, salt: str) -> Probe | None:
        """The probe whose request has this salt."""
        return self._asked.get(salt)

    def reset(self) -> None:
        """The engine's weights may have changed: compute the canaries again, and audit nothing from
        before."""
        self._era = _Era(deque(self._canaries), self._clock())

    def wants_audit(self) -> bool:
        """True if `loaded` would do anything."""
        return self.audits is not None and self.audits.wanted()

    def loaded(self, tokens: Sequence[int], rows: Iterable[Row], ends: Mapping[bytes, int]) -> None:
        """A request loads `rows`: see `Audits.loaded`."""
        assert self.audits is not None, "then nothing is wanted"
        self.audits.loaded(tokens, rows, ends, self._era)

    def stored(self, probe: Probe, rows: Iterable[Row], ends: Mapping[bytes, int]) -> None:
        """These rows of a probe are complete. They are in quarantine until they are sampled."""
        found: dict[int, list[Row]] = {}
        for row in rows:
            found.setdefault(ends[row.key[: GROUP.start]], []).append(row)
        self._stored.extend((probe, end, each) for end, each in found.items())

    def ended(self, probe: Probe) -> None:
        """The probe's request has ended, perhaps early."""
        probe.deadline = min(probe.deadline, self._clock() + _STORE_TIME)


def _canary_name(end: int) -> str:
    """What peers call a canary's chunk: its own key depends on the salt."""
    return f"canary/{end}"


def _canary(end: int, vocabulary: int) -> list[int]:
    """The canary's tokens, and one more, because vLLM stores what it computed a step before."""
    first = vocabulary // _EXCLUSIVE
    return [first + place * 31 % max(1, first) for place in range(end + 1)]
