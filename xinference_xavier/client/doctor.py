"""Why replicas do not share, or might not after the next restart, and the command that mends it.

Pure: `diagnose` looks at what `serving.cluster` gathered. Each check below knows one way in which a
cluster can be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from xinference_xavier.runtime.addresses import PORTS_PER_REPLICA, is_loopback, split_address

_EXTENSION = "XINFERENCE_EXTENSIONS=xinference_xavier:extension"
_COMMON = ("xinference-xavier", "xinference", "xoscar")
"""Packages of which every process must have the same version."""
_ENGINES = ("vllm", "torch")
_BYTE_CODE = "PYTHONDONTWRITEBYTECODE"
_FEW_ROWS = 64
_OPEN_PORTS = (
    "let the hosts reach each other's ports: launch with --xavier_port_range LOW-HIGH, "
    "and open that range in the firewall, such as iptables -I INPUT -p tcp --dport "
    "LOW:HIGH -s <peer> -j ACCEPT"
)

Facts = Mapping[str, Any]


class Finding(NamedTuple):
    """`grave`: it keeps replicas from sharing now."""

    grave: bool
    where: str
    problem: str
    remedy: str


class _Replica(NamedTuple):
    name: str
    model_uid: str
    report: Facts
    self_check: Facts


def diagnose(facts: Facts) -> list[Finding]:
    """What is wrong, the gravest first; empty if nothing is."""
    found = [*_of_the_cluster(facts)]
    for model_uid, model in facts["models"].items():
        found += _of_a_model(model_uid, model)
    return sorted(found, key=lambda finding: not finding.grave)


def _of_the_cluster(facts: Facts) -> Iterator[Finding]:
    yield from _extensions(facts)
    yield from _versions(facts)
    yield from _byte_code(facts)
    yield from _cancel_circles(facts)


def _of_a_model(model_uid: str, model: Facts) -> Iterator[Finding]:
    if "error" in model:
        yield _no_tracker(model_uid, model["error"])
        return
    replicas = [
        _Replica(
            each.get("replica", each["incarnation"]),
            model_uid,
            each,
            model["self_checks"].get(each["incarnation"], {"error": "it has just joined"}),
        )
        for each in model["report"]["replicas"]
    ]
    yield from _switch(model_uid, model["report"])
    yield from _too_few(model_uid, replicas)
    yield from _namespaces(model_uid, replicas)
    yield from _addresses(replicas)
    yield from _tracker_is_full(model_uid, model["report"])
    yield from _hooks(f"tracker of {model_uid}", model["report"]["tracker"]["hooks"])
    for replica in replicas:
        yield from _hooks(f"replica {replica.name}", replica.report["hooks"])
        if "error" in replica.self_check:
            yield _silent(replica)
            continue
        yield from _transfer(replica)
        yield from _ports(replica)
        yield from _links(replica, {other.report["incarnation"]: other.name for other in replicas})
        yield from _pool(replica)


# -- of the cluster --------------------------------------------------------------------------


def _extensions(facts: Facts) -> Iterator[Finding]:
    if "error" in facts["supervisor"]:
        yield Finding(
            True,
            "supervisor",
            f"it runs without this extension, or another version ({facts['supervisor']['error']})",
            f"stop it and start it with {_EXTENSION} xinference-supervisor …",
        )
    elif not facts["workers"]:
        yield Finding(
            True,
            "workers",
            "none is registered; one whose extensions are not the supervisor's is refused",
            f"start it with {_EXTENSION} xinference-worker …, and look at its log",
        )
    for address, worker in facts["workers"].items():
        if "error" in worker:
            yield Finding(
                True,
                f"worker {address}",
                f"it runs without this extension, or another version ({worker['error']})",
                f"stop it and start it with {_EXTENSION} xinference-worker …",
            )


def _versions(facts: Facts) -> Iterator[Finding]:
    """All others are compared with the supervisor, engines with the first one."""
    wanted = facts["supervisor"].get("versions", facts["api"]["versions"])
    for where, process in _processes(facts):
        for package in _COMMON:
            yield from _version(where, package, process["versions"].get(package), wanted[package])
    engines = [each for each in _processes(facts) if each[0].startswith("replica")]
    for package in _ENGINES:
        for where, process in engines[1:]:
            first = engines[0][1]["versions"].get(package)
            yield from _version(where, package, process["versions"].get(package), first)


def _version(where: str, package: str, found: str | None, wanted: str | None) -> Iterator[Finding]:
    if found != wanted and wanted is not None:
        yield Finding(
            True,
            where,
            f"has {package} {found}, where others have {wanted}",
            f"pip install '{package}=={wanted}' there, and start it again",
        )


def _byte_code(facts: Facts) -> Iterator[Finding]:
    for where, process in _processes(facts):
        if process["environment"].get(_BYTE_CODE):
            yield Finding(
                False,
                where,
                f"{_BYTE_CODE} is set: an engine takes three times as long to start",
                f"unset {_BYTE_CODE} before xinference is started there",
            )


def _cancel_circles(facts: Facts) -> Iterator[Finding]:
    for where, process in _processes(facts):
        if process.get("cancel_circles"):
            yield Finding(
                False,
                where,
                f"its xoscar {process['versions'].get('xoscar')} sends itself a cancelled call "
                "again and again, which takes up to a core",
                "start it again with -H and the host's own address in place of 0.0.0.0",
            )


def _processes(facts: Facts) -> Iterator[tuple[str, Facts]]:
    """Where, and what it told of itself; those that told nothing are left out."""
    parts = [("supervisor", facts["supervisor"]), ("API", facts["api"])]
    parts += [(f"worker {address}", each) for address, each in facts["workers"].items()]
    for model_uid, model in facts["models"].items():
        parts.append((f"tracker of {model_uid}", model.get("tracker", {})))
        self_checks = model.get("self_checks", {})
        for each in model.get("report", {}).get("replicas", ()):
            name = each.get("replica", each["incarnation"])
            parts.append((f"replica {name}", self_checks.get(each["incarnation"], {})))
    for where, each in parts:
        if "versions" in each:
            yield where, each


# -- of a model ------------------------------------------------------------------------------


def _no_tracker(model_uid: str, error: str) -> Finding:
    return Finding(
        True,
        f"model {model_uid}",
        f"its tracker is missing ({error}); replicas make it anew within 15 s of losing it",
        f"xinference terminate --model-uid {model_uid}, and launch it again",
    )


def _switch(model_uid: str, report: Facts) -> Iterator[Finding]:
    if not report["enabled"]:
        yield Finding(
            True,
            f"model {model_uid}",
            "sharing is switched off",
            f"xinference-xavier switch {model_uid} on",
        )


def _too_few(model_uid: str, replicas: list[_Replica]) -> Iterator[Finding]:
    if len(replicas) < 2:
        yield Finding(
            True,
            f"model {model_uid}",
            f"{'one replica' if replicas else 'no replica'} is there, and sharing takes two",
            f"curl -X POST ENDPOINT/v1/models/{model_uid}/replicas -H 'content-type: "
            """application/json' -d '{"replica": 1}'""",
        )


def _namespaces(model_uid: str, replicas: list[_Replica]) -> Iterator[Finding]:
    """Those that differ from the first, and in what."""
    for replica in replicas[1:]:
        first = replicas[0]
        ours, theirs = first.report["namespace"], replica.report["namespace"]
        if ours == theirs:
            continue
        fingerprint_fields = first.self_check.get("fingerprint_fields", {})
        others = replica.self_check.get("fingerprint_fields", {})
        differing = [
            f"{name} ({fingerprint_fields.get(name)} there, {others.get(name)} here)"
            for name in sorted({*fingerprint_fields, *others})
            if fingerprint_fields.get(name) != others.get(name)
        ]
        if differing:
            problem = f"cannot share with {first.name}: they differ in {', '.join(differing)}"
            remedy = (
                f"xinference terminate --model-uid {model_uid}, and launch all replicas with the "
                "same arguments, of the same files and versions"
            )
        else:
            problem = f"does not share with {first.name} since one of them was reset"
            remedy = (
                f"if their weights are the same: curl -X POST ENDPOINT/v1/xavier/{model_uid} "
                """-H 'content-type: application/json' -d '{"weights_version": "1"}'"""
            )
        yield Finding(True, f"replica {replica.name}", problem, remedy)


def _addresses(replicas: list[_Replica]) -> Iterator[Finding]:
    hosts = {replica.self_check.get("host") for replica in replicas} - {None}
    several = len(hosts) > 1 or len({_is_local(replica) for replica in replicas}) > 1
    for replica in replicas:
        if several and _is_local(replica):
            yield Finding(
                True,
                f"replica {replica.name}",
                f"its address {replica.report['address']} cannot be reached from other hosts",
                "launch without xavier_host, and start supervisor and worker with -H and the "
                "host's own address: xinference-worker -H <address> …",
            )


def _tracker_is_full(model_uid: str, report: Facts) -> Iterator[Finding]:
    if dropped := report["tracker"]["dropped"]:
        yield Finding(
            False,
            f"model {model_uid}",
            f"its tracker has no room to list {dropped} chunks, so no peer can fetch them",
            "launch with a larger --xavier_chunk_tokens, or a smaller --xavier_pool_bytes",
        )


def _hooks(where: str, hooks: Facts) -> Iterator[Finding]:
    if hooks["failed"] or hooks["dropped"]:
        yield Finding(
            False,
            where,
            f"xavier_hooks raised at {hooks['failed']} events and was too slow for "
            f"{hooks['dropped']}",
            "look for the first error in the log there, and make the function return quickly",
        )


def _is_local(replica: _Replica) -> bool:
    return is_loopback(split_address(replica.report["address"])[0])


# -- of a replica ----------------------------------------------------------------------------


def _silent(replica: _Replica) -> Finding:
    return Finding(
        True,
        f"replica {replica.name}",
        f"does not answer at {replica.report['address']} ({replica.self_check['error']})",
        f"look at its worker's log; if it stays so: xinference terminate --model-uid "
        f"{replica.model_uid}, and launch it again",
    )


def _transfer(replica: _Replica) -> Iterator[Finding]:
    if replica.self_check["transfer_address"] is None:
        why = replica.self_check["transfer_error"] or "it is being started, or has just ended"
        yield Finding(
            True,
            f"replica {replica.name}",
            f"has no transfer process, after {replica.self_check['transfer_starts']} starts: {why}",
            "launch with --xavier_transport auto; if that is not it, see why it fails there: "
            "python -c 'import xinference_xavier.transfer.transports.gloo'",
        )


def _ports(replica: _Replica) -> Iterator[Finding]:
    ports, free = replica.self_check["config"]["port_range"], replica.self_check["free_ports"]
    if replica.self_check["port_range_error"] is not None:
        yield Finding(
            True,
            f"replica {replica.name}",
            replica.self_check["port_range_error"],
            "launch with another --xavier_port_range LOW-HIGH",
        )
    elif free is not None and free < PORTS_PER_REPLICA:
        yield Finding(
            False,
            f"replica {replica.name}",
            f"of xavier_port_range={ports[0]}-{ports[1]} only {free} ports are free on its host, "
            f"and a replica that is started again needs {PORTS_PER_REPLICA}",
            f"ss -ltnp 'sport >= {ports[0]} and sport <= {ports[1]}' there, or launch with a wider "
            "--xavier_port_range LOW-HIGH",
        )


def _links(replica: _Replica, names: Mapping[str, str]) -> Iterator[Finding]:
    for peer, reason in replica.self_check["peers"].items():
        if reason is not None:
            demanded = replica.self_check["config"]["transport"] == "shared_memory"
            yield Finding(
                True,
                f"replica {replica.name}",
                f"cannot fetch from {names.get(peer, peer)}: {reason}",
                "launch with --xavier_transport auto" if demanded else _OPEN_PORTS,
            )


def _pool(replica: _Replica) -> Iterator[Finding]:
    pool = replica.report.get("pool", {})
    rows, row_bytes = pool.get("rows", 0), pool.get("row_bytes", 0)
    if 0 < rows < _FEW_ROWS:
        yield Finding(
            False,
            f"replica {replica.name}",
            f"its pool holds {rows} chunks only: one long prompt pushes out all others",
            f"launch with --xavier_pool_bytes {_FEW_ROWS * 4 * row_bytes} or more",
        )
