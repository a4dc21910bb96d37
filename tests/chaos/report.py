"""The findings of a chaos run, and whether it passed.

Each part of a run has the schedule's steps carried out by a `Report`, which counts them, and fills
in its other figures at the end; `to_json` merges the parts into the text of
`build/chaos-report.json`. A part adds to `problems` whatever is wrong and has no figure.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from threading import Lock

from tests.chaos.schedule import Step

DECISION_GRACE = 1.0
"""Seconds after its deadline within which a decision must be noticed."""


@dataclass(frozen=True)
class Bars:
    """What a full run of one part must reach."""

    faults: int
    kinds: int


FULL = {"replicas": Bars(faults=1000, kinds=15), "engines": Bars(faults=15, kinds=8)}


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
    """Figures of one part ("replicas" or "engines"). Times are in seconds.

    `faults` counts those whose effect was observed, `unobserved` the others, both by kind.
    `longest_scheduling_wait_s` is the time from a request's first pending lookup to its decision,
    on replicas that were not suspended. `failed_requests` includes those on killed replicas.
    """

    part: str
    seed: int
    deadline_s: float
    faults: Counter[str] = field(default_factory=Counter)
    unobserved: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    requests: int = 0
    failed_requests: int = 0
    failed_requests_on_killed_replica: int = 0
    wrong_outputs: int = 0
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
        if self.wrong_outputs:
            found.append(f"{self.wrong_outputs} outputs were wrong")
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
        return [f"{self.part}: {failure}" for failure in found]

    def missed_bars(self) -> list[str]:
        """The bars of a full run that this one did not reach."""
        bars, total, kinds = FULL[self.part], self.faults.total(), len(+self.faults)
        missed = []
        if total < bars.faults:
            missed.append(f"{self.part}: {total} faults, {bars.faults} are required")
        if kinds < bars.kinds:
            missed.append(f"{self.part}: {kinds} kinds of faults, {bars.kinds} are required")
        return missed


def to_json(parts: Sequence[Report]) -> str:
    """One report of all parts."""
    slowest = max(parts, key=lambda part: part.longest_scheduling_wait_s - part.deadline_s)
    leaks = [asdict(part.leaks) for part in parts]
    merged = {
        "seed": parts[0].seed,
        "faults": dict(sorted(_added(part.faults for part in parts).items())),
        "operations": sum(part.operations for part in parts),
        "requests": sum(part.requests for part in parts),
        "failed_requests": sum(part.failed_requests for part in parts),
        "failed_requests_on_killed_replica": sum(
            part.failed_requests_on_killed_replica for part in parts
        ),
        "wrong_outputs": sum(part.wrong_outputs for part in parts),
        "wrong_bytes": sum(part.wrong_bytes for part in parts),
        "rollbacks": dict(sorted(_added(part.rollbacks for part in parts).items())),
        # From the part that came closest to its own deadline, or exceeded it most.
        "longest_scheduling_wait_s": round(slowest.longest_scheduling_wait_s, 3),
        "deadline_s": slowest.deadline_s,
        "leaks": {name: sum(part[name] for part in leaks) for name in leaks[0]},
    }
    return json.dumps(merged, indent=2) + "\n"


def _added(counters: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total
