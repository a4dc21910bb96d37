"""What the manager counts, and how vLLM's own metrics get to know it."""

from dataclasses import dataclass, fields

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata

_PREFIX = "vllm:xavier_"


@dataclass
class Hits:
    """Prompt tokens by where their KV came from."""

    prefix_cache: int = 0
    local_pool: int = 0
    remote: int = 0
    computed: int = 0


_HELP = {
    "prefix_cache": "Prompt tokens found in vLLM's own prefix cache.",
    "local_pool": "Prompt tokens loaded from this replica's pool.",
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
        """What came since the last call; None for nothing, as after most steps."""
        if self._hits == self._reported:
            return None
        stats = OffloadingConnectorStats()
        for field in fields(Hits):
            total = getattr(self._hits, field.name)
            grown = total - getattr(self._reported, field.name)
            if grown:
                stats.increase_counter(f"{_PREFIX}{field.name}_tokens", grown)
                setattr(self._reported, field.name, total)
        return stats
