"""Two real replicas behind a real API process, and its scrapes."""

from dataclasses import asdict
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.api import ApiProcess
from tests.harness.replicas import (
    CHUNK_TOKENS,
    DEADLINE,
    MODEL,
    ROW_BYTES,
    Outcome,
    ReplicaProcess,
    stored,
)
from xinference_xavier.protocol.load import Load, Serving
from xinference_xavier.serving.metrics import PREFIX
from xinference_xavier.stats.schema import FirstTokens

HITS = {"prefix_cache": 100, "local_pool": 200, "remote": 300, "computed": 400}
WAITS = FirstTokens()
WAITS.remote.observe(1.5)
COUNTED = {
    "hits": HITS,
    "first_tokens": asdict(WAITS),
    "requests": 10,
    "prefill_tokens_per_s": 1000.0,
    "seconds_saved": 0.5,
}
"""The counts that the replicas' engines report."""
IDLE = Load(Serving(CHUNK_TOKENS, ROW_BYTES), 0, 0.0, 0, rates=(0.001, 0.0, 0.01, 1e-9))
"""Their load."""


class Scraped:
    """The samples of one scrape."""

    def __init__(self, endpoint: str) -> None:
        answer = httpx.get(f"{endpoint}/metrics", timeout=DEADLINE)
        assert answer.status_code == 200, answer.text
        self.samples: dict[tuple[Any, ...], float] = {
            (sample.name.removeprefix(PREFIX), *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all series with these labels; 0 if there are none."""
        return sum(self._values(name, labels))

    def has(self, name: str, **labels: str) -> bool:
        """Whether there is a series with these labels."""
        return bool(self._values(name, labels))

    def _values(self, name: str, labels: dict[str, str]) -> list[float]:
        return [
            value
            for (its_name, *its_labels), value in self.samples.items()
            if its_name == name and labels.items() <= dict(its_labels).items()
        ]


class Scene(NamedTuple):
    api: ApiProcess
    donor: ReplicaProcess
    consumer: ReplicaProcess

    def scrape(self) -> Scraped:
        return Scraped(self.api.endpoint)

    def switch(self, enabled: bool) -> None:
        url = f"{self.api.endpoint}/v1/xavier/{MODEL}"
        assert httpx.patch(url, json={"enabled": enabled}, timeout=DEADLINE).status_code == 200

    def fetch(self, chunks: int = 4) -> Outcome:
        """Have the consumer fetch chunks that the donor holds."""
        keys = stored(self.consumer, self.donor, count=chunks)
        return self.consumer.fetch(self.donor.name, keys, DEADLINE)  # type: ignore[no-any-return]

    def fail_to_fetch(self) -> Outcome:
        """Have the consumer ask for chunks that the donor has just evicted."""
        keys = stored(self.consumer, self.donor, count=2)
        self.donor.forget(keys)
        return self.consumer.fetch(self.donor.name, keys, DEADLINE)  # type: ignore[no-any-return]


__all__ = ["COUNTED", "HITS", "IDLE", "ROW_BYTES", "Scene", "Scraped"]
