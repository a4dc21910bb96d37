"""A server with accounts and `XINFERENCE_XAVIER_TENANTS=api_key`: each API key shares with itself,
over replicas, and with no other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from click.testing import CliRunner

from examples.local_cluster import (
    PASSWORD,
    REQUEST_TIMEOUT,
    USER,
    Completion,
    LocalCluster,
    greedy,
)
from tests.e2e.conftest import ROOT, launched
from tests.e2e.model import CHUNK, Model, question, wait_until
from xinference_xavier.cli.commands import main
from xinference_xavier.client import XavierClient

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Iterator[Model]:
    log = ROOT / "build" / "test-tenants.log"
    environment = {"PYTHONPATH": str(ROOT), "XINFERENCE_XAVIER_TENANTS": "api_key"}
    with LocalCluster(log, accounts=True, environment=environment) as cluster:
        cluster.register(model_folder, "small")
        with launched(cluster, "tenants") as model:
            yield model


def test_two_keys_share_nothing_and_one_shares_with_itself(model: Model) -> None:
    one, other = (
        model.cluster.call("POST", "/v1/admin/keys", {"name": name})["key"]
        for name in ("one", "other")
    )

    def ask(key: str, **more: object) -> Completion:
        answer = requests.post(
            f"{model.endpoint}/v1/completions",
            json={"model": model.uid, "prompt": question(1), **greedy(), **more},
            headers={"Authorization": f"Bearer {key}"},
            timeout=REQUEST_TIMEOUT,
        )
        answer.raise_for_status()
        return Completion.from_json(answer.json(), 0.0)

    def held(key: str, **more: str) -> list[bool]:
        with XavierClient(model.endpoint, key) as client:
            chunks = client.explain(model.uid, question(1), **more).chunks
        return [bool(chunk.holders) for chunk in chunks]

    first = ask(one)
    whole = first.prompt_tokens // CHUNK
    wait_until(lambda: held(one) == [True] * whole, "all of it is published")
    second = ask(one)  # the other replica's turn
    assert (first.cached_tokens, second.cached_tokens) == (0, whole * CHUNK)
    assert first.tokens == second.tokens
    for stranger in (ask(other), ask(other, cache_salt="a"), ask(one, cache_salt="a")):
        assert stranger.cached_tokens == 0
        assert stranger.tokens == first.tokens
    assert held(one, cache_salt="b") == [False] * whole


def test_an_operator_tries_whether_sharing_helps(model: Model) -> None:
    account = {"username": USER, "password": PASSWORD}
    token = model.cluster.call("POST", "/token", account)["access_token"]
    words = ["try", model.uid, "-e", model.endpoint, "-k", token, "--tokens", "1000"]
    tried = CliRunner().invoke(main, words)
    assert tried.exit_code == 0, tried.output
