"""The reported figures of routing. They belong to one process that sends requests to replicas, and
begin at zero with it. For their form as JSON and their units, see `stats.schema`."""

from dataclasses import dataclass, field

from xinference_xavier.stats.metrics import metric

CHOICES = ("local", "fetch", "compute", "backlog", "prefill")
"""Why a replica is chosen: see `routing.choice.Choice`."""


@dataclass
class KnownLoad:
    """What a replica has to do now: seconds of prefill, and the `requests` that wait or run there.
    One at its request limit does not accept more. `role` is "any", "prefill" or "decode"."""

    backlog_s: float = 0.0
    requests: int = 0
    accepts: bool = True
    role: str = "any"


@dataclass
class RoutingStats:
    """`mode` is "auto", "backlog" or "off"; empty before the first replica has reported its load.

    `loads` has the replicas whose load is known now, `choices` the requests that were sent, by
    reason, and `replicas` the same by xinference's name for the replica. A request that is `moved`
    is sent again. Those that are `unrouted` go in turn.

    `forecasts` counts requests whose answers were streamed; `predicted_s`, `actual_s` and `error_s`
    are sums over them, of the time until the first byte.
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
        "routing_failures_total", "Times that the router could not ask the tracker what is new."
    )
    forecasts: int = metric(
        "routing_forecasts_total", "Streamed answers whose first byte had been predicted."
    )
    predicted_s: float = metric(
        "routing_predicted_seconds_total", "Predicted time until the first byte of these answers."
    )
    actual_s: float = metric(
        "routing_actual_seconds_total", "Time until the first byte of these answers."
    )
    error_s: float = metric(
        "routing_prediction_error_seconds_total", "Absolute error of these predictions."
    )

    def sent(self, reason: str, replica: str) -> None:
        """A request was sent to a replica."""
        self.choices[reason] = self.choices.get(reason, 0) + 1
        self.replicas[replica] = self.replicas.get(replica, 0) + 1

    def answered(self, predicted: float, actual: float) -> None:
        """The first byte of a streamed answer came after `actual` seconds."""
        self.forecasts += 1
        self.predicted_s += predicted
        self.actual_s += actual
        self.error_s += abs(predicted - actual)
