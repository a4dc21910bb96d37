"""Finds out why replicas do not share, and the remedy: what is wrong with them, and what there is
to share in their traffic.

Pure: `diagnose` examines what `serving.gateway` gathered.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from xinference_xavier.runtime.addresses import is_loopback, split_address
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import ModelStatus, ReplicaStatus

_EXTENSION = "XINFERENCE_EXTENSIONS=xinference_xavier:extension"

Info = Mapping[str, Any]


class Finding(NamedTuple):
    """A problem and its remedy. A `grave` one keeps replicas from sharing now."""

    where: str
    problem: str
    remedy: str
    grave: bool = True


def process_findings(cluster: Info) -> Iterator[Finding]:
    """Processes of xinference in which the extension does not run."""
    supervisor, workers = cluster["supervisor"], cluster["workers"]
    processes = [("supervisor", supervisor), ("API", cluster["api"])]
    processes += [(f"worker {address}", info) for address, info in workers.items()]
    for where, info in processes:
        if "error" in info:
            program = "xinference-worker" if where.startswith("worker") else "xinference-supervisor"
            yield Finding(
                where,
                f"runs without this extension, or another version ({info['error']})",
                f"stop it and start it with {_EXTENSION} {program} …",
            )
        elif missing := info.get("missing"):
            yield Finding(
                where,
                "the extension is off, because its xinference lacks what it uses: "
                f"{'; '.join(missing)}",
                "pip install 'xinference>=4.1,<4.2' there, and restart it",
            )
    reports_workers = "error" not in supervisor and not supervisor.get("missing")
    if reports_workers and not workers:
        yield Finding(
            "workers",
            "none is registered; the supervisor refuses workers whose extensions are not its own",
            f"start one with {_EXTENSION} xinference-worker …, and look at its log",
        )


_FEW_ROWS = 64
_FIELDS = 8  # that are named, if replicas differ in more
_OPEN_PORTS = (
    "let the hosts reach each other's ports: open those of --xavier_port_range and of "
    "net.ipv4.ip_local_port_range in the firewall, such as iptables -I INPUT -p tcp --dport "
    "LOW:HIGH -s <peer> -j ACCEPT"
)


class _Replica(NamedTuple):
    status: ReplicaStatus
    self_check: Info

    @property
    def where(self) -> str:
        return f"replica {self.status.replica}"


def diagnose(cluster: Info) -> list[Finding]:
    """All findings, the grave ones first."""
    findings = [*process_findings(cluster)]
    for model_uid, model in cluster["models"].items():
        findings += _model_findings(model_uid, model)
    return sorted(findings, key=lambda finding: not finding.grave)


def _model_findings(model_uid: str, model: Info) -> Iterator[Finding]:
    if "error" in model:
        yield Finding(
            f"model {model_uid}",
            f"its tracker is missing ({model['error']}); replicas make a new one within 15 s",
            f"xinference terminate --model-uid {model_uid}, and launch it again",
        )
        return
    status = read(ModelStatus, model["report"])
    unknown = {"error": "it has just joined"}
    replicas = [
        _Replica(replica, model["self_checks"].get(replica.incarnation, unknown))
        for replica in status.replicas
    ]
    yield from _switch(status)
    yield from _too_few(model_uid, replicas)
    yield from _namespaces(model_uid, replicas)
    yield from _addresses(replicas)
    yield from _traffic(status)
    yield from _tracker_is_full(status)
    names = {replica.incarnation: replica.replica for replica in status.replicas}
    for replica in replicas:
        yield from _untested(replica)
        yield from _pool(replica)
        yield from _disk(replica)
        yield from _comparison(replica, names)
        yield from _left_out(replica, names)
        if "error" in replica.self_check:
            yield Finding(
                replica.where,
                f"does not answer at {replica.status.address} ({replica.self_check['error']})",
                "look at its worker's log; if it stays silent: xinference terminate --model-uid "
                f"{model_uid}, and launch it again",
            )
            continue
        yield from _transfer(replica)
        yield from _links(replica, names)


def _switch(status: ModelStatus) -> Iterator[Finding]:
    if not status.enabled:
        yield Finding(
            f"model {status.model_uid}",
            "sharing is switched off",
            f"xinference-xavier switch {status.model_uid} on",
        )


def _too_few(model_uid: str, replicas: list[_Replica]) -> Iterator[Finding]:
    if len(replicas) < 2:
        yield Finding(
            f"model {model_uid}",
            f"it has {'one replica' if replicas else 'no replica'}, and sharing takes two",
            f"add one on xinference's web page; or: xinference terminate --model-uid {model_uid}, "
            "and launch it with --replica 2",
        )


def _traffic(status: ModelStatus) -> Iterator[Finding]:
    """Why nothing has come from a peer, if replicas may fetch: what the prompts were like."""
    uid, hits = status.model_uid, status.totals.hits
    if not status.enabled or len(status.replicas) < 2 or hits.remote:
        return
    where = f"model {uid}"
    if not any(replica.prompts.seen for replica in status.replicas):
        yield Finding(
            where,
            "no request has reached its replicas since they started, so there is nothing to share",
            f"send requests, or try it with two long prompts: xinference-xavier try {uid}",
            grave=False,
        )
        return
    reasons = [*_prompts(status), *_fetches(status)]
    own = hits.total - hits.computed
    if not reasons and own:
        yield Finding(
            where,
            f"all {own} tokens that were reused came from the replicas' own caches",
            "nothing is wrong: requests go to the replica that has their beginning; to see a copy "
            f"from another one: xinference-xavier try {uid}",
            grave=False,
        )
    yield from reasons


def _prompts(status: ModelStatus) -> Iterator[Finding]:
    """What keeps most prompts from sharing."""
    prompts = [replica.prompts for replica in status.replicas]
    seen, where = sum(each.seen for each in prompts), f"model {status.model_uid}"
    shorter, new = sum(each.shorter for each in prompts), sum(each.new for each in prompts)
    new_salts = sum(each.new_salts for each in prompts)
    if 2 * shorter > seen:
        yield Finding(
            where,
            f"{shorter} of {seen} prompts were shorter than a chunk, and whole chunks are shared",
            "nothing is wrong if prompts are that short; or launch with smaller "
            "--xavier_chunk_tokens",
            grave=False,
        )
    elif 2 * new_salts > seen:
        yield Finding(
            where,
            f"{new_salts} of {seen} prompts had a cache_salt of their own, and only those with "
            "the same salt share",
            "send one cache_salt with all requests of a tenant, or none",
            grave=False,
        )
    elif 2 * new > seen:
        longest = max(each.longest for each in prompts)
        yield Finding(
            where,
            f"the first chunk of {new} of {seen} prompts was new; the longest beginning that was "
            f"reused has {longest} tokens",
            "put first what prompts have in common (instructions, tools, documents) and last what "
            "differs (question, time, name); where one differs, says: xinference-xavier explain "
            f"{status.model_uid} --prompt-file FILE",
            grave=False,
        )


def _fetches(status: ModelStatus) -> Iterator[Finding]:
    """Peers held what prompts began with, and it did not come from there."""
    where, fetches = f"model {status.model_uid}", status.totals.fetches
    computed = sum(replica.fetch_decisions.computed for replica in status.replicas)
    if fetches.rolled_back and not fetches.committed:
        counts = (f"{reason} ({count})" for reason, count in sorted(fetches.rolled_back.items()))
        yield Finding(
            where,
            f"none of {fetches.started} fetches brought what it was to: {', '.join(counts)}",
            "look the reasons up in docs/troubleshooting.md, under 'Why a fetch was rolled back'",
        )
    elif computed and not fetches.started:
        yield Finding(
            where,
            f"{computed} beginnings that a peer held were computed, as that is faster by the "
            "replicas' measurements",
            f"nothing is wrong if it is: xinference-xavier try {status.model_uid} shows both "
            "times; else give the replicas a faster --xavier_transport or network",
            grave=False,
        )


def _namespaces(model_uid: str, replicas: list[_Replica]) -> Iterator[Finding]:
    """The replicas that answer in another namespace than the first, and the fields that
    differ."""
    answering = [replica for replica in replicas if "error" not in replica.self_check]
    for replica in answering[1:]:
        first = answering[0]
        if first.status.namespace == replica.status.namespace:
            continue
        theirs = first.self_check.get("fingerprint_fields", {})
        ours = replica.self_check.get("fingerprint_fields", {})
        differing = [
            f"{name} ({theirs.get(name)} there, {ours.get(name)} here)"
            for name in sorted({*theirs, *ours})
            if theirs.get(name) != ours.get(name)
        ]
        if differing:
            named = ", ".join(differing[:_FIELDS])
            more = f" and {len(differing) - _FIELDS} more" if len(differing) > _FIELDS else ""
            problem = f"cannot share with {first.status.replica}: they differ in {named}{more}"
            remedy = (
                f"xinference terminate --model-uid {model_uid}, and launch all replicas with the "
                "same arguments, files and versions"
            )
        else:
            problem = f"has not shared with {first.status.replica} since one of them was reset"
            remedy = f"reset both, then: xinference-xavier weights {model_uid} VERSION"
        yield Finding(replica.where, problem, remedy)


def _addresses(replicas: list[_Replica]) -> Iterator[Finding]:
    hosts = {replica.self_check.get("host") for replica in replicas} - {None}
    several = len(hosts) > 1 or len({_is_local(replica) for replica in replicas}) > 1
    for replica in replicas:
        if several and _is_local(replica):
            yield Finding(
                replica.where,
                f"other hosts cannot reach its address {replica.status.address}",
                "launch without xavier_host, and start supervisor and worker with -H and the "
                "host's own address: xinference-worker -H <address> …",
            )


def _is_local(replica: _Replica) -> bool:
    return is_loopback(split_address(replica.status.address)[0])


def _tracker_is_full(status: ModelStatus) -> Iterator[Finding]:
    if status.tracker.dropped:
        yield Finding(
            f"model {status.model_uid}",
            f"its tracker has no room to list {status.tracker.dropped} chunks for peers to fetch",
            "launch with a larger --xavier_chunk_tokens, or a smaller --xavier_pool_bytes",
            grave=False,
        )


def _comparison(replica: _Replica, names: Mapping[str, str]) -> Iterator[Finding]:
    found = replica.status.comparison
    peer = names.get(found.peer or "", found.peer)
    amount = f"{found.layer} by {found.amount:.0%}" if found.amount is not None else found.layer
    if found.failed_audits:
        yield Finding(
            replica.where,
            f"computed different rows from those fetched or loaded, {found.failed_audits} times",
            "restart it and the peer that its event AuditFailed names; check the memory of both",
        )
    elif found.differing:
        yield Finding(
            replica.where,
            f"computes different rows from {peer} for the same text: {amount}",
            "give both the same weights, processors and vLLM; until then they do not share",
        )
    elif replica.status.verdict == "cannot compare":
        yield Finding(
            replica.where,
            "shares nothing, as its engine cannot compute a text to compare: "
            f"{replica.status.verdict_reason}",
            "see docs/troubleshooting.md, under 'Why a replica does not share'",
        )
    elif replica.status.verdict == "not compared yet" and found.lost_probes:
        yield Finding(
            replica.where,
            f"shares nothing yet, as its engine did not compute a text to compare in time, "
            f"{found.lost_probes} times",
            "see its log; it tries again by itself, at least once an hour",
        )


def _left_out(replica: _Replica, names: Mapping[str, str]) -> Iterator[Finding]:
    for peer, reason in replica.status.fetch_decisions.left_out.items():
        yield Finding(
            replica.where,
            f"leaves out {names.get(peer, peer)}, from which its latest fetches failed: {reason}",
            "see the log of both for the cause; the replica tries again by itself, at least once a "
            "minute if anybody asks for what the peer holds",
            grave=False,
        )


def _pool(replica: _Replica) -> Iterator[Finding]:
    pool = replica.status.pool
    if 0 < pool.rows < _FEW_ROWS:
        yield Finding(
            replica.where,
            f"its pool holds only {pool.rows} chunks: one long prompt evicts all others",
            f"launch with --xavier_pool_bytes {pool.option_bytes(_FEW_ROWS * 4)} or more",
            grave=False,
        )
    elif pool.rows < pool.cache_rows:
        yield Finding(
            replica.where,
            f"its pool holds {pool.rows * 100 // pool.cache_rows}% of the KV cache that it backs, "
            f"{pool.rows} of {pool.cache_rows} chunks: it loses chunks that the cache still has",
            f"launch with --xavier_pool_bytes {pool.option_bytes(pool.cache_rows)}, if its host "
            "has that much free memory",
            grave=False,
        )


def _disk(replica: _Replica) -> Iterator[Finding]:
    disk = replica.status.disk
    if disk.state == "computed differently":
        yield Finding(
            replica.where,
            f"does not use the disk: what is in {disk.folder} was computed differently",
            f"if that was by an earlier machine or driver: xinference-xavier disk clear "
            f"{disk.folder} on its host",
            grave=False,
        )
    elif disk.state == "weights unknown":
        yield Finding(
            replica.where,
            f"does not use the disk at {disk.folder}: {disk.problem}",
            "launch the model from a folder on its host",
            grave=False,
        )
    elif disk.problem:
        yield Finding(
            replica.where,
            f"the disk at {disk.folder} failed {disk.failures} times, at last with {disk.problem}",
            "look at the kernel's log, the free space and the folder's owner on its host",
            grave=False,
        )


def _untested(replica: _Replica) -> Iterator[Finding]:
    if replica.status.vllm_untested:
        yield Finding(
            replica.where,
            f"runs vLLM {replica.status.vllm}, with which sharing was never tested",
            "launch without xavier_untested_vllm, or try a newer version of xinference-xavier",
            grave=False,
        )


def _transfer(replica: _Replica) -> Iterator[Finding]:
    check = replica.self_check
    if check["transfer_address"] is None:
        reason = check["transfer_error"] or "it is being started, or has just ended"
        yield Finding(
            replica.where,
            f"has no transfer process after {check['transfer_starts']} starts: {reason}",
            "launch with --xavier_transport auto; if that does not help, see why it fails there: "
            "python -c 'import xinference_xavier.transfer.transports.gloo'",
        )


def _links(replica: _Replica, names: Mapping[str, str]) -> Iterator[Finding]:
    for peer, reason in replica.self_check["peers"].items():
        if reason is not None:
            needs_memory = replica.self_check["config"]["transport"] == "shared_memory"
            yield Finding(
                replica.where,
                f"cannot fetch from {names.get(peer, peer)}: {reason}",
                "launch with --xavier_transport auto" if needs_memory else _OPEN_PORTS,
            )
