"""Every way of moving rows delivers them and is compared with its reference."""

from __future__ import annotations

import pytest

from benchmarks import transport
from benchmarks.figures import MIN_SAMPLES

pytestmark = pytest.mark.process


def test_every_way_is_compared_with_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ROW_MIB", (1,))
    monkeypatch.setattr(transport, "PAIRS", (1,))
    monkeypatch.setattr(transport, "ROUNDS", MIN_SAMPLES)
    monkeypatch.setattr(transport, "BATCH_BYTES", 4 << 20)
    part = transport.measure()
    (row,) = part["rows"]
    assert (row["row_bytes"], row["pairs"]) == (1 << 20, 1)
    for name in ("gloo", "tcp", "gloo/tcp", "shared_memory", "memcpy", "shared_memory/memcpy"):
        assert row[name]["least"] > 0
        assert len(row[name]["samples"]) == MIN_SAMPLES
    lines = transport.markdown(part).splitlines()
    assert lines[-1].startswith("| 1 MiB | 1 | ")
    assert lines[-1].count("|") == lines[-3].count("|")
