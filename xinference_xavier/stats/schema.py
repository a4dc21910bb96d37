"""The figures of sharing and routing, declared once, with the metric that each field becomes.

As JSON, an object is a dictionary of its fields. `stats.report` does not trust it, because it
comes from peers and perhaps from another version.

Times are in seconds, sizes in bytes, and rows are chunks. Counters begin at zero when a replica is
started; those of routing, when a process that sends requests to replicas is.
"""

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, ClassVar

COMMITTED, ROLLED_BACK = OUTCOMES = ("committed", "rolled_back")


def about(text: str) -> dict[str, str]:
    """Metadata of a field without a metric: its description, also for OpenAPI."""
    return {"description": text}


def described(text: str, default: Any) -> Any:
    """A dataclass field without a metric. `default` is a value or a factory."""
    return _field(default, about(text))


def metric(name: str, text: str, default: Any = 0, *, label: str = "") -> Any:
    """A dataclass field with a metric of this `name`, without prefix.

    A dictionary is shown as the sum of its values. With `label`, an object is shown as one series
    per field, and the field's name is the label's value.
    """
    return _field(default, {"metric": name, "description": text, "label": label})


def _field(default: Any, metadata: dict[str, str]) -> Any:
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata=metadata)


NOT_SENT = {"exclude": True}
"""Metadata of a field that no answer has: OpenAPI leaves it out."""


@dataclass
class Hits:
    """Prompt tokens by the source of their KV cache: vLLM's own `prefix_cache`, the replica's
    `local_pool`, the host's `disk`, a peer (`remote`), or none (`computed`)."""

    prefix_cache: int = 0
    local_pool: int = 0
    disk: int = 0
    remote: int = 0
    computed: int = 0

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


class FetchBytes(Histogram):
    """Sizes of fetches: 64 KiB to 4 GiB."""

    bounds = tuple(float(1 << power) for power in range(16, 34, 2))


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

    `seconds` is by outcome. `bytes` counts fetches that brought any rows, `reasons` those that did
    not bring all.
    """

    seconds: dict[str, FetchSeconds] = field(
        default_factory=lambda: {outcome: FetchSeconds() for outcome in OUTCOMES}
    )
    bytes: FetchBytes = field(default_factory=FetchBytes)
    reasons: dict[str, int] = field(default_factory=dict)

    def ended(self, reason: str | None, seconds: float, size: int) -> None:
        """Count a fetch that brought `size` bytes; `reason` is why it did not bring all."""
        outcome = COMMITTED if reason is None else ROLLED_BACK
        self.seconds[outcome].observe(seconds)
        if reason is not None:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if size:
            self.bytes.observe(size)


@dataclass
class Fetches:
    """How fetches from peers ended."""

    started: int = described("Fetches that started.", 0)
    committed: int = described("Those that brought all rows.", 0)
    rolled_back: dict[str, int] = described("Those that did not, by reason.", dict)


@dataclass
class ReplicaFetches(Fetches):
    """`Fetches`, and what each transport did for them."""

    by_transport: dict[str, FetchStats] = described("Their durations and sizes.", dict)
    unreleased_grants: int = metric(
        "unreleased_grants_total",
        "Grants that the replica could not release because the donor did not answer.",
    )


@dataclass
class Decisions:
    """Prefixes that a peer held: `fetched`, or `computed` because that was predicted to be faster.

    `predictions` counts complete fetches whose duration had been predicted; `predicted_s`,
    `actual_s` and `error_s` are sums over them. `rates` has, by peer, the transport, the overhead
    of a fetch and the bandwidth beyond that, which is null while the two cannot be separated.
    `left_out` has the reason why nothing is fetched from a peer for now.
    """

    fetched: int = 0
    computed: int = 0
    predictions: int = 0
    predicted_s: float = 0.0
    actual_s: float = metric(
        "predicted_fetch_seconds_total", "Time that fetches with a prediction took."
    )
    error_s: float = metric(
        "fetch_prediction_error_seconds_total", "Absolute error of these predictions."
    )
    slower_than_prefill: int = metric(
        "fetches_slower_than_prefill_total",
        "Fetches that took longer than computing was predicted to take.",
    )
    rates: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass
class WaitCounts:
    """Requests that `waited` for a peer to compute their prefix, and those of them that were
    `given_up` because the peer did not keep up."""

    claimed: int = metric(
        "claimed_prefixes_total",
        "Long prefixes that the replica computed and peers could wait for.",
    )
    waited: int = 0
    given_up: int = 0
    seconds: float = metric(
        "wait_seconds_total", "Time that requests waited for a peer to compute their prefix."
    )


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

    @property
    def used(self) -> int:
        return self.ready + self.filling

    def option_bytes(self, rows: int) -> int:
        """The `xavier_pool_bytes` for this number of rows."""
        return rows * self.row_bytes * self.engines


@dataclass
class GrantStats:
    live: int = metric("grants", "Grants to peers in force.")
    refused: int = metric("grants_refused_total", "Requests for grants that the replica refused.")


@dataclass
class MirrorStats:
    keys: int = metric("mirrored_chunks", "Chunks that the replica knows peers to hold.")
    dropped: int = metric(
        "mirror_dropped_chunks_total", "Chunks of peers that the replica had no room to remember."
    )


@dataclass
class ComparisonStats:
    """Peers that compute the same rows as the replica, and peers that do not. `canaries` are those
    that the replica has computed since its last reset. `peer`, the first `layer` and the relative
    `amount` describe the latest difference."""

    compared: int = metric("compared_peers", "Peers that compute the same rows as the replica.")
    differing: int = metric(
        "differing_peers_total", "Peers whose rows for the same text differed from the replica's."
    )
    audits: int = metric("audits_total", "Chunks computed again and compared.")
    failed_audits: int = metric(
        "failed_audits_total", "Audits in which the rows differed from what the replica computes."
    )
    canaries: int = 0
    lost_probes: int = metric(
        "lost_probes_total", "Canaries and audits that the engine did not compute in time."
    )
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
        label="source",
    )
    first_tokens: FirstTokens = described(
        "The times that people waited, by the source of most of the prompt.", FirstTokens
    )
    requests: int = metric("requests_total", "Finished requests.")
    seconds_saved: float = metric(
        "saved_seconds",
        "Time that computing the tokens from pool, disk and peers would take at measured speed.",
    )
    bytes_received: int = described("Bytes of chunks from peers.", 0)
    bytes_sent: int = described("Bytes of chunks to peers; a heartbeat lacks them.", 0)
    fetches: Fetches = described("Fetches from peers.", Fetches)


@dataclass(kw_only=True)
class Totals(Counters):
    """`Counters`, summed over all replicas."""

    holdings: int = described("Chunks that they offer to peers.", 0)


@dataclass
class WarmJoinStats:
    """`failures` are peers that did not say what they use most."""

    chunks: int = metric(
        "warm_join_chunks_total", "Chunks that the replica fetched before its first request."
    )
    seconds: float = metric(
        "warm_join_seconds", "Time for which the replica fetched before its first request."
    )
    failures: int = metric("warm_join_failures_total", "Peers that did not say what they use most.")


@dataclass
class DiskStats:
    folder: str = described("The value of xavier_disk.", "")
    state: str = described(
        "`closed`, `comparing`, `open` or `computed differently`; empty without.", ""
    )
    problem: str = described("The latest failure, until rows are saved again.", "")
    limit_bytes: int = metric("disk_limit_bytes", "Most bytes that the disk's rows take.")
    rows: int = metric("disk_chunks", "Chunks that the replica can read from the disk.")
    written_bytes: int = metric("disk_written_bytes_total", "Bytes of chunks saved on the disk.")
    failures: int = metric("disk_failures_total", "Failed calls to the disk.")


@dataclass
class PromptStats:
    """Whether prompts have anything in common. Of those `seen`, some were `shorter` than a chunk,
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
    from_environment: list[str] = described(
        "The options whose values are the cluster's defaults.", list
    )
    not_sharing: str | None = described("Why it cannot fetch from any peer.", None)
    prefill_tokens_per_s: float | None = metric(
        "prefill_tokens_per_second", "Measured speed of computing prompts.", default=None
    )
    longest_scheduling_wait_s: float = metric(
        "longest_scheduling_wait_seconds",
        "The longest time that a request waited for a decision about its fetch.",
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
    fetching: dict[str, int] = metric("fetching_chunks", "Chunks under way to the replica.", dict)
    fetch_decisions: Decisions = described("What it fetched or computed.", Decisions)
    prompts: PromptStats = described("Whether its prompts had anything in common.", PromptStats)
    waits: WaitCounts = described("Waits for a peer's prefill.", WaitCounts)
    pool: PoolStats = described("Its pool.", PoolStats)
    grants: GrantStats = described("Grants to peers.", GrantStats)
    mirror: MirrorStats = described("The chunks of its peers.", MirrorStats)
    comparison: ComparisonStats = described("Of its rows with those of peers.", ComparisonStats)
    warm_join: WarmJoinStats = described("What it fetched when it joined.", WarmJoinStats)
    disk: DiskStats = described("What is saved below its pool.", DiskStats)
    transport: str | None = described("Of its rows; a heartbeat lacks it.", None)
    transfer_pid: int | None = described("Of its transfer process; a heartbeat lacks it.", None)
    transfer_restarts: int = metric(
        "transfer_restarts_total", "Restarts of the replica's transfer process."
    )
    transfer_failed_calls: int = metric(
        "transfer_failed_calls_total",
        "Calls to the replica's transfer process that failed or timed out.",
    )
    tracker_failures: int = metric(
        "tracker_failures_total",
        "Sessions with the tracker that failed, and claims and figures that it did not get.",
    )


@dataclass(kw_only=True)
class ReplicaStatus(ReplicaStats):
    """`ReplicaStats`, and what the tracker knows of the replica.

    `replica` is xinference's name for it, `incarnation` vLLM's engine id, `address` that of its
    actor. Replicas share within a `namespace`. `serves`: peers can fetch from it now. `stale`: it
    did not answer, and its stats are those of its last heartbeat. `draining`: it gets no more
    requests, and will be removed. `sequence` is the number of its last publication. `raw` is the
    server's answer.
    """

    incarnation: str
    address: str
    namespace: str
    serves: bool = True
    replica: str = ""
    holdings: int = metric("published_chunks", "Chunks that the replica offers to peers.")
    stale: bool = False
    draining: bool = False
    sequence: int = 0
    raw: dict[str, Any] = field(default_factory=dict, repr=False, metadata=NOT_SENT)

    def __post_init__(self) -> None:
        self.replica = self.replica or self.incarnation


@dataclass
class TrackerStats:
    """`watches` are calls that wait for news now."""

    dropped: int = metric(
        "tracker_dropped_chunks_total",
        "Chunks that the tracker does not list because a replica published too many.",
    )
    refused: int = metric(
        "tracker_refused_total",
        "Calls beyond the tracker's limits: joins, watches, reports and claims.",
    )
    watches: int = 0


CHOICES = ("local", "fetch", "compute", "backlog", "prefill")
"""Why a replica is chosen: see `routing.route.Choice`."""


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


@dataclass
class RoutingStats:
    """`mode` is "auto", "backlog" or "off"; empty before the first replica has reported its load.

    `loads` has the replicas whose load is known now, `choices` the requests that were sent, by
    reason, and `replicas` the same by xinference's name for the replica. A request that is `moved`
    is sent again, and counts twice. `first_bytes` compares the times until the first byte of
    streamed answers with their forecasts, by reason; `decodes` the times from there to the last.
    """

    mode: str = ""
    loads: dict[str, KnownLoad] = field(default_factory=dict)
    choices: dict[str, int] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)
    waiting: int = metric(
        "routing_waiting_requests",
        "Requests that wait now because all replicas are at their limit.",
    )
    waited: int = metric("routing_waits_total", "Requests that waited until a replica took them.")
    waited_s: float = metric("routing_wait_seconds_total", "Time that these requests waited.")
    refused: int = metric(
        "routing_refused_total",
        "Requests that were refused because too many waited, or that waited for too long.",
    )
    moved: int = metric(
        "routing_moved_total", "Requests sent to another replica because theirs was lost."
    )
    failed_prefills: int = metric(
        "routing_failed_prefills_total",
        "Prefills that a prefill replica was to do for another one and that failed.",
    )
    unrouted: int = metric(
        "unrouted_requests_total",
        "Requests that went to the replicas in turn: routing was off, or no load was known.",
    )
    failures: int = metric(
        "routing_failures_total",
        "Times that the router could not ask the tracker what is new, or choose a replica.",
    )
    first_bytes: dict[str, Predictions] = field(default_factory=dict)
    decodes: Predictions = field(default_factory=Predictions)

    def sent(self, reason: str, replica: str) -> None:
        """A request was sent to a replica."""
        self.choices[reason] = self.choices.get(reason, 0) + 1
        self.replicas[replica] = self.replicas.get(replica, 0) + 1

    def answered(self, reason: str, predicted: float, actual: float) -> None:
        """The first byte of a streamed answer came after `actual` seconds."""
        self.first_bytes.setdefault(reason, Predictions()).observe(predicted, actual)


PREFIX_STATES = ("kept", "computing", "waiting", "failed")


@dataclass(kw_only=True)
class ModelStatus:
    """How the replicas of a model share. `raw` is the server's answer."""

    model_uid: str = field(metadata=about("The model."))
    enabled: bool = field(metadata=about("The operator's switch."))
    replicas: tuple[ReplicaStatus, ...] = field(metadata=about("By name."))
    totals: Totals = field(metadata=about("Counters, summed over the replicas."))
    tracker: TrackerStats = described("Of the tracker.", TrackerStats)
    routing: RoutingStats = described("By the process that answered.", RoutingStats)
    prefix_states: dict[str, int] = described(
        "How many named prefixes are in each of `PREFIX_STATES`.", dict
    )
    prefix_file_failures: int = described(
        "How often the file of all models' names could not be read or written.", 0
    )
    raw: dict[str, Any] = field(default_factory=dict, repr=False, metadata=NOT_SENT)
