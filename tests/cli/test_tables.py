"""What people read, and when a remark appears below the figures."""

import io
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console, RenderableType

from xinference_xavier.cli.tables import (
    console,
    explanation_table,
    findings_list,
    model_table,
    models_table,
)
from xinference_xavier.client.doctor import Finding
from xinference_xavier.stats.answers import Explanation
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import FirstTokens, ModelStatus, ReplicaStatus, RoutingStats

MIB = 1 << 20
HITS = {"prefix_cache": 1000, "local_pool": 200, "disk": 0, "remote": 3000, "computed": 4200}
FIGURES: dict[str, Any] = {
    "hits": HITS,
    "requests": 7,
    "holdings": 12,
    "bytes_received": 3 * MIB,
    "fetches": {"started": 5, "committed": 3, "rolled_back": {"timeout": 2}},
}


def shown(view: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(view)
    return out.getvalue()


def replica(name: str, namespace: str = "n", **more: Any) -> dict[str, Any]:
    raw = {"incarnation": name, "replica": name, "address": "h:1", "namespace": namespace}
    return raw | FIGURES | more


CANNOT = {"verdict": "cannot compare", "verdict_reason": "its model generates nothing"}


def model(
    *replicas: dict[str, Any],
    enabled: bool = True,
    tracker: dict[str, Any] | None = None,
    routing: dict[str, Any] | None = None,
    **totals: Any,
) -> ModelStatus:
    raw = {
        "model_uid": "m",
        "enabled": enabled,
        "replicas": replicas,
        "totals": FIGURES | totals,
        "tracker": tracker or {},
        "routing": routing or {},
    }
    return read(ModelStatus, raw)


def cells(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if f"│ {name} " in line)
    return line.strip("│ ").split()[1:]


def test_brackets_of_names_and_reasons_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("[prod] system: unexpected [/INST]")
    assert capsys.readouterr().out == "[prod] system: unexpected [/INST]\n"


def test_each_replica_has_a_line_and_the_last_line_sums_them() -> None:
    pool = {"rows": 64, "ready": 14, "filling": 2, "row_bytes": MIB}
    text = shown(model_table(model(replica("m-0", pool=pool), replica("m-1"), holdings=24)))
    tokens = ["1,000", "200", "0", "3,000", "4,200"]
    figures = [*tokens, "50%", "7", "3.0", "MiB", "3", "2", "timeout"]
    assert cells(text, "m-0") == [*figures, "12", *["25%", "of", "64.0", "MiB"]]
    assert cells(text, "m-1") == [*figures, "12", "-"]
    assert cells(text, "all") == [*figures, "24"]
    assert "m, sharing on" in text
    assert " all " not in shown(model_table(model(replica("m-0"))))


def test_a_replica_that_drains_has_its_requests_beside_it() -> None:
    drains = replica("m-0", draining=True)
    routed = {"mode": "auto", "loads": {"m-0": {"requests": 3}}}
    assert "m-0 (draining, 3 requests left)" in shown(model_table(model(drains, routing=routed)))
    assert "m-0 (draining, ? requests left)" in shown(model_table(model(drains)))


def test_a_replica_that_does_not_answer_is_marked() -> None:
    text = shown(model_table(model(replica("m-0", stale=True), replica("m-1"))))
    assert "m-0 (no answer)" in text
    assert "m-1 (no answer)" not in text


def test_before_the_first_request_there_is_no_share() -> None:
    fresh = replica("m-0", hits=dict.fromkeys(HITS, 0), requests=0)
    assert cells(shown(model_table(model(fresh))), "m-0")[5] == "-"


@pytest.mark.parametrize(
    ("status", "remark"),
    [
        (model(), "No replica has joined yet."),
        (model(replica("a")), "One replica: nothing is shared until another is added."),
        (model(replica("a"), replica("b", "other")), "in 2 namespaces and share only within each"),
        (model(replica("a"), replica("b"), seconds_saved=12.34), "saved about 12.3 s"),
        (model(replica("a"), replica("b"), enabled=False), "sharing off"),
        (model(replica("a"), replica("b"), tracker={"dropped": 1234}), "no room to list 1,234"),
        (model(replica("a", **CANNOT), replica("b")), "a shares nothing, as its engine cannot"),
    ],
    ids=["none", "one", "apart", "saved", "off", "full", "cannot compare"],
)
def test_remarks_below_the_figures(status: ModelStatus, remark: str) -> None:
    assert remark in shown(model_table(status))
    healthy = shown(model_table(model(replica("a"), replica("b"))))
    assert remark not in healthy


def test_routing_has_a_line() -> None:
    counts = {"mode": "auto", "replicas": {"m-1": 1200, "m-0": 7}}
    sentence = "Routing auto: 7 requests to m-0, 1,200 requests to m-1."
    assert sentence in shown(model_table(model(replica("m-0"), routing=counts)))
    idle = shown(model_table(model(replica("m-0"), routing={"mode": "off"})))
    assert "Routing off: no requests yet." in idle
    assert "Routing" not in shown(model_table(model(replica("m-0")))), "of an older server"


def test_how_long_people_wait_has_a_line() -> None:
    waits = FirstTokens()
    for seconds in (0.03, 0.03, 4.0):
        waits.prefix_cache.observe(seconds)
    waits.computed.observe(1.5)
    sentence = (
        "Time to first token in seconds (median/90 %/99 %): prefix cache 0.04/4.10/4.91, "
        "computed 1.50/1.90/1.99."
    )
    assert sentence in shown(model_table(model(first_tokens=asdict(waits))))
    assert "first token" not in shown(model_table(model()))


def test_forecasts_are_shown_beside_what_happened() -> None:
    counted = RoutingStats(mode="auto")
    counted.answered("local", predicted=0.03, actual=1.5)
    sentence = (
        "First byte, forecast and actual, in seconds (median/90 %/99 %): local, predicted "
        "0.04/0.05/0.05, actual 1.50/1.90/1.99, error 1.50/1.90/1.99."
    )
    assert sentence in shown(model_table(model(routing=asdict(counted))))


def test_without_a_model_it_says_how_to_launch_one() -> None:
    assert "Launch one with two replicas and --enable_xavier true" in shown(models_table([]))


def explanation(held: list[bool], tokens: int) -> Explanation:
    chunks = [
        {"from": 10 * at, "to": 10 * at + 10, "replicas": {"a": "pool" if here else "none"}}
        for at, here in enumerate(held)
    ]
    return Explanation.from_json({"prompt_tokens": tokens, "chunk_tokens": 10, "chunks": chunks})


def table_of(answer: Explanation, **replica: Any) -> str:
    """The explanation of a replica."""
    names = {"incarnation": "a", "address": "h:1", "namespace": "n", "replica": "m-0"}
    return shown(explanation_table(answer, [read(ReplicaStatus, names | replica)]))


def test_a_prompt_shorter_than_a_chunk_has_no_picture() -> None:
    text = table_of(explanation([], 9), not_sharing="no peers")
    assert "9 tokens: 0 whole chunks of 10" in text
    *_, row, _, missing = text.splitlines()
    assert row.split() == ["m-0", "-", "no", "peers", "0"]
    assert missing.strip().startswith("Missing: it is shorter than a chunk of 10")


def test_a_long_prompt_is_drawn_with_several_chunks_per_character() -> None:
    """The picture has at most 64 characters."""
    held = [True] * 100 + [False] * 28
    held[99] = False
    *_, row, _, _ = table_of(explanation(held, 1280)).splitlines()
    assert row.split() == ["m-0", "■" * 49 + "▪" + "·" * 14, "990"]


def test_grave_findings_look_grave() -> None:
    replicas = [
        {
            "replica": "m-0",
            "incarnation": "a",
            "vllm": "0.32.0",
            "replaced_vllm": "==0.21.0",
            "from_environment": ["pool_bytes", "queue"],
        },
        {"incarnation": "b", "vllm": None},
    ]
    checks = {
        "a": {
            "linked_to": {"b": "gloo", "gone": "shared_memory"},
            "obstacles": {
                "b": {"shared_memory": "no room for it", "nixl": "no active RDMA port"},
                "gone": {},
            },
        },
        "b": {"error": "it has just joined"},
    }
    models = {
        "m": {"report": {"replicas": replicas}, "self_checks": checks},
        "lost": {"error": "no tracker"},
    }
    facts = {"models": models, "workers": {"w": {}, "x": {}}}
    versions = [
        "m: m-0 runs vLLM 0.32.0, and its definition asks for ==0.21.0",
        "m: m-0 has xavier_pool_bytes, xavier_queue from the environment",
        "m: b runs vLLM unknown",
        "m: m-0 from b by gloo, not shared_memory (no room for it), not nixl (no active RDMA port)",
        "m: m-0 from gone by shared_memory",
    ]
    healthy = [line.rstrip() for line in shown(findings_list([], facts)).splitlines()]
    assert healthy == ["No problems found (models: 2, workers: 2).", *versions]
    findings = [
        Finding("model m", "is broken", "mend it"),
        Finding("replica a", "is small", "make it larger", grave=False),
    ]
    assert [line.rstrip() for line in shown(findings_list(findings, facts)).splitlines()] == [
        "✗ model m: is broken",
        "  remedy: mend it",
        "! replica a: is small",
        "  remedy: make it larger",
        *versions,
    ]
