"""`python -m benchmarks [PART …]`: measure the named parts, and write the report.

Without a name, all parts are measured but the long ones.
`--quick` measures less of each part, in about three minutes, to see whether they work. It writes
`build/bench-quick.json` and leaves the report and the page alone.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from importlib import import_module
from types import ModuleType
from typing import Any

from benchmarks import report

PARTS = {
    "transport": "rows over Gloo and shared memory, compared with raw TCP and memcpy",
    "fetch": "a whole fetch without an engine, compared with moving its bytes",
    "hit": "time to first token: computed, held locally, held by a peer",
    "hit_async": "the same with engines that schedule asynchronously, as on GPUs",
    "donors": "a prefix from one donor, and from two that divide its rows",
    "no_hits": "what sharing costs an engine that has nothing to share",
    "served": "the same with `vllm bench serve`",
    "scheduler": "what vLLM's scheduler thread spends on us",
    "tracker": "an index of a million keys, and how soon its updates arrive",
    "capacity": "what several pools hold together",
    "routing": "where requests should go: two traces replayed on 2 to 1,000 simulated replicas",
    "replay": "one of them through xinference with three replicas, routed and in turn",
    "roles": "prefill apart from decode, while others read their answers",
    "named": "hits through REST, questions about named documents, and names in full pools",
    "stampede": "one unknown prompt that reaches several replicas at once",
    "peers": "other ways to a prefix's KV cache",
    "growth": "a hit and the tracker with ten times as much",
}
LONG = {"routing", "replay", "roles"}
"""They take ten minutes and more each, so they are measured only where they are named."""


def _module(name: str) -> ModuleType:
    """Import a part only when it is needed: child processes of other parts run this module too."""
    return import_module(f"benchmarks.{name}")


def _quickly(module: ModuleType) -> None:
    for name, value in getattr(module, "QUICK", {}).items():
        setattr(module, name, value)


def main(names: list[str], *, quick: bool = False) -> None:
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"unknown part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    found: dict[str, Any] = {"parts": {}} if quick else report.load()
    file = report.QUICK if quick else report.REPORT
    try:
        for name in names or [name for name in PARTS if quick or name not in LONG]:
            print(f"[{name}] …", flush=True)
            module = _module(name)
            if quick:
                _quickly(module)
            began = time.monotonic()
            part = module.measure()
            report.add(found, name, part, time.monotonic() - began, file)
            print(module.markdown(part), flush=True)
    finally:  # what was measured is shown, even if a later part fails
        if not quick:
            known = found["parts"].keys() & PARTS.keys()  # others are of another version
            report.write_page(found, {name: _module(name) for name in known}, PARTS)
    print(file.relative_to(report.ROOT))
    if not quick:
        print(report.PAGE.relative_to(report.ROOT))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # end the engines too
    main(options.parts, quick=options.quick)
