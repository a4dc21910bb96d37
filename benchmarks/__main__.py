"""`python -m benchmarks [PART …]`: measure the named parts, or all, and write the report.

`--quick` measures less of each part, to see whether they work. It writes
`build/bench-quick.json` and leaves the report alone.
"""

import argparse
import signal
import sys
import time
from importlib import import_module
from types import ModuleType

from benchmarks import bars, report

PARTS = {
    "transport": "rows over Gloo and NIXL, compared with raw TCP",
    "fetch": "a whole fetch without an engine, compared with moving its bytes",
    "hit": "time to first token: computed, held locally, held by a peer, asked for by all at once",
    "capacity": "how many prefixes the replicas of one host hold together",
    "disk": "rows on a local disk, compared with vLLM's file tier and with computing",
    "no_hits": "what sharing costs an engine that has nothing to share",
    "served": "the same with `vllm bench serve`",
    "scheduler": "what vLLM's scheduler thread spends on us",
    "tracker": "an index of a million keys, and how soon its updates arrive",
    "routing": "where requests should go: traces, sessions and common prompts on 2 to 64 replicas",
    "rounds": "sessions of many rounds on two real replicas, routed and in turn",
}


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
    file = report.QUICK if quick else report.REPORT
    found = report.load(file)
    for name in names or PARTS:
        print(f"[{name}] {PARTS[name]} …", flush=True)
        module = _module(name)
        if quick:
            _quickly(module)
        began = time.monotonic()
        part = module.measure()
        report.add(found, name, part, time.monotonic() - began, file)
        judged = bars.markdown(found["parts"][name]["bars"])
        print(f"{judged}{module.markdown(part)}\n", flush=True)
    print(file.relative_to(report.ROOT))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # end the engines too
    main(options.parts, quick=options.quick)
