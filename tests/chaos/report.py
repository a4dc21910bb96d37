"""The findings of a chaos run, and whether it passed.

A run has the schedule's steps carried out by a `Report`, which counts them, and fills in its other
figures at the end. It adds to `problems` whatever is wrong and has no figure.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from threading import Lock

from tests.chaos.schedule import Step

DECISION_GRACE = 1.0
"""Seconds after its deadline within which a decision must be noticed."""


MIN_FAULTS, MIN_KINDS = 1000, 15
"""What a full run must reach."""


@dataclass
class Leaks:
    """What was left at the end: `bytes` of memory, otherwise counts. When nothing runs, no row is
    FILLING or pinned."""

    grants: int = 0
    filling: int = 0
    pinned: int = 0
    quarantined: int = 0
    bytes: int = 0
    threads: int = 0
    file_descriptors: int = 0
    processes: int = 0
    shared_memory: int = 0
    actors: int = 0


@dataclass
class Report:
    """Figures of a run. Times are in seconds.

    `faults` counts those whose effect was observed, `unobserved` the others, both by kind.
    `longest_scheduling_wait_s` is the time from a request's first pending lookup to its decision,
    on replicas that were not suspended. `failed_requests` includes those on killed replicas.
    """

    seed: int
    deadline_s: float
    faults: Counter[str] = field(default_factory=Counter)
    unobserved: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    requests: int = 0
    failed_requests: int = 0
    failed_requests_on_killed_replica: int = 0
    wrong_bytes: int = 0
    rollbacks: Counter[str] = field(default_factory=Counter)
    longest_scheduling_wait_s: float = 0.0
    leaks: Leaks = field(default_factory=Leaks)
    problems: list[str] = field(default_factory=list)
    steps: int = 0
    """How many steps of the schedule were begun."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def begin(self, step: Step) -> None:
        """Note that a step begins. Any thread may call this and `carry_out`."""
        with self._lock:
            self.steps = max(self.steps, step.number)

    def carry_out(self, step: Step, inject: Callable[[], bool]) -> None:
        """Inject a fault and count it, or note what went wrong. `inject` returns whether its effect
        was observed."""
        try:
            observed = inject()
        except Exception as error:
            with self._lock:
                self.problems.append(f"step {step.number}, {step.kind}: {error!r}")
            return
        with self._lock:
            (self.faults if observed else self.unobserved)[step.kind] += 1

    def progress(self) -> str:
        return (
            f"{self.steps} steps, {self.faults.total()} faults of {len(self.faults)} kinds "
            f"observed, {self.unobserved.total()} not observed"
        )

    def failures(self) -> list[str]:
        """Everything that is wrong, in words; empty for a run that passed."""
        found = list(self.problems)
        if self.wrong_bytes:
            found.append(f"{self.wrong_bytes} wrong bytes were loaded")
        elsewhere = self.failed_requests - self.failed_requests_on_killed_replica
        if elsewhere:
            found.append(f"{elsewhere} requests failed on replicas that were not killed")
        if self.longest_scheduling_wait_s > self.deadline_s + DECISION_GRACE:
            found.append(
                f"a decision took {self.longest_scheduling_wait_s:.2f} s, its deadline was "
                f"{self.deadline_s:g} s"
            )
        leaked = {name: count for name, count in asdict(self.leaks).items() if count}
        if leaked:
            found.append("left over: " + ", ".join(f"{n} {name}" for name, n in leaked.items()))
        return found

    def missed_bars(self) -> list[str]:
        """The bars of a full run that this one did not reach."""
        total, kinds = self.faults.total(), len(+self.faults)
        missed = []
        if total < MIN_FAULTS:
            missed.append(f"{total} faults, {MIN_FAULTS} are required")
        if kinds < MIN_KINDS:
            missed.append(f"{kinds} kinds of faults, {MIN_KINDS} are required")
        return missed

    def to_json(self) -> str:
        """The text of `build/chaos-report.json`."""
        found = {
            "seed": self.seed,
            "faults": dict(sorted(self.faults.items())),
            "operations": self.operations,
            "requests": self.requests,
            "failed_requests": self.failed_requests,
            "failed_requests_on_killed_replica": self.failed_requests_on_killed_replica,
            "wrong_bytes": self.wrong_bytes,
            "rollbacks": dict(sorted(self.rollbacks.items())),
            "longest_scheduling_wait_s": round(self.longest_scheduling_wait_s, 3),
            "deadline_s": self.deadline_s,
            "leaks": asdict(self.leaks),
        }
        return json.dumps(found, indent=2) + "\n"
