"""The page about a card's figures; measuring them needs a card."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.figures import figure, ratio
from benchmarks.gpu import Sample

MACHINE = {"card": "A Card", "vllm": "0.33.0", "torch": "2.11.0", "python": "3.12.3"}
HIT = Sample(cold=1.0, remote=0.2, local=0.1, pool=0.15, reused=1.0)
RATES = figure([10.0] * 5)
FOUND: dict[str, dict[str, Any]] = {
    "copies": {
        "bytes": 448 << 20,
        **{f"{way}_gb_per_s": RATES for way in ("store", "plain store", "load", "plain load")},
        "store/plain": ratio([9.0] * 5, [10.0] * 5),
        "load/plain": ratio([8.0] * 5, [10.0] * 5),
        "pinned_bytes": 16 << 30,
        "populate_s": 5.0,
        "pin_s": 2.5,
        "unpin_s": 1.5,
    },
    "mappings": {
        "bytes": 1 << 30,
        "ways": {
            "writable": {
                "register": 0,
                "is_pinned": True,
                "load_gb_per_s": RATES,
                "read_right": True,
                "store_gb_per_s": RATES,
            },
            "read-only": {"register": 801, "is_pinned": False},
        },
    },
    "hits": {
        "rounds": 5,
        "transports": {
            name: {
                "lengths": [gpu._row(9000, [HIT] * 5)],
                "used": {name: 20},
                "fetch_decisions": {"fetched": 20},
                "believed_tokens_per_s": 9100.0,
                "true_tokens_per_s": figure([9000.0] * 5),
            }
            for name in gpu.TRANSPORTS
        },
    },
    "no_hits": {
        "rounds": 5,
        "sharing_tokens_per_s": RATES,
        "alone_tokens_per_s": RATES,
        "sharing/alone": ratio([0.99] * 5, [1.0] * 5),
    },
}


def report_of(name: str, mode: str) -> dict[str, Any]:
    about = {"part": name, "mode": mode, "measured": "a day", "took_s": 60.0, "machine": MACHINE}
    return {**about, **FOUND[name]}


@pytest.mark.parametrize(
    ("name", "mode", "lines"),
    [
        (
            "copies",
            "",
            [
                "### Copies between card and pool",
                "| store | 10.00 (10.00–10.00) | 10.00 (10.00–10.00) | 0.90 (0.90–0.90) |",
                "Touching 16 GiB for the first time took 5.0 s, pinning them 2.5 s, giving them "
                "back 1.5 s (once).",
            ],
        ),
        (
            "mappings",
            "",
            [
                "### A pool of another process",
                "| writable | 0 | True | 10.00 (10.00–10.00) | True | 10.00 (10.00–10.00) |",
                "| read-only | 801 | False | – | – | – |",
            ],
        ),
        (
            "hits",
            "eager",
            [
                "### Hits, eager",
                "| 9000 | Gloo | 1000 (1000–1000) | 100 (100–100) | 150 (150–150) | 200 (200–200) "
                "| 5.00 (5.00–5.00) | 2.00 (2.00–2.00) | 1.00 (1.00–1.00) |",
            ],
        ),
        ("no_hits", "CUDA graphs", ["### Without hits, CUDA graphs"]),
    ],
)
def test_a_part_shows_its_figures_and_the_machine(name: str, mode: str, lines: list[str]) -> None:
    found = gpu.section(report_of(name, mode))
    assert "a day, 60 s; A Card, vLLM 0.33.0, torch 2.11.0." in found
    for line in lines:
        assert line in found.splitlines()


def test_the_page_keeps_the_text_before_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"# NVIDIA cards\n\n{gpu.HEADING}\nNothing yet.\n")
    monkeypatch.setattr(gpu, "PAGE", page)
    for modes in (["eager"], ["eager", "CUDA graphs"]):
        gpu.write_page({mode: report_of("hits", mode) for mode in modes})
        headings = [line for line in page.read_text().splitlines() if line.startswith("#")]
        assert headings == [
            "# NVIDIA cards",
            gpu.HEADING.strip(),
            *(f"### Hits, {mode}" for mode in modes),
        ]
        assert "Nothing yet" not in page.read_text()


def test_the_page_has_room_for_figures() -> None:
    assert gpu.PAGE.read_text().count(gpu.HEADING) == 1
