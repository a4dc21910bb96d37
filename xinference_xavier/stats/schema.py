"""The figures of sharing and routing, each declared once: `/metrics`, the tables of the commands
and the documentation's list of metrics are made from what is declared here.

As JSON, an object is a dictionary of its fields. `stats.report` does not trust it, because it
comes from peers and perhaps from another version.

Times are in seconds, sizes in bytes, and rows are chunks. Counters begin at zero when a replica is
started; those of routing, when a process that sends requests to replicas is.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, ClassVar, Literal, get_type_hints

from xinference_xavier.errors import ROLLBACKS, NotSharing

COMMITTED, ROLLED_BACK = OUTCOMES = ("committed", "rolled_back")
OTHER = "other"
"""Stands for values of labels that a peer makes up."""
Unit = Literal["", "bytes", "seconds", "share"]


@dataclass(frozen=True)
class Figure:
    """`metric` is its metric's name without prefix; empty if it has none. `heading` is what tables
    call it; empty if they lack it.

    `read` takes the object that has the figure. It returns a number, a `Histogram`, None if there
    is none now, or a dictionary of these by the values of the `labels`. If there are `known`
    values, a label has only these, and each from the start: Prometheus would miss the first count
    of a series that begins with it.
    """

    text: str
    metric: str = ""
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    unit: Unit = ""
    heading: str = ""
    is_histogram: bool = False
    read: Callable[[Any], Any] = lambda source: None

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        if self.is_histogram:
            return "histogram"
        return "counter" if self.metric.endswith("_total") else "gauge"

    def values(self, source: object) -> dict[tuple[str, ...], Any]:
        """The figure's values by those of its labels; empty if there is none now."""
        value = self.read(source)
        if value is None:
            return {}
        if not self.labels:
            return {(): value}
        found = vars(value) if is_dataclass(value) else value
        if self.known:
            found = {each: found.get(each, 0) for each in self.known}
        return {each if isinstance(each, tuple) else (each,): it for each, it in found.items()}


Figures = tuple[Figure, ...]
"""Figures of a class that are not fields of it."""


def described(text: str, default: Any, **declared: Any) -> Any:
    """A dataclass field that is a figure. `default` is a value or a factory, `declared` what else
    its `Figure` has."""
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={"figure": Figure(text, **declared)})


def metric(name: str, text: str, default: Any = 0, **declared: Any) -> Any:
    """The same, with a metric of this `name`."""
    return described(text, default, metric=name, **declared)


def figures_of(kind: type[Any], *path: str) -> Iterator[Figure]:
    """All figures of a class and of the objects in its fields. They are read from what has an
    object of the class at `path`."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        where = (*path, each.name)
        if "figure" in each.metadata:
            yield replace(each.metadata["figure"], read=attrgetter(".".join(where)))
        if is_dataclass(hints[each.name]):
            yield from figures_of(hints[each.name], *where)
    for figure in getattr(kind, "figures", ()):
        yield replace(figure, read=_at(path, figure.read))


def _at(path: tuple[str, ...], read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if not path:
        return read
    find = attrgetter(".".join(path))
    return lambda source: read(find(source))


def _known(value: str, values: tuple[str, ...]) -> str:
    return value if value in values else OTHER


@dataclass
class Hits:
    """Prompt tokens by the source of their KV cache."""

    prefix_cache: int = described(
        "Prompt tokens found in vLLM's own prefix cache.", 0, heading="prefix cache"
    )
    local_pool: int = described(
        "Prompt tokens loaded from this replica's pool.", 0, heading="local pool"
    )
    disk: int = described("Prompt tokens loaded from the host's disk.", 0, heading="disk")
    remote: int = described(
        "Prompt tokens loaded after being fetched from another replica.", 0, heading="remote"
    )
    computed: int = described("Prompt tokens computed.", 0, heading="computed")

    figures: ClassVar[Figures] = (
        Figure(
            "The share of prompt tokens that were not computed.",
            unit="share",
            heading="reused",
            read=lambda hits: hits.ratio if hits.total else None,
        ),
    )

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def ratio(self) -> float:
        """The share of prompt tokens that were not computed; 0 before the first request."""
        return 1 - self.computed / self.total if self.total else 0.0

    @property
    def main(self) -> str:
        """The source of most of the tokens."""
        return max(HIT_SOURCES, key=vars(self).__getitem__)


HIT_SOURCES = tuple(source.name for source in fields(Hits))
CHOICES = ("local", "fetch", "compute", "backlog", "prefill")
"""Why a replica is chosen: see `routing.route.Choice`."""
PREFIX_STATES = ("kept", "computing", "waiting", "failed")


@dataclass
class Histogram:
    """`counts` has one more entry than there are `bounds`, for values above all of them. With other
    buckets than these, such as another version's, it is empty."""

    bounds: ClassVar[tuple[float, ...]] = ()

    counts: list[int] = described("Observations in each bucket.", list)
    sum: float = described("Sum of the observations.", 0.0)

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds) + 1:
            self.counts, self.sum = [0] * (len(self.bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """A value that equals a bound belongs to that bound's bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def quantile(self, share: float) -> float | None:
        """The value that this share of all observations does not exceed, as PromQL's
        `histogram_quantile` computes it: linear within a bucket, and at most the last bound. None
        without observations."""
        cumulative = [0, *accumulate(self.counts)]
        if not cumulative[-1]:
            return None
        rank = share * cumulative[-1]
        at = bisect_left(cumulative, rank, lo=1) - 1
        lower, upper = (0.0, *self.bounds, self.bounds[-1])[at : at + 2]
        return lower + (upper - lower) * (rank - cumulative[at]) / self.counts[at]


class FetchSeconds(Histogram):
    """Durations of fetches; `xavier_fetch_timeout` is 5 s by default."""

    bounds = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class AnswerSeconds(Histogram):
    """Times until answers begin."""

    bounds = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass
class FirstTokens:
    """Time from a request's arrival at the engine to its first token, by the source of most of its
    prompt: `prefix_cache`, `local_pool`, `disk`, `remote` or `computed`, as in `Hits`."""

    prefix_cache: AnswerSeconds = field(default_factory=AnswerSeconds)
    local_pool: AnswerSeconds = field(default_factory=AnswerSeconds)
    disk: AnswerSeconds = field(default_factory=AnswerSeconds)
    remote: AnswerSeconds = field(default_factory=AnswerSeconds)
    computed: AnswerSeconds = field(default_factory=AnswerSeconds)


@dataclass
class FetchStats:
    """Fetches over one transport, or those that ended before one was chosen.

    `seconds` is by outcome. `bytes` are those that became hits. `reasons` counts the fetches that
    did not bring all rows.
    """

    seconds: dict[str, FetchSeconds] = field(
        default_factory=lambda: {outcome: FetchSeconds() for outcome in OUTCOMES}
    )
    bytes: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def ended(self, reason: str | None, seconds: float, size: int) -> None:
        """Count a fetch that brought `size` bytes; `reason` is why it did not bring all."""
        outcome = COMMITTED if reason is None else ROLLED_BACK
        self.seconds[outcome].observe(seconds)
        if reason is not None:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.bytes += size


@dataclass
class Fetches:
    """How fetches from peers ended."""

    started: int = described("Fetches that started.", 0)
    committed: int = described("Those that brought all rows.", 0, heading="fetches")
    rolled_back: dict[str, int] = described(
        "Those that did not, by reason.", dict, labels=("reason",), heading="rolled back"
    )


MAX_TRANSPORTS = 8
"""Transports of one replica that become labels of metrics, so that nobody can make up any number of
them."""
MAX_NAME = 64
"""Characters of such a label."""


@dataclass
class ReplicaFetches(Fetches):
    """`Fetches`, and what each transport did for them."""

    by_transport: dict[str, FetchStats] = described("Their durations and sizes.", dict)

    figures: ClassVar[Figures] = (
        Figure(
            "Finished fetches; rolled_back means that not all of the chunks became hits.",
            "fetches_total",
            ("transport", "outcome", "reason"),
            read=lambda fetches: fetches._finished(),
        ),
        Figure(
            "Time from the decision to fetch until the fetch was committed or rolled back.",
            "fetch_duration_seconds",
            ("transport", "outcome"),
            unit="seconds",
            is_histogram=True,
            read=lambda fetches: fetches._durations(),
        ),
        Figure(
            "Bytes of chunks from peers and the disk that became hits.",
            "received_bytes_total",
            ("transport",),
            unit="bytes",
            read=lambda fetches: {name: stats.bytes for name, stats in fetches._transports()},
        ),
    )

    def _transports(self) -> Iterator[tuple[str, FetchStats]]:
        for name in sorted(self.by_transport)[:MAX_TRANSPORTS]:
            yield name[:MAX_NAME], self.by_transport[name]

    def _durations(self) -> dict[tuple[str, ...], FetchSeconds]:
        return {
            (transport, outcome): stats.seconds[outcome]
            for transport, stats in self._transports()
            for outcome in OUTCOMES
            if outcome in stats.seconds
        }

    def _finished(self) -> dict[tuple[str, ...], int]:
        found: dict[tuple[str, ...], int] = {
            (transport, outcome, ""): sum(seconds.counts)
            for (transport, outcome), seconds in self._durations().items()
            if outcome == COMMITTED
        }
        for transport, stats in self._transports():
            for reason, count in stats.reasons.items():
                labels = transport, ROLLED_BACK, _known(reason, ROLLBACKS)
                found[labels] = found.get(labels, 0) + count
        return found


@dataclass
class Decisions:
    """Prefixes that a peer held: `fetched`, or `computed` because that was predicted to be faster.
    `left_out` has the reason why nothing is fetched from a peer for now."""

    fetched: int = 0
    computed: int = 0
    slower_than_prefill: int = metric(
        "fetches_slower_than_prefill_total",
        "Fetches that took longer than computing was predicted to take.",
    )
    left_out: dict[str, str] = field(default_factory=dict)

    figures: ClassVar[Figures] = (
        Figure(
            "Prefixes that peers held, by whether fetching or computing them was chosen.",
            "fetch_decisions_total",
            ("way",),
            read=lambda made: {"fetched": made.fetched, "computed": made.computed},
        ),
        Figure(
            "Peers that the replica does not fetch from for now, because fetches from them failed.",
            "left_out_peers",
            read=lambda made: len(made.left_out),
        ),
    )


@dataclass
class WaitCounts:
    """Long prefixes that the replica `claimed`, so that peers could wait for it to compute them.
    Requests that `waited` for a peer's, and those of them that were `given_up` because the peer did
    not keep up."""

    claimed: int = 0
    waited: int = 0
    given_up: int = 0


@dataclass
class PoolStats:
    """How many `rows` of `row_bytes` a pool has, and rows by state: `ready` to be used, of these
    `pinned`, `filling`, or `quarantined`, as a late transfer may still write to them.
    `cache_rows` would hold the engine's own KV cache. The `engines` of a replica, several with data
    parallelism, divide `xavier_pool_bytes`."""

    rows: int = 0
    ready: int = 0
    filling: int = 0
    pinned: int = 0
    quarantined: int = 0
    row_bytes: int = 0
    cache_rows: int = 0
    engines: int = 1

    figures: ClassVar[Figures] = (
        Figure(
            "The pool's memory by state; the states add up to its size.",
            "pool_bytes",
            ("state",),
            unit="bytes",
            read=lambda pool: pool._bytes(),
        ),
        Figure(
            "The part of the pool's ready memory that cannot be evicted now.",
            "pool_pinned_bytes",
            unit="bytes",
            read=lambda pool: pool.pinned * pool.row_bytes,
        ),
    )

    def _bytes(self) -> dict[str, int]:
        rows = {"ready": self.ready, "filling": self.filling, "quarantined": self.quarantined}
        rows["free"] = max(0, self.rows - sum(rows.values()))
        return {state: count * self.row_bytes for state, count in rows.items()}

    @property
    def used(self) -> int:
        return self.ready + self.filling

    def option_bytes(self, rows: int) -> int:
        """The `xavier_pool_bytes` for this number of rows."""
        return rows * self.row_bytes * self.engines


@dataclass
class ComparisonStats:
    """`compared` peers compute the same rows as the replica. `canaries` are those that the replica
    has computed since its last reset, `audits` the chunks that it has computed again and compared;
    `lost_probes` of both were not computed in time. `peer`, the first `layer` and the relative
    `amount` describe the latest difference."""

    compared: int = 0
    differing: int = metric(
        "differing_peers_total", "Peers whose rows for the same text differed from the replica's."
    )
    audits: int = 0
    failed_audits: int = metric(
        "failed_audits_total", "Audits in which the rows differed from what the replica computes."
    )
    canaries: int = 0
    lost_probes: int = 0
    peer: str | None = None
    layer: str | None = None
    amount: float | None = None


@dataclass(kw_only=True)
class Counters:
    """Counts that can be summed over replicas."""

    hits: Hits = metric(
        "prompt_tokens_total",
        "Prompt tokens by the source of their KV cache.",
        Hits,
        labels=("source",),
    )
    first_tokens: FirstTokens = metric(
        "time_to_first_token_seconds",
        "Time from a request's arrival to its first token, by the source of most of its prompt.",
        FirstTokens,
        labels=("source",),
        unit="seconds",
        is_histogram=True,
    )
    seconds_saved: float = metric(
        "saved_seconds",
        "Time that computing the tokens from pool, disk and peers would take at measured speed.",
        unit="seconds",
    )
    requests: int = metric("requests_total", "Finished requests.", heading="requests")
    bytes_received: int = described(
        "Bytes of chunks from peers.", 0, unit="bytes", heading="received"
    )
    fetches: Fetches = described("Fetches from peers.", Fetches)


@dataclass(kw_only=True)
class Totals(Counters):
    """`Counters`, summed over all replicas."""

    holdings: int = described("Chunks that they offer to peers.", 0, heading="chunks")


@dataclass
class DiskStats:
    folder: str = described("The value of xavier_disk.", "")
    state: str = described(
        "`closed`, `comparing`, `open`, `computed differently` or `weights unknown`; empty "
        "without.",
        "",
    )
    problem: str = described("The latest failure, until rows are saved again.", "")
    limit_bytes: int = metric(
        "disk_limit_bytes", "Most bytes that the disk's rows take.", unit="bytes"
    )
    rows: int = metric("disk_chunks", "Chunks that the replica can read from the disk.")
    written_bytes: int = described("Bytes of chunks saved on the disk.", 0, unit="bytes")
    failures: int = metric("disk_failures_total", "Failed calls to the disk.")


@dataclass
class PromptStats:
    """What prompts have in common. Of those `seen`, some were `shorter` than a chunk,
    of some the first chunk was `new`, as no replica held it, and some had a `cache_salt` that was
    not among the last thousand (`new_salts`). `longest` is the longest beginning of a prompt, in
    tokens, that was reused."""

    seen: int = 0
    shorter: int = 0
    new: int = 0
    new_salts: int = 0
    longest: int = 0


@dataclass(kw_only=True)
class ReplicaStats(Counters):
    """`Counters`, and what else a replica reports about itself."""

    vllm: str | None = described("The version that it runs.", None)
    vllm_untested: bool = described("Whether it is newer than all that were tested.", False)
    replaced_vllm: str | None = described(
        "The version that the model's definition asks for, if it is too old to share.", None
    )
    from_environment: list[str] = described(
        "The options whose values are the cluster's defaults.", list
    )
    not_sharing: str | None = described("Why it cannot fetch from any peer.", None)
    prefill_tokens_per_s: float | None = metric(
        "prefill_tokens_per_second", "Measured speed of computing prompts.", None
    )
    longest_scheduling_wait_s: float = described(
        "The longest time that a request waited for a decision about its fetch.",
        0.0,
        unit="seconds",
    )
    scheduler_errors: int = metric(
        "scheduler_errors_total",
        "Errors of sharing in vLLM's scheduler, each of which cost a hit or a store.",
    )
    refused_posts: int = metric(
        "backlog_refused_total",
        "Stores, claims and fetches given up because the background thread was behind.",
    )
    fetches: ReplicaFetches = described("Fetches from peers.", ReplicaFetches)
    received_from: dict[str, int] = described("Bytes by donor.", dict)
    fetching: dict[str, int] = described("Chunks under way to it, by donor.", dict)
    fetch_decisions: Decisions = described("What it fetched or computed.", Decisions)
    prompts: PromptStats = described("Whether its prompts had anything in common.", PromptStats)
    waits: WaitCounts = described("Waits for a peer's prefill.", WaitCounts)
    pool: PoolStats = described("Its pool.", PoolStats)
    mapped_bytes: int = metric(
        "mapped_bytes",
        "The pools of peers on its host that its workers load from in place.",
        unit="bytes",
    )
    grants: int = described("Grants to peers in force.", 0)
    indexed: int = described("Chunks that it knows peers to hold.", 0)
    comparison: ComparisonStats = described("Of its rows with those of peers.", ComparisonStats)
    disk: DiskStats = described("What is saved below its pool.", DiskStats)
    transport: str | None = described("Of its rows; a heartbeat lacks it.", None)
    transfer_pid: int | None = described("Of its transfer process; a heartbeat lacks it.", None)
    transfer_restarts: int = metric(
        "transfer_restarts_total", "Restarts of the replica's transfer process."
    )
    tracker_failures: int = metric(
        "tracker_failures_total",
        "Sessions with the tracker that failed, and claims and figures that it did not get.",
    )

    figures: ClassVar[Figures] = (
        Figure(
            "Whether the replica can fetch from a peer, and the reason if it cannot.",
            "sharing",
            ("reason",),
            read=lambda replica: replica._sharing(),
        ),
        Figure(
            "Chunks under way to the replica.",
            "fetching_chunks",
            read=lambda replica: sum(replica.fetching.values()),
        ),
    )

    def _sharing(self) -> dict[str, int]:
        reason = self.not_sharing
        return {_known(reason, tuple(NotSharing)) if reason else "": int(not reason)}


@dataclass(kw_only=True)
class ReplicaStatus(ReplicaStats):
    """`ReplicaStats`, and what the tracker knows of the replica.

    `replica` is xinference's name for it, `incarnation` vLLM's engine id, `address` that of its
    actor. Replicas share within a `namespace` if their `verdict` is `compared`; it may also be
    `not compared yet`, `differs` or `cannot compare`, with the `verdict_reason`. `serves`: peers
    can fetch from it now. `stale`: it did not answer, and its stats are those of its last
    heartbeat. `draining`: it gets no more requests, and will be removed. `sequence` is the number
    of its last publication. `raw` is the server's answer.
    """

    incarnation: str
    address: str
    namespace: str
    serves: bool = True
    verdict: str = ""
    verdict_reason: str = ""
    replica: str = ""
    holdings: int = metric("published_chunks", "Chunks that the replica offers to peers.")
    stale: bool = False
    draining: bool = False
    sequence: int = 0
    raw: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.replica = self.replica or self.incarnation


@dataclass
class TrackerStats:
    dropped: int = metric(
        "tracker_dropped_chunks_total",
        "Chunks that the tracker does not list because its index is full.",
    )


@dataclass
class KnownLoad:
    """What a replica has to do now: `backlog_s` seconds of prefill, and the `requests` that wait or
    run there. At its request limit it `accepts` no more. `role` is "any", "prefill" or "decode"."""

    backlog_s: float = 0.0
    requests: int = 0
    accepts: bool = True
    role: str = "any"


@dataclass
class Predictions:
    """A time of streamed answers, as it was `predicted` and as it was (`actual`); `error` is the
    absolute difference."""

    predicted: AnswerSeconds = field(default_factory=AnswerSeconds)
    actual: AnswerSeconds = field(default_factory=AnswerSeconds)
    error: AnswerSeconds = field(default_factory=AnswerSeconds)

    def observe(self, predicted: float, actual: float) -> None:
        self.predicted.observe(predicted)
        self.actual.observe(actual)
        self.error.observe(abs(predicted - actual))


REPLICA = "replica"
"""The label that has xinference's name of a replica."""


@dataclass
class RoutingStats:
    """`mode` is "auto", "backlog" or "off"; empty before the first replica has reported its load.

    `loads` has the replicas whose load is known now, and `replicas` the requests that were sent, by
    xinference's name for the replica. A request that is `moved` is sent again, and counts twice.
    `first_bytes` compares the times until the first byte of streamed answers with their forecasts,
    by reason; `decodes` the times from there to the last.
    """

    mode: str = ""
    loads: dict[str, KnownLoad] = field(default_factory=dict)
    choices: dict[str, int] = metric(
        "routing_choices_total",
        "Routed requests by the reason for which their replica was chosen.",
        dict,
        labels=("reason",),
        known=CHOICES,
    )
    replicas: dict[str, int] = field(default_factory=dict)
    unrouted: int = metric(
        "unrouted_requests_total",
        "Requests that went to the replicas in turn: routing was off, or no load was known.",
        heading="in turn",
    )
    waiting: int = metric(
        "routing_waiting_requests",
        "Requests that wait now because all replicas are at their limit.",
        heading="waiting",
    )
    waited: int = metric("routing_waits_total", "Requests that waited until a replica took them.")
    waited_s: float = metric(
        "routing_wait_seconds_total", "Time that these requests waited.", unit="seconds"
    )
    refused: int = metric(
        "routing_refused_total",
        "Requests that were refused because too many waited, or that waited for too long.",
        heading="refused",
    )
    moved: int = metric(
        "routing_moved_total",
        "Requests sent to another replica because theirs was lost.",
        heading="sent again",
    )
    failed_prefills: int = metric(
        "routing_failed_prefills_total",
        "Prefills that a prefill replica was to do for another one and that failed.",
    )
    failures: int = metric(
        "routing_failures_total",
        "Times that the router could not ask the tracker what is new, or choose a replica.",
    )
    first_bytes: dict[str, Predictions] = field(default_factory=dict)
    decodes: Predictions = field(default_factory=Predictions)

    figures: ClassVar[Figures] = (
        Figure(
            "Whether requests are routed, and in which way.",
            "routing",
            ("mode",),
            read=lambda routing: {routing.mode: int(routing.mode not in ("", "off"))},
        ),
        Figure(
            "Replicas whose load is known, so that requests can be routed to them.",
            "routable_replicas",
            read=lambda routing: len(routing.loads),
        ),
        Figure(
            "Routed requests by replica.",
            "routed_requests_total",
            (REPLICA,),
            read=lambda routing: {**dict.fromkeys(routing.loads, 0), **routing.replicas},
        ),
        Figure(
            "Prefill that the replica still has to do, as the process that routes expects it.",
            "prefill_backlog_seconds",
            (REPLICA,),
            unit="seconds",
            read=lambda routing: {name: load.backlog_s for name, load in routing.loads.items()},
        ),
        Figure(
            "Predicted time until the first byte of streamed answers, by the reason of the choice; "
            "`decode` is the time from there to the last.",
            "routing_predicted_seconds",
            ("reason",),
            unit="seconds",
            is_histogram=True,
            read=lambda routing: routing._predictions("predicted"),
        ),
        Figure(
            "These times as they were.",
            "routing_actual_seconds",
            ("reason",),
            unit="seconds",
            is_histogram=True,
            read=lambda routing: routing._predictions("actual"),
        ),
        Figure(
            "Absolute error of these predictions.",
            "routing_prediction_error_seconds",
            ("reason",),
            unit="seconds",
            is_histogram=True,
            read=lambda routing: routing._predictions("error"),
        ),
    )

    def _predictions(self, which: str) -> dict[str, AnswerSeconds]:
        known = {each: self.first_bytes.get(each, Predictions()) for each in CHOICES}
        return {term: getattr(it, which) for term, it in (known | {"decode": self.decodes}).items()}

    def sent(self, reason: str, replica: str) -> None:
        """A request was sent to a replica."""
        self.choices[reason] = self.choices.get(reason, 0) + 1
        self.replicas[replica] = self.replicas.get(replica, 0) + 1

    def answered(self, reason: str, predicted: float, actual: float) -> None:
        """The first byte of a streamed answer came after `actual` seconds."""
        self.first_bytes.setdefault(reason, Predictions()).observe(predicted, actual)


@dataclass(kw_only=True)
class ModelStatus:
    """How the `replicas` of the model `model_uid` share, and `totals`, summed over them. `enabled`
    is the operator's switch. `raw` is the server's answer."""

    model_uid: str
    enabled: bool
    replicas: tuple[ReplicaStatus, ...]
    totals: Totals
    tracker: TrackerStats = described("Of the tracker.", TrackerStats)
    routing: RoutingStats = described("By the process that answered.", RoutingStats)
    prefix_states: dict[str, int] = described(
        "How many named prefixes are in each of `PREFIX_STATES`.", dict
    )
    raw: dict[str, Any] = field(default_factory=dict, repr=False)

    figures: ClassVar[Figures] = (
        Figure("Whether sharing is switched on.", "enabled", read=lambda model: int(model.enabled)),
        Figure(
            "Replicas that are members of the tracker.",
            "replicas",
            read=lambda model: len(model.replicas),
        ),
        Figure(
            "Groups of replicas that share only among themselves; there should be one.",
            "namespaces",
            read=lambda model: len({replica.namespace for replica in model.replicas}),
        ),
        Figure(
            "Named prefixes by state.",
            "named_prefixes",
            ("state",),
            known=PREFIX_STATES,
            read=lambda model: model.prefix_states,
        ),
    )


BUILD = Figure(
    "Always 1, for each vLLM that replicas run, with the versions of extension and xinference.",
    "build_info",
    ("version", "xinference", "vllm"),
)
UP = Figure("Whether the supervisor said in time which models share.", "up")
TRACKER_UP = Figure("Whether the model's tracker answered in time.", "tracker_up")
REPLICA_UP = Figure(
    "Whether the replica answered in time; if not, its values are from its last heartbeat.",
    "replica_up",
    read=lambda replica: int(not replica.stale),
)
OF_REPLICA = tuple(figures_of(ReplicaStatus))
OF_MODEL = (
    *ModelStatus.figures,
    *figures_of(TrackerStats, "tracker"),
    *figures_of(RoutingStats, "routing"),
)
