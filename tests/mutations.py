"""Faults that a programmer could make, each in a copy of the package: unit tests must fail.

`python -m tests.mutations [NUMBER …]`, by default all of `MUTATIONS`. First the tests must pass
without any fault, as a test that fails anyway catches nothing. A run that takes longer than
`LONGEST` counts as caught: `make unit` would not end either, and a fault such as a lost wake-up
shows in no other way. A run that collects no test counts as not caught.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "xinference_xavier"
UNIT = "not process and not long and not gpu"
"""The tests of `make unit`."""
LONGEST = 600.0
"""Seconds of one mutation's tests, which take a few."""
FAILED = 1
"""pytest's exit status if tests ran and some failed."""


class Mutation(NamedTuple):
    """`old` occurs once in the package's `file`, and `new` takes its place. `harm` says what goes
    wrong for a user. Some of `tests` must fail."""

    file: str
    old: str
    new: str
    harm: str
    tests: tuple[str, ...]

    def mutated(self) -> str:
        """The file with the fault. Raises ValueError unless `old` occurs once."""
        text = (PACKAGE / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has this text {count} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)


MUTATIONS = (
    # -- never a wrong token -------------------------------------------------------------------
    Mutation(
        "pool/region.py",
        "(row, seed=xxhash.xxh3_64_intdigest(key))",
        "(row)",
        "a donor that sends another chunk's row is believed",
        ("tests/pool/test_region.py",),
    ),
    Mutation(
        "replica/neighbours.py",
        "if own.checksum(row.slot, row.key) != expected:",
        "if own.checksum(row.slot, row.key) is None:",
        "a row that was damaged at a neighbour is copied and used",
        ("tests/replica/test_sources.py",),
    ),
    Mutation(
        "pool/pool.py",
        "if row.state is _FILLING or row.pins:",
        "if row.pins:",
        "after a reset, a slot that is still being written gets another chunk",
        ("tests/pool/test_pool.py",),
    ),
    Mutation(
        "engine/request.py",
        "return self.shares and not (self.stale or (replaced and self.reuses))",
        "return self.shares and not (replaced and self.reuses)",
        "after a reset, running requests store what the former weights computed",
        ("tests/engine/test_resets.py",),
    ),
    Mutation(
        "engine/request.py",
        "void = self._void.intersection(rows) if success else {*rows}",
        "void = set[Row]() if success else {*rows}",
        "a chunk of which vLLM stored only some blocks becomes a hit",
        ("tests/engine/test_manager.py",),
    ),
    Mutation(
        "engine/adapters.py",
        "            if adapter.version == version:\n",
        "            if True:\n",
        "requests to an adapter that was replaced get rows of the former one",
        ("tests/engine/test_adapters.py",),
    ),
    Mutation(
        "engine/adapters.py",
        " and self.after.adapter is self.before.adapter",
        "",
        "what an adapter computed is shared as that of the files that have replaced it meanwhile",
        ("tests/engine/test_adapters.py",),
    ),
    Mutation(
        "engine/adapters.py",
        "self._cached[adapter.name] = None",
        "self._cached[adapter.name] = version",
        "blocks of an adapter that was replaced are stored as those of one that came later",
        ("tests/engine/test_adapters.py",),
    ),
    Mutation(
        "serving/rest.py",
        "return check_tenant(given if supplied is None else supplied.value)",
        "return check_tenant(given or (supplied.value if supplied else None))",
        "a client that writes another tenant's salt gets that tenant's prefixes",
        ("tests/serving/test_prefix_routes.py",),
    ),
    Mutation(
        "replica/namespace.py",
        "if self.durable is not None or self.announced != resets:",
        "if self.announced != resets:",
        "a replica that was not reset shares its old rows under the new weights' version",
        ("tests/replica/test_namespace.py",),
    ),
    Mutation(
        "replica/donor.py",
        "        if not self._peers.may_fetch(request.consumer):"
        "  # it may not know that we were reset\n"
        '            raise GrantRefusedError("not compared")\n',
        "",
        "a replica gets rows from a peer that was reset and may compute others",
        ("tests/replica/test_donor.py",),
    ),
    Mutation(
        "engine/worker_side.py",
        "        wait(copying)\n        return sum(copied.result() for copied in copying)\n",
        '        done, _ = wait(copying, return_when="FIRST_COMPLETED")\n'
        "        return sum(copied.result() for copied in done)\n",
        "a row is a hit while one of two threads still copies its blocks",
        ("tests/simulation/test_simulation.py",),
    ),
    Mutation(
        "engine/spec.py",
        '            "pages": note.pages,\n',
        "",
        "replicas whose kernels lay out pages differently use each other's rows",
        ("tests/engine/test_spec.py",),
    ),
    Mutation(
        "pool/pool.py",
        "            self._quarantine(row for row in rows if row.origin is not None)\n",
        "",
        "rows are used that arrive after a replica has left peers that compute others",
        ("tests/replica/test_fetcher.py",),
    ),
    Mutation(
        "replica/hot_chunks.py",
        "row.origin = row.replicated_from = donor",
        "row.replicated_from = donor",
        "rows of a warm join are saved, compared and kept as if computed here",
        ("tests/replica/test_hot_chunks.py",),
    ),
    Mutation(
        "engine/manager.py",
        "        self.probes.reset()\n",
        "",
        "after new weights, what was computed with the old ones still counts as compared",
        ("tests/engine/test_probes.py",),
    ),
    Mutation(
        "replica/disk.py",
        "        self.move(None)\n        self._sketches.clear()\n",
        "        self.move(None)\n",
        "the store of new weights is begun, or opened, by what the old ones computed",
        ("tests/replica/test_disk.py",),
    ),
    Mutation(
        "disk_store.py",
        "            if is_ours and checksum(row, key) == expected:\n",
        "            if is_ours:\n",
        "a row that is torn, or another chunk's, is read from the disk",
        ("tests/test_disk_store.py",),
    ),
    Mutation(
        "disk_store.py",
        "        folder.rename(removed)\n",
        "        removed = folder\n",
        "rows of a store that is being removed pass for those of the one begun after it",
        ("tests/test_disk_store.py",),
    ),
    Mutation(
        "disk_store.py",
        "        except DamagedNoteError:\n            remove(self.folder)\n            raise\n",
        "        except DamagedNoteError:\n            noted = value\n",
        "rows whose engine nobody knows are taken for those of the next",
        ("tests/test_disk_store.py",),
    ),
    Mutation(
        "replica/disk.py",
        " or self.state is DiskState.UNKNOWN:\n",
        ":\n",
        "rows of other weights are read where only a model's name is known",
        ("tests/replica/test_disk.py",),
    ),
    Mutation(
        "engine/connector.py",
        "        self._manager.on_weights_changed()\n",
        "",
        "after weights changed in place, blocks of the former ones are stored",
        ("tests/engine/test_resets.py",),
    ),
    Mutation(
        "replica/namespace.py",
        " or self.announced != resets:",
        ":",
        "a version that weights had before another change is taken for theirs",
        ("tests/replica/test_namespace.py",),
    ),
    Mutation(
        "engine/manager.py",
        "            if ambiguous:\n",
        "            if False:\n",
        "a prompt gets rows of another one, whose embeddings stand in other places",
        ("tests/engine/test_connector.py",),
    ),
    Mutation(
        "replica/peer_tier.py",
        "            background.namespace.announce_reset()\n        self.pool.reset()\n",
        "            pass\n"
        "        self.pool.reset()\n"
        "        if background is not None:\n"
        "            background.namespace.announce_reset()\n",
        "a row that is reserved during a reset gets what peers with the old weights send",
        ("tests/replica/test_peer_tier.py",),
    ),
    Mutation(
        "replica/peer_tier.py",
        "            background.post(background.canary.reset)\n",
        "",
        "after new weights, peers are still trusted for what the old ones computed",
        ("tests/replica/test_peer_tier.py",),
    ),
    Mutation(
        "replica/peer_tier.py",
        "            background.post(self.disk.reset)\n",
        "            pass\n",
        "after new weights, a disk is still used as that of the old ones",
        ("tests/replica/test_disk.py",),
    ),
    Mutation(
        "replica/donor.py",
        "if not (self._namespace.resets_done and self._peers.enabled):",
        "if not self._peers.enabled:",
        "during a reset, peers with the old weights get what the new ones computed",
        ("tests/replica/test_donor.py",),
    ),
    Mutation(
        "replica/canary.py",
        "JSON has no infinity\n        self._publisher.forget_foreign()",
        "JSON has no infinity\n        self._publisher.forget(lambda row: row.origin == peer)",
        "rows of a peer that computes others stay in use where they came through a third replica",
        ("tests/replica/test_canary.py",),
    ),
    Mutation(
        "replica/fetcher.py",
        "        if peer.name not in self._peers.trusted:\n"
        '            raise GrantRefusedError("not compared")\n',
        "",
        "rows are fetched from a peer with which nothing was compared",
        ("tests/replica/test_fetcher.py",),
    ),
    Mutation(
        "replica/transfer_process.py",
        "        _kill(child.process)\n        await child.exited\n",
        "        _kill(child.process)\n",
        "a slot gets another chunk while a process that hung still writes to it",
        ("tests/replica/test_transfer_process.py",),
    ),
    Mutation(
        "replica/canary.py",
        "        if report is not self.report:  # a reset may have come in between\n"
        "            return\n",
        "",
        "a replica is trusted because of what it computed before a reset",
        ("tests/replica/test_canary.py",),
    ),
    Mutation(
        "replica/canary.py",
        "        self._sketches.clear()\n",
        "",
        "after new weights, the tracker compares what the old ones computed",
        ("tests/replica/test_canary.py",),
    ),
    Mutation(
        "engine/probes.py",
        "if probe is era.running and probe.add(end, sketch):",
        "if probe is era.running and (probe.add(end, sketch) or True):",
        "replicas share that differ in the KV-cache group that is stored last",
        ("tests/engine/test_probes.py",),
    ),
    Mutation(
        "peers.py",
        "        self.is_compared = False\n",
        "        self.is_compared = getattr(self, 'is_compared', False)\n",
        "in another namespace, a replica trusts others before it is compared there",
        ("tests/replica/test_canary.py",),
    ),
    Mutation(
        "peers.py",
        "return self.is_compared and self.address(name) is not None",
        "return self.is_compared",
        "a peer that missed a reset gets what other weights compute",
        ("tests/replica/test_canary.py",),
    ),
    Mutation(
        "tracker/judge.py",
        "audited.get(other) or theirs.get(incarnation)",
        "audited.get(other)",
        "after a failed audit, the donor comes back and its rows, too",
        ("tests/tracker/test_judge.py",),
    ),
    Mutation(
        "tracker/judge.py",
        "            **self._firsts,\n",
        "",
        "what replicas are compared with drifts from one to the next",
        ("tests/tracker/test_judge.py",),
    ),
    Mutation(
        "tracker/journal.py",
        "            *(left for name, left in self._differed.items() if name != watcher),\n",
        "",
        "rows of a replica that computes others stay in use after it has left",
        ("tests/tracker/test_judge.py",),
    ),
    Mutation(
        "replica/disk.py",
        "        if namespace != self._namespace:  # it has changed meanwhile\n"
        "            await self._call(store.close)\n"
        "            return None\n",
        "",
        "what new weights compute is saved to the store of the old ones",
        ("tests/replica/test_disk.py",),
    ),
    Mutation(
        "transfer/links.py",
        " or progress.verified or isinstance(error, ChecksumError):",
        " or isinstance(error, ChecksumError):",
        "rows count twice after a link broke, and unverified ones become hits",
        ("tests/transfer/test_receiver.py",),
    ),
    Mutation(
        "replica/hot_chunks.py",
        "rows = pool.reserve(batch, redundant=None).rows",
        "rows = pool.reserve(batch).rows",
        "what the scheduler has just found is evicted for a warm join, and the engine ends",
        ("tests/replica/test_hot_chunks.py",),
    ),
    Mutation(
        "replica/hot_chunks.py",
        "        pool.unpin(arrived)  # together",
        "        pass  # together",
        "rows of a warm join are never evicted",
        ("tests/replica/test_hot_chunks.py",),
    ),
    Mutation(
        "engine/connector.py",
        "self._unflushed_steps = len(self._steps) + 1",
        "self._unflushed_steps = len(self._steps)",
        "a slot gets another chunk while a job from before a reset may write to it",
        ("tests/engine/test_resets.py",),
    ),
    Mutation(
        "engine/connector.py",
        "if self._unflushed_steps <= 0 and ended[0].tokens:",
        "if self._unflushed_steps <= 0:",
        "the same, where vLLM makes a step that no worker has to begin",
        ("tests/engine/test_resets.py",),
    ),
    Mutation(
        "engine/connector.py",
        "coordinator.enable_partial_hash_hits,\n",
        "coordinator.enable_partial_hash_hits and False,\n",
        "after new weights, chunks with a part that the old ones computed are stored",
        ("tests/engine/test_resets.py",),
    ),
    # -- rollback ------------------------------------------------------------------------------
    Mutation(
        "replica/peer_tier.py",
        "        for row in rows:\n            self.pool.abort(row)\n        return None",
        "        return None",
        "while the background thread is behind, fetches leave their slots filling for ever",
        ("tests/replica/test_peer_tier.py",),
    ),
    Mutation(
        "engine/fetches.py",
        "if fetch not in awaited or now > fetch.deadline + self.timeout:",
        "if fetch not in awaited:",
        "requests for which vLLM has no blocks keep what they fetched pinned without a limit",
        ("tests/engine/test_request.py",),
    ),
    Mutation(
        "replica/donor.py",
        "        self.expire(now)\n        consumer,",
        "        consumer,",
        "consumers that died leave a donor busy, and nobody fetches from it",
        ("tests/replica/test_donor.py",),
    ),
    Mutation(
        "engine/tier_lookup.py",
        "if request.pending and request.has_time(now):",
        "if request.pending:",
        "a request waits for a stalled donor beyond its deadline",
        ("tests/engine/test_tier_lookup.py",),
    ),
    # -- bounds, and input of strangers --------------------------------------------------------
    Mutation(
        "protocol/transfer.py",
        "0 <= min(slots) <= max(slots) < rows:",
        "0 <= min(slots) <= max(slots) <= rows:",
        "a peer asks for the row behind the last one, and the transfer process fails",
        ("tests/protocol/test_transfer.py",),
    ),
    Mutation(
        "transfer/links.py",
        "if not hmac.compare_digest(proof, prove(self._context.secret, link_id)):",
        "if not proof:",
        "whoever finds a transfer process gets rows, of whichever model",
        ("tests/transfer/test_sender.py",),
    ),
    # -- routing and roles ---------------------------------------------------------------------
    Mutation(
        "routing/forecast.py",
        "            if fetch + rest < alone:\n",
        "            if fetch:\n",
        "forecasts count on fetches where replicas compute, so requests go to the wrong replica",
        ("tests/world/test_choice.py",),
    ),
    Mutation(
        "frontend/model_router.py",
        "        if failure is Failure.LOST:\n            if route.moved:",
        "        if failure is not Failure.NOT_SERVING:\n            if route.moved:",
        "a request that two replicas refuse is lost, though a third one has a place",
        ("tests/serving/routing/test_text_routes.py",),
    ),
    Mutation(
        "frontend/model_router.py",
        "if self._queue.first is None and self._send(route):",
        "if self._send(route):",
        "new requests overtake those that wait, some of which are refused in the end",
        ("tests/world/test_queue.py",),
    ),
    Mutation(
        "engine/waiting.py",
        "        if wait.peer and not self._tier.can_load_from(wait.peer):\n"
        "            return False\n",
        "",
        "requests wait for a prefill replica that is gone",
        ("tests/engine/test_waiting.py",),
    ),
    Mutation(
        "protocol/load.py",
        "    if not hmac.compare_digest(signature, "
        '_signature(f"{replica}:{queue}:{seconds}", key)):\n'
        "        return None\n",
        "",
        "a client makes up an id, and its request holds up a replica for ten minutes",
        ("tests/protocol/test_load.py",),
    ),
    # -- named prefixes ------------------------------------------------------------------------
    Mutation(
        "tracker/names.py",
        "changed = replace(self.find(tenant, name), terms=terms, used=self._clock())",
        "changed = replace(self.find(tenant, name), terms=terms)",
        "a name whose lifetime is made shorter may end at once",
        ("tests/tracker/test_names.py",),
    ),
    Mutation(
        "tracker/names.py",
        "        self._prefixes = prefixes\n\n    async def _in_thread",
        "\n    async def _in_thread",
        "a name that was added is known to nobody before the next start",
        ("tests/tracker/test_names.py",),
    ),
    Mutation(
        "tracker/keeper.py",
        "                await self._check_budget(chunks, new.terms, new.tenant, new.name)\n",
        "                pass\n",
        "a hard prefix for which no replica has room is accepted, and never kept",
        ("tests/tracker/test_keeper.py",),
    ),
    Mutation(
        "tracker/keeper.py",
        "now >= self._joined_by and self._is_idle(incarnation)",
        "self._is_idle(incarnation)",
        "a new tracker has a prefix computed before the replica that keeps it has joined",
        ("tests/tracker/test_keeper.py",),
    ),
    # -- tracker and index ---------------------------------------------------------------------
    Mutation(
        "index.py",
        "            yield from self._keep(holder, frozenset())\n",
        "",
        "a new replica is asked for the chunks of one that has left",
        ("tests/tracker/test_journal.py",),
    ),
    Mutation(
        "peers.py",
        "if not (in_grace and peer.epoch != self._epoch):",
        "if True:",
        "when the tracker restarts, donors take back the grants of all fetches under way",
        ("tests/test_peers.py",),
    ),
    Mutation(
        "index.py",
        "            for name in self.members.keys() - named:\n",
        "            for name in ():\n",
        "after a tracker was restarted, peers that are gone are asked for their chunks",
        ("tests/test_index.py",),
    ),
    Mutation(
        "tracker/observers.py",
        "        seen = 0 if complete else seen\n",
        "",
        "after a supervisor's restart, routers do not learn of replicas that reported before",
        ("tests/tracker/test_observers.py",),
    ),
    # -- events, figures, commands, options ----------------------------------------------------
    Mutation(
        "tracker/log.py",
        "if self._lost.pop(name, None) is not None:",
        "if self._lost.pop(incarnation, None) is not None:",
        "no event says that a lost replica has recovered",
        ("tests/tracker/test_log.py",),
    ),
    Mutation(
        "engine/manager.py",
        "        if request.counted.prompt:\n            return\n",
        "",
        "prompts with a load count twice as prompt tokens",
        ("tests/engine/test_manager.py",),
    ),
    Mutation(
        "cli/tables.py",
        "if len(namespaces) > 1:",
        "if len(namespaces) > 2:",
        "`status` does not tell that two replicas share nothing",
        ("tests/cli/test_tables.py",),
    ),
    Mutation(
        "options.py",
        "if high - low + 1 < PORTS_PER_REPLICA:",
        "if high - low < PORTS_PER_REPLICA:",
        "a range of exactly as many ports as a replica needs is refused",
        ("tests/test_options.py",),
    ),
    # -- launches ------------------------------------------------------------------------------
    Mutation(
        "serving/launch/supervisor.py",
        "                scope.undo(_destroy_tracker, address, model_uid)\n",
        "",
        "a launch that fails leaves its tracker, and the model seems to share",
        ("tests/serving/launch/test_supervisor.py",),
    ),
    Mutation(
        "pool/pool.py",
        "                elif row.is_lent:\n                    self._forget(row)\n",
        "",
        "a hit is loaded from a neighbour's row that it has long reused",
        ("tests/engine/test_in_place.py",),
    ),
    Mutation(
        "replica/donor.py",
        "math.inf if in_place else now + self._lifetime",
        "now + self._lifetime",
        "a row changes under the load of a consumer that stood still for a while",
        ("tests/replica/test_donor.py",),
    ),
    Mutation(
        "replica/donor.py",
        "not (record.in_place or consumer in peers)",
        "consumer not in peers",
        "a row changes under the load of a consumer that has lost its lease",
        ("tests/replica/test_donor.py",),
    ),
    Mutation(
        "replica/fetcher.py",
        "            if not any(row.pins for row in fetch.rows):\n",
        "            if fetch.rows:\n",
        "a row changes under a load that takes longer than a moment",
        ("tests/replica/test_neighbours.py",),
    ),
    Mutation(
        "replica/neighbours.py",
        "if each.is_gone and not each.loans:",
        "if each.is_gone:",
        "an engine ends with its neighbour, whose rows it loads",
        ("tests/replica/test_neighbours.py",),
    ),
    Mutation(
        "replica/fetcher.py",
        "row.slot = neighbour.first + slot",
        "row.slot = slot",
        "own rows are loaded instead of a neighbour's",
        ("tests/replica/test_neighbours.py",),
    ),
    Mutation(
        "engine/manager.py",
        "if not is_near(key)",
        "if key",
        "each replica of a host keeps the same chunks",
        ("tests/engine/test_in_place.py",),
    ),
)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("number", nargs="*", type=int, help=f"from 1 to {len(MUTATIONS)}")
    numbers = parser.parse_args(words).number or range(1, len(MUTATIONS) + 1)
    if not 1 <= min(numbers) <= max(numbers) <= len(MUTATIONS):
        parser.error(f"there are {len(MUTATIONS)} mutations")
    chosen = {number: MUTATIONS[number - 1] for number in numbers}
    texts = {number: each.mutated() for number, each in chosen.items()}
    print("without a fault: the same tests", end=" … ", flush=True)
    tests = dict.fromkeys(test for each in chosen.values() for test in each.tests)
    status, said, seconds = _run({}, tests, longest=None)
    print(f"{'pass' if status == 0 else said} ({seconds:.0f} s)", flush=True)
    if status != 0:
        return 1
    missed = 0
    for number, each in chosen.items():
        print(f"{number:2}. {each.file}: {each.harm}", end=" … ", flush=True)
        status, said, seconds = _run({each.file: texts[number]}, each.tests, LONGEST)
        caught = status in (FAILED, None)
        missed += not caught
        print(f"{'caught by' if caught else 'NOT CAUGHT:'} {said} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


def _run(
    changed: dict[str, str], tests: Iterable[str], longest: float | None
) -> tuple[int | None, str, float]:
    """Run the tests with a copy of the package, some files of which are `changed`. Returns pytest's
    exit status (None if it took too long), a test that failed or what pytest said last, and
    seconds."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder, PACKAGE.name)
        shutil.copytree(PACKAGE, copy)
        for file, text in changed.items():
            (copy / file).write_text(text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        # The copy comes first: neither pytest nor the current folder puts the package before it.
        command += ["-o", "pythonpath=", "-m", UNIT, *tests]
        path = os.pathsep.join([folder, str(ROOT)])
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=longest)
                status = process.returncode
            except subprocess.TimeoutExpired:
                output, status = "a run that does not end", None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.M)
    said = failed[1] if failed else output.strip().rpartition("\n")[2]
    return status, said, time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
