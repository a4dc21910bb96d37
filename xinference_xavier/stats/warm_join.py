"""What a new replica fetched before its first request. See `stats.schema`."""

from dataclasses import dataclass

from xinference_xavier.stats.metrics import metric


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
