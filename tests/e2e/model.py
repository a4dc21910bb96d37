"""A model under xinference, as end-to-end tests ask it, and what its tracker then knows."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import requests
import xoscar

from examples.documents import document, prompt, questions
from examples.local_cluster import (
    LAUNCH_TIMEOUT,
    ClusterError,
    Completion,
    LocalCluster,
    greedy,
)
from examples.processes import until
from tests.e2e.text_routes import COMPLETIONS, body_of
from tests.harness.remote import PATIENCE
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.addresses import reachable_address

CHUNK = 128
"""Tokens; also the block size."""
ROWS = 60
"""Rows of a document's table: about 3,000 tokens."""
TIMEOUT = 120.0
"""Seconds for an answer."""
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",  # in bfloat16, rounding decides a random model's near ties
    "max_model_len": 16384,
    "block_size": 128,
    "enable_xavier": True,
    "xavier_routing": "off",  # replicas answer in turn
    "xavier_pool_bytes": "512MiB",
    "xavier_min_fetch_tokens": 256,  # fetch however busy the machine is
}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll xinference, but not so often that polling keeps it busy."""
    assert until(condition, PATIENCE, interval=0.2), f"never came true: {what}"


def wait_for_engine(condition: Callable[[], bool], what: str) -> None:
    """The same, with time for an engine or a supervisor to start."""
    assert until(condition, LAUNCH_TIMEOUT, interval=0.5), f"never came true: {what}"


def question(seed: int, number: int = 0, *, rows: int = ROWS) -> str:
    """One of the questions about a document."""
    return prompt(document(seed, rows), questions(seed, rows)[number])


class Model:
    """The model `uid` of a cluster. Its replicas go by xinference's names: `first`, `second`."""

    def __init__(self, cluster: LocalCluster, uid: str) -> None:
        self.cluster = cluster
        self.endpoint = cluster.endpoint
        self.uid = uid
        self.first, self.second = (f"{uid}-rep{number}" for number in range(2))
        self._workers: dict[str, str] = {}  # kept, because a supervisor may be lost

    def launch(self, name: str = "small", *, replica: int = 2, **more: Any) -> None:
        """Launch a registered model; return when the replicas can fetch from each other."""
        self._workers.clear()
        self.cluster.launch(name, self.uid, replica=replica, **ARGUMENTS | more)
        self.wait_until_sharing(replica)

    # -- what is known of it ------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return self.cluster.xavier(self.uid)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What the tracker knows of each replica."""
        return {replica["replica"]: replica for replica in self.status()["replicas"]}

    def incarnations(self) -> set[str]:
        return {replica["incarnation"] for replica in self.status()["replicas"]}

    def loads(self) -> dict[str, dict[str, Any]]:
        """What the router knows of each replica."""
        known: dict[str, dict[str, Any]] = self.status()["routing"]["loads"]
        return known

    def is_gone(self) -> bool:
        """There is neither a model nor a tracker of this uid."""
        models = self.cluster.call("GET", "/v1/models")["data"]
        return all(model["id"] != self.uid for model in models) and not self.has_tracker()

    def has_tracker(self) -> bool:
        async def look() -> bool:
            address = reachable_address(self.cluster.supervisor_address())
            try:
                await xoscar.actor_ref(address, tracker_uid(self.uid))
            except xoscar.ActorNotExist:
                return False
            return True

        return asyncio.run(look())

    def is_sharing(self, count: int = 2, *, without: str = "") -> bool:
        """True if exactly `count` replicas have joined, all with a transfer process. The
        incarnation `without` must not be among them."""
        try:
            known = self.status()["replicas"]
        except ClusterError:  # no tracker, or no supervisor to ask for it
            return False
        return len(known) == count and all(
            each["serves"]
            and each["transfer_pid"]
            and not each["stale"]
            and each["incarnation"] != without
            for each in known
        )

    def wait_until_sharing(self, count: int = 2, *, without: str = "") -> None:
        wait_for_engine(
            lambda: self.is_sharing(count, without=without), f"{count} replicas can fetch"
        )

    # -- asking one of its replicas -----------------------------------------------------------

    def answer(self, replica: str, text: str, **more: Any) -> Completion:
        """The replica's greedy continuation, asked directly; needs no supervisor. `more` are
        parameters of the generation. Raises what the worker or the model raises."""
        if replica not in self._workers:
            for each in self.cluster.replicas(self.uid):
                self._workers[each["replica_model_uid"]] = each["worker_address"]
        options = greedy(**more)

        async def ask() -> Completion:
            worker = await xoscar.actor_ref(self._workers[replica], "worker")
            model = await worker.get_model(replica)
            begin = time.perf_counter()
            answer = json.loads(await model.generate(text, options, raw_params=dict(options)))
            return Completion.from_json(answer, time.perf_counter() - begin)

        return asyncio.run(asyncio.wait_for(ask(), TIMEOUT))

    def ask(self, replica: str, text: str, **more: Any) -> Completion:
        """The same; return when the tracker knows that it was answered."""
        before = self.replicas()[replica]["requests"]
        answer = self.answer(replica, text, **more)
        wait_until(
            lambda: self.replicas()[replica]["requests"] > before, f"{replica} has counted it"
        )
        return answer

    def compute(self, replica: str, text: str, **more: Any) -> Completion:
        """Have it compute a text that is new; return when the chunks are published."""
        before = self.replicas()[replica]["holdings"]
        answer = self.ask(replica, text, **more)
        assert answer.cached_tokens == 0
        held = before + answer.prompt_tokens // CHUNK
        wait_until(
            lambda: self.replicas()[replica]["holdings"] >= held,
            f"{replica} has published {held} chunks",
        )
        return answer

    def share(self, donor: str, consumer: str, text: str) -> Completion:
        """Have `donor` compute the text; `consumer` loads all whole chunks and answers alike."""
        cold = self.compute(donor, text)
        received = self.replicas()[consumer]["bytes_received"]
        hit = self.ask(consumer, text)
        assert self.replicas()[consumer]["bytes_received"] > received
        assert hit.cached_tokens == cold.prompt_tokens // CHUNK * CHUNK
        assert hit.tokens == cold.tokens
        return hit

    # -- asking any of them over REST ---------------------------------------------------------

    def complete(self, text: str, **more: Any) -> Completion:
        return self.cluster.complete(self.uid, text, **more)

    def post(
        self, text: str, tokens: int = 1, *, path: str = COMPLETIONS, **more: Any
    ) -> requests.Response:
        """Ask a text route; completions have as many tokens as were asked for."""
        if path == COMPLETIONS:
            more = {"ignore_eos": True, **more}
        answer = requests.post(
            f"{self.endpoint}{path}",
            json=body_of(path, self.uid, text, tokens, **more),
            headers={"anthropic-version": "2023-06-01"},
            timeout=TIMEOUT,
        )
        answer.raise_for_status()
        return answer


def cached_tokens(answer: requests.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
