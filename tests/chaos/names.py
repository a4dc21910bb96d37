"""Named prefixes in a chaos run: a real keeper and its store, whose replicas are the cluster's.

Hard names must not be lost while their replica lives and its weights stay, which each replica
watches itself (`Watch`); and whatever happened, all of them are back a while after the faults.

Threading: the keeper's loop is a thread of its own.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from examples.processes import until
from tests.harness.replicas import CHUNK_TOKENS, MODEL
from xinference_xavier.frontend.keeper import Keeper
from xinference_xavier.frontend.names import Names, Store
from xinference_xavier.frontend.prefix import Copies, NewPrefix, Retention, Terms
from xinference_xavier.stats.schema import KnownLoad

CHUNKS = 8
"""The length of each prefix; the smallest pool keeps three of them firmly."""
KEPT: dict[str, tuple[Retention, Copies]] = {
    "everywhere": ("hard", "all"),
    "somewhere": ("hard", 1),
    "here or there": ("soft", "all"),
}
COMPUTE_TIME = 5.0
"""Seconds for a replica to compute a prefix among its other requests."""
RETURN_TIME = 90.0
"""Seconds at rest until all hard names are back: the keeper looks every second, computes one at a
time, and tries again after pauses that double."""
_CLOSE_TIME = 10.0

Command = Callable[..., Any]
"""Asks the tracker, or a replica."""


class NamedPrefixes:
    """`tracker` commands the tracker that there is; `replicas` are commands by incarnation, and
    `computed` says which requests a replica has computed."""

    def __init__(
        self,
        folder: Path,
        tracker: Command,
        replicas: Callable[[], Mapping[str, Command]],
        computed: Callable[[str], list[str]],
    ) -> None:
        self._tracker = tracker
        self._replicas = replicas
        self._computed = computed
        self._names = Names(Store(folder / "prefixes.db"))
        self._keeper = Keeper(self._names, self._call, self._ask, self._loads)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-names")
        self._thread.start()
        self._run(self._names.load())

    def add(self) -> None:
        """The replicas are up and share."""
        for name, (retention, copies) in KEPT.items():
            terms = Terms(ttl=86400.0, copies=copies, retention=retention)
            self._run(self._keeper.add(MODEL, NewPrefix(name, "", {"prompt": name}, terms)))

    def missing(self) -> list[str]:
        """The hard names that are not kept, once they have had time to come back."""

        def lost() -> list[str]:
            names: list[str] = self._run(self._lost())
            return names

        until(lambda: not lost(), RETURN_TIME, interval=0.5)
        return lost()

    async def _lost(self) -> list[str]:
        reports = [self._keeper.report(prefix) for prefix in self._names.of(MODEL)]
        hard = [report for report in reports if report["retention"] == "hard"]
        assert len(hard) == sum(retention == "hard" for retention, _ in KEPT.values())
        return [f"{each['name']} is {each['state']}" for each in hard if each["state"] != "kept"]

    def close(self) -> None:
        self._run(self._keeper.close())
        self._run(self._names.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CLOSE_TIME)

    # -- what the keeper calls ----------------------------------------------------------------

    async def _call(self, model_uid: str, method: str, *args: Any, deadline: float = 10.0) -> Any:
        if method == "explain":
            tokens = CHUNKS * CHUNK_TOKENS
            return {
                "prompt_tokens": tokens,
                "chunk_tokens": CHUNK_TOKENS,
                "context_tokens": 2 * tokens,
            }
        return await asyncio.to_thread(self._tracker, method, *args)

    async def _ask(
        self, model_uid: str, replica: str, content: Mapping[str, Any], tenant: str, number: str
    ) -> None:
        command = self._replicas()[replica]
        await asyncio.to_thread(command, "compute", number, content["prompt"], CHUNKS)
        if not await asyncio.to_thread(
            until, lambda: number in self._computed(replica), COMPUTE_TIME, 0.1
        ):
            raise TimeoutError(f"{replica} has not computed {content['prompt']!r}")

    def _loads(self, model_uid: str) -> Mapping[str, KnownLoad]:
        """They rest, so that what is lost is computed at once."""
        return {incarnation: KnownLoad() for incarnation in self._replicas()}


class Watch:
    """The names at one replica: `lost` counts chunks of firm prefixes that were evicted.

    `held` returns how many chunks of each firm prefix are in the pool. It may only grow, until the
    weights change or a peer turns out to compute differently.
    """

    def __init__(self, held: Callable[[], Mapping[str, int]]) -> None:
        self._held = held
        self._most: dict[str, int] = {}
        self.lost = 0

    def look(self) -> None:
        now = self._held()
        self.lost += sum(
            max(0, count - now[name]) for name, count in self._most.items() if name in now
        )
        self._most = dict(now)

    def reset(self) -> None:
        self._most.clear()
