"""What `doctor` finds in the processes of a cluster: extension, versions and environment."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_EXTENSION = "XINFERENCE_EXTENSIONS=xinference_xavier:extension"
_COMMON = ("xinference-xavier", "xinference", "xoscar")
"""Packages that must have the same version in every process."""
_ENGINES = ("vllm", "torch")
_BYTE_CODE = "PYTHONDONTWRITEBYTECODE"

Info = Mapping[str, Any]


class Finding(NamedTuple):
    """`grave`: it keeps replicas from sharing now."""

    where: str
    problem: str
    remedy: str
    grave: bool = True


def process_findings(cluster: Info) -> Iterator[Finding]:
    yield from _extensions(cluster)
    yield from _versions(cluster)
    yield from _byte_code(cluster)
    yield from _cancel_circles(cluster)
    yield from _routing(cluster)


def _extensions(cluster: Info) -> Iterator[Finding]:
    workers = cluster["workers"]
    processes = [("supervisor", cluster["supervisor"], "xinference-supervisor")]
    processes += [(f"worker {host}", info, "xinference-worker") for host, info in workers.items()]
    for where, info, program in processes:
        if "error" in info:
            yield Finding(
                where,
                f"runs without this extension, or another version ({info['error']})",
                f"stop it and start it with {_EXTENSION} {program} …",
            )
    if not workers and "error" not in cluster["supervisor"]:
        yield Finding(
            "workers",
            "none is registered; the supervisor refuses workers whose extensions are not its own",
            f"start one with {_EXTENSION} xinference-worker …, and look at its log",
        )


def _routing(cluster: Info) -> Iterator[Finding]:
    if not cluster["api"].get("routes", True):
        yield Finding(
            "API process",
            "gives requests to the replicas in turn, because this xinference has no require_model",
            "pip install 'xinference>=4.0,<4.2' there, and restart it",
            grave=False,
        )


def _versions(cluster: Info) -> Iterator[Finding]:
    """Processes are compared with the supervisor, engines with the first engine."""
    expected = cluster["supervisor"].get("versions", cluster["api"]["versions"])
    engines = []
    for where, process in _processes(cluster):
        versions = process["versions"]
        for package in _COMMON:
            yield from _version(where, package, versions.get(package), expected[package])
        if where.startswith("replica"):
            engines.append((where, versions))
    for where, versions in engines[1:]:
        for package in _ENGINES:
            first = engines[0][1].get(package)
            yield from _version(where, package, versions.get(package), first)


def _version(
    where: str, package: str, found: str | None, expected: str | None
) -> Iterator[Finding]:
    if found != expected and expected is not None:
        yield Finding(
            where,
            f"has {package} {found}, but others have {expected}",
            f"pip install '{package}=={expected}' there, and restart it",
        )


def _byte_code(cluster: Info) -> Iterator[Finding]:
    for where, process in _processes(cluster):
        if process["environment"].get(_BYTE_CODE):
            yield Finding(
                where,
                f"{_BYTE_CODE} is set: an engine takes three times as long to start",
                f"unset {_BYTE_CODE} before starting xinference there",
                grave=False,
            )


def _cancel_circles(cluster: Info) -> Iterator[Finding]:
    for where, process in _processes(cluster):
        if process.get("cancel_circles"):
            yield Finding(
                where,
                f"its xoscar {process['versions'].get('xoscar')} sends a cancelled call to itself "
                "again and again, which takes up to one core",
                "restart it with -H and the host's own address instead of 0.0.0.0",
                grave=False,
            )


def _processes(cluster: Info) -> Iterator[tuple[str, Info]]:
    """Name and info of every process that answered."""
    processes = [("supervisor", cluster["supervisor"]), ("API", cluster["api"])]
    processes += [(f"worker {address}", info) for address, info in cluster["workers"].items()]
    for model_uid, model in cluster["models"].items():
        processes.append((f"tracker of {model_uid}", model.get("tracker", {})))
        self_checks = model.get("self_checks", {})
        for replica in model.get("report", {}).get("replicas", ()):
            name = replica.get("replica", replica["incarnation"])
            processes.append((f"replica {name}", self_checks.get(replica["incarnation"], {})))
    return ((where, info) for where, info in processes if "versions" in info)
