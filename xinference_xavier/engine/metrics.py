"""Passes the manager's `Hits` on to vLLM's own metrics."""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata

from xinference_xavier.stats.schema import HIT_SOURCES, Hits

_PREFIX = "vllm:xavier_"


_HELP = {
    "prefix_cache": "Prompt tokens found in vLLM's own prefix cache.",
    "local_pool": "Prompt tokens loaded from this replica's pool.",
    "disk": "Prompt tokens loaded from the host's disk.",
    "remote": "Prompt tokens loaded after being fetched from another replica.",
    "computed": "Prompt tokens computed.",
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    return {
        f"{_PREFIX}{source}_tokens": OffloadingCounterMetadata(documentation=text)
        for source, text in _HELP.items()
    }


class HitReporter:
    """Turns totals into the deltas that vLLM's stats carry."""

    def __init__(self, hits: Hits) -> None:
        self._hits = hits
        self._reported = Hits()

    def delta(self) -> OffloadingConnectorStats | None:
        """The increase since the last call; None after most steps, which increase nothing."""
        if self._hits == self._reported:
            return None
        stats = OffloadingConnectorStats()
        for source in HIT_SOURCES:
            total = getattr(self._hits, source)
            grown = total - getattr(self._reported, source)
            if grown:
                stats.increase_counter(f"{_PREFIX}{source}_tokens", grown)
                setattr(self._reported, source, total)
        return stats
