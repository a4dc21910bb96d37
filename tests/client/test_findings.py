"""What `doctor` finds in facts that are written down here; `test_doctor.py` has real processes."""

from typing import Any

import pytest

from xinference_xavier.client.doctor import Finding, diagnose
from xinference_xavier.runtime.host import process_info

HEALTHY: dict[str, Any] = {
    "transfer_address": "h:2",
    "config": {"transport": "auto"},
    "fingerprint_fields": {"weights": "the same"},
    "peers": {},
}
"""What a replica says of itself."""


def found_in(models: dict[str, Any], **processes: Any) -> list[Finding]:
    """The findings in a cluster whose processes are all like this one, but for those given."""
    info = process_info()
    alike = {"api": info, "supervisor": info, "workers": {"w": info}}
    return diagnose({**alike, **processes, "models": models})


def found(
    tracker: dict[str, Any] | None = None,
    check: dict[str, Any] | None = None,
    enabled: bool = True,
    replicas: int = 2,
    **figures: Any,
) -> list[Finding]:
    """The findings in a model with two replicas. What is not given of its tracker and of `m-0` is
    as in a healthy one."""
    replica = {"address": "h:1", "namespace": "n"}
    all_replicas = [
        {**replica, "incarnation": "a", "replica": "m-0", **figures},
        {**replica, "incarnation": "b", "replica": "m-1"},
    ]
    report = {
        "model_uid": "m",
        "enabled": enabled,
        "replicas": all_replicas[:replicas],
        "totals": {"hits": figures.get("hits", {"remote": 1}), "fetches": figures.get("fetches")},
        "tracker": tracker or {},
    }
    checks = {"a": {**HEALTHY, **(check or {})}, "b": HEALTHY}
    return found_in({"m": {"report": report, "self_checks": checks}})


EXTENSION = "XINFERENCE_EXTENSIONS=xinference_xavier:extension"
BARE = {"error": "it has no xavier_process_info"}


@pytest.mark.parametrize(
    ("processes", "where", "problem", "remedy"),
    [
        ({"supervisor": BARE}, "supervisor", "without this", f"{EXTENSION} xinference-supervisor"),
        ({"workers": {"w": BARE}}, "worker w", "without this", f"{EXTENSION} xinference-worker"),
        ({"workers": {}}, "workers", "none is registered", f"{EXTENSION} xinference-worker"),
        (
            {"api": {"missing": ["Ears are gone", "Supervisor.hear takes no sound"]}},
            "API",
            "lacks what it uses: Ears are gone; Supervisor.hear takes no sound",
            "pip install 'xinference>=4.1,<4.2' there, and restart it",
        ),
    ],
)
def test_processes_without_the_extension(
    processes: dict[str, Any], where: str, problem: str, remedy: str
) -> None:
    (finding,) = found_in({}, **processes)
    assert (finding.where, finding.grave) == (where, True)
    assert problem in finding.problem
    assert remedy in finding.remedy


def test_a_model_without_a_tracker() -> None:
    (finding,) = found_in({"m": {"error": "no tracker"}})
    assert finding.problem.startswith("its tracker is missing (no tracker)")
    assert finding.remedy.startswith("xinference terminate --model-uid m")


OTHER = {"fingerprint_fields": {"weights": "the same", "dtype": "bfloat16"}}
NO_PROCESS = {"transfer_address": None, "transfer_error": "no torch", "transfer_starts": 3}


@pytest.mark.parametrize(
    ("model", "where", "problem", "remedy"),
    [
        ({"replicas": 0}, "model m", "it has no replica, and sharing takes", "with --replica 2"),
        ({"replicas": 1}, "model m", "it has one replica, and sharing take", "with --replica 2"),
        ({"enabled": False}, "model m", "sharing is switched off", "switch m on"),
        ({"check": BARE}, "replica m-0", "does not answer at h:1 (it has no", "terminate --model"),
        ({"check": NO_PROCESS}, "replica m-0", "has no transfer process after 3 s", "--xavier_tr"),
        ({"address": "[::1]:1"}, "replica m-0", "other hosts cannot reach its ", "worker -H"),
        (
            {"namespace": "other", "check": OTHER},
            "replica m-1",
            "cannot share with m-0: they differ in dtype (bfloat16 there, None here)",
            "launch all replicas with the same arguments",
        ),
        ({"namespace": "other"}, "replica m-1", "has not shared with m-0 since", "weights m VERS"),
        (
            {"check": {"peers": {"b": "no link to h:1"}}},
            "replica m-0",
            "cannot fetch from m-1: no link to h:1",
            "open those of --xavier_port_range",
        ),
    ],
)
def test_what_keeps_replicas_from_sharing(
    model: dict[str, Any], where: str, problem: str, remedy: str
) -> None:
    (finding,) = found(**model)
    assert (finding.where, finding.grave) == (where, True)
    assert finding.problem.startswith(problem)
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("figures", "where", "problem", "grave"),
    [
        (
            {"vllm": "0.40.0", "vllm_untested": True},
            "replica m-0",
            "runs vLLM 0.40.0, with which sharing was never tested",
            False,
        ),
        (
            {"fetch_decisions": {"left_out": {"b": "timeout"}}},
            "replica m-0",
            "leaves out m-1, from which its latest fetches failed: timeout",
            False,
        ),
        (
            {"comparison": {"differing": 1, "peer": "b", "layer": "layers.3", "amount": 0.5}},
            "replica m-0",
            "computes different rows from m-1 for the same text: layers.3 by 50%",
            True,
        ),
        (
            {"comparison": {"audits": 9, "failed_audits": 2, "peer": "b", "layer": "layers.0"}},
            "replica m-0",
            "computed different rows from those fetched or loaded, 2 times",
            True,
        ),
        (
            {"verdict": "cannot compare", "verdict_reason": "its model generates nothing"},
            "replica m-0",
            "shares nothing, as its engine cannot compute a text to compare: "
            "its model generates nothing",
            True,
        ),
        (
            {"verdict": "not compared yet", "comparison": {"lost_probes": 2}},
            "replica m-0",
            "shares nothing yet, as its engine did not compute a text to compare in time, 2 times",
            True,
        ),
        (
            {"tracker": {"dropped": 9}},
            "model m",
            "its tracker has no room to list 9 chunks for peers to fetch",
            False,
        ),
    ],
)
def test_what_a_report_tells(
    figures: dict[str, Any], where: str, problem: str, grave: bool
) -> None:
    (finding,) = found(**figures)
    assert (finding.where, finding.problem, finding.grave) == (where, problem, grave)


NOTHING_SHARED = {"hits": {"computed": 1000}}
OWN = {"hits": {"computed": 1000, "prefix_cache": 200, "local_pool": 56}}


def prompts(**counts: int) -> dict[str, Any]:
    return {**NOTHING_SHARED, "prompts": {"seen": 100, **counts}}


@pytest.mark.parametrize(
    ("figures", "problem", "remedy"),
    [
        (
            NOTHING_SHARED,
            "no request has reached its replicas since they started",
            "xinference-xavier try m",
        ),
        (
            prompts(shorter=60, new=40),
            "60 of 100 prompts were shorter than a chunk, and whole chunks are shared",
            "--xavier_chunk_tokens",
        ),
        (
            prompts(new_salts=51, new=90),
            "51 of 100 prompts had a cache_salt of their own",
            "send one cache_salt with all requests of a tenant",
        ),
        (
            prompts(new=51, longest=112),
            "the first chunk of 51 of 100 prompts was new; the longest beginning that was reused "
            "has 112 tokens",
            "xinference-xavier explain m --prompt-file FILE",
        ),
        (
            {**prompts(), "fetch_decisions": {"computed": 7}},
            "7 beginnings that a peer held were computed, as that is faster",
            "xinference-xavier try m",
        ),
        (
            {**prompts(), **OWN},
            "all 256 tokens that were reused came from the replicas' own caches",
            "nothing is wrong",
        ),
    ],
)
def test_no_hits_that_are_right_have_their_reason(
    figures: dict[str, Any], problem: str, remedy: str
) -> None:
    (finding,) = found(**figures)
    assert (finding.where, finding.grave) == ("model m", False)
    assert finding.problem.startswith(problem)
    assert remedy in finding.remedy


def test_no_hits_that_are_wrong_are_grave() -> None:
    rolled_back = {"started": 9, "rolled_back": {"timeout": 7, "link": 2}}
    (finding,) = found(**prompts(new=40), fetches=rolled_back)
    assert finding.grave
    assert finding.problem == "none of 9 fetches brought what it was to: link (2), timeout (7)"
    assert "Why a fetch was rolled back" in finding.remedy
    assert found(**prompts(), fetches=rolled_back | {"committed": 1}) == []


@pytest.mark.parametrize(
    "figures", [prompts(), prompts(new=50), {"prompts": {"seen": 1, "new": 1}}]
)
def test_some_of_it_or_a_hit_needs_no_reason(figures: dict[str, Any]) -> None:
    assert found(**figures) == []


def test_a_pool_smaller_than_the_cache_and_the_size_that_all_its_engines_take() -> None:
    pool = {"rows": 1500, "row_bytes": 1 << 20, "cache_rows": 2048, "engines": 2}
    (finding,) = found(pool=pool)
    assert (finding.where, finding.grave) == ("replica m-0", False)
    assert "holds 73% of the KV cache that it backs, 1500 of 2048 chunks" in finding.problem
    assert finding.remedy.startswith(f"launch with --xavier_pool_bytes {4 << 30}, if")
    assert found(pool=pool | {"rows": 2048}) == []


def test_a_disk_that_fails_or_has_rows_of_others() -> None:
    disk = {"folder": "/disk", "state": "open", "failures": 3, "problem": "OSError: full"}
    (finding,) = found(disk=disk)
    assert (finding.where, finding.grave) == ("replica m-0", False)
    assert finding.problem == "the disk at /disk failed 3 times, at last with OSError: full"
    (finding,) = found(disk=disk | {"state": "computed differently"})
    assert "what is in /disk was computed differently" in finding.problem
    assert "xinference-xavier disk clear /disk" in finding.remedy
    (finding,) = found(disk=disk | {"state": "weights unknown", "problem": "no files"})
    assert finding.problem == "does not use the disk at /disk: no files"
    assert found(disk=disk | {"problem": ""}) == []


def test_shared_memory_is_required_where_it_is_impossible() -> None:
    config = {"transport": "shared_memory"}
    peers = {"b": "not on this host", "c": None}
    (finding,) = found(check={"config": config, "peers": peers})
    assert finding.problem == "cannot fetch from m-1: not on this host"
    assert finding.remedy == "launch with --xavier_transport auto"
