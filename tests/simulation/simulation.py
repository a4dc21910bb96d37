"""Runs one replica through random events, with what other threads do at random moments.

Everything that is random comes from one generator, so that a seed always gives the same run in one
process. Between processes, the order of Python's sets may differ, and with it some runs, unless
they have the same `PYTHONHASHSEED`:

    PYTHONHASHSEED=0 python -m tests.simulation 4711

prints what happened. A run ends when all requests have their answers, and checks that nothing is
left.
"""

import random
import tempfile
from collections import deque
from collections.abc import Callable

import pytest
from vllm.config import VllmConfig

from tests.simulation.adapters import NAMES
from tests.simulation.contents import BLOCK_TOKENS, PAGE_BYTES, VOCABULARY, Text
from tests.simulation.options import Options
from tests.simulation.peers import PEERS
from tests.simulation.replica import Asked, Replica
from xinference_xavier.engine.adapters import salted
from xinference_xavier.pool.region import ROW_ALIGNMENT

EVENTS = 100
"""Steps with random events in a run."""
LAST = 60
"""Events that a failure prints."""
_PATIENCE = 2000
"""Steps in a row in which nothing was computed, until requests hang."""


Mutation = Callable[[pytest.MonkeyPatch], None]
"""Breaks something."""


class SimulationError(AssertionError):
    """A run failed. The message says how to repeat it."""


class Simulation:
    """A run with these options, with a mutation or without."""

    def __init__(
        self,
        options: Options,
        config: VllmConfig,
        mutate: Mutation | None = None,
    ) -> None:
        self._options = options
        self._config = config
        self._mutate = mutate
        self._rng = random.Random(options.seed)
        self._events = deque[str](maxlen=LAST)
        self._asked = 0
        self._documents = [
            [self._rng.randrange(VOCABULARY) for _ in range(options.longest)] for _ in range(4)
        ]
        self.on_event: Callable[[str], None] = lambda _: None
        self.reads = 0

    def run(self) -> None:
        """Raises SimulationError."""
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            if self._mutate is not None:
                self._mutate(patch)
            patch.chdir(folder)
            self._replica = Replica(self._options, self._config, self._rng, patch, self._log)
            try:
                self._run()
            except Exception as error:
                events = "\n".join(self._events)
                raise SimulationError(
                    f"{error!r}\n{vars(self._options)}\nthe last events:\n{events}\n"
                    f"python -m tests.simulation {self._options.seed}"
                ) from error
            finally:
                self.reads = self._replica.runner.reads
                self._replica.close()

    def _log(self, event: str) -> None:
        self._events.append(event)
        self.on_event(event)

    def _run(self) -> None:
        rng, options, replica = self._rng, self._options, self._replica
        for _ in range(EVENTS):
            for likely, event in (
                (options.arrivals, self._ask),
                (options.aborts, self._abort),
                (options.resets, self._reset),
                (options.flushes, replica.flush),
                (options.forgets, self._forget),
                (0.2, self._change_peers),
                (0.05, self._join),
                (options.damages, self._damage),
                (0.05, self._replace_adapter),
                (options.upsets, replica.peers.upset),
            ):
                if rng.random() < likely:
                    event()
            self._step()
        self._finish()
        # Rows that jobs from before a reset used wait for a later job: see `Jobs`.
        self._asked += 1
        replica.ask(
            Asked(f"last-{self._asked}", Text([0] * options.longest), options.longest - 2, 2)
        )
        self._finish()
        self._wait(lambda: not replica.peers.granted)
        replica.check_at_rest()

    def _finish(self) -> None:
        replica, idle = self._replica, 0
        while replica.scheduler.has_requests() or replica.batches:
            before = replica.tokens
            self._step()
            idle = 0 if replica.tokens > before else idle + 1
            if idle > _PATIENCE:
                stuck = replica.stuck_in_vllm()
                if stuck is None:
                    raise AssertionError(f"requests hang: {set(replica.scheduler.requests)}")
                self._log(f"gives up {stuck}")
                replica.abort(stuck)
                idle = 0
        self._wait()

    def _wait(self, until: Callable[[], bool] = lambda: True) -> None:
        replica = self._replica
        for _ in range(_PATIENCE):
            replica.peers.answer()
            if replica.peers.is_at_rest() and not replica.sending and until():
                return
            replica.clock.now += 1.0
            replica.background()
        raise AssertionError("something goes on for ever")

    # -- steps --------------------------------------------------------------------------------

    def _step(self) -> None:
        """Fill the queue of batches, else take the oldest output, like vLLM's `EngineCore`."""
        replica, rng = self._replica, self._rng
        replica.peers.index.check_integrity()
        replica.pool.check_integrity()
        for lender in replica.peers.lenders.values():
            lender.pool.check_integrity()
        assert not replica.peers.differing, "a row changed while it was lent"
        while rng.random() < 0.5:
            replica.background()
        replica.clock.now += self._options.step_seconds * rng.uniform(0.1, 2.0)
        if replica.scheduler.has_requests() and len(replica.batches) < self._options.batches:
            replica.schedule()
            if len(replica.batches) < self._options.batches and rng.random() < 0.9:
                return
        if replica.batches:
            while rng.random() < 0.3:
                replica.background()
            replica.take_output()

    # -- events -------------------------------------------------------------------------------

    def _text(self) -> Text:
        """A prompt that shares its beginning with others: documents, and earlier conversations."""
        rng, longest = self._rng, self._options.longest
        if self._replica.asked and rng.random() < 0.3:
            earlier = rng.choice([*self._replica.asked.values()])
            tokens, salt = earlier.text.tokens[: earlier.prompt + earlier.answer], earlier.text.salt
        else:
            tokens, salt = rng.choice(self._documents), rng.choice((None, None, None, "salt"))
        tokens = tokens[: rng.randint(1, longest - 12)]
        tokens = tokens + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(6))]
        adapter = rng.choice((None, *NAMES)) if self._options.adapters else None
        return Text(tokens, salt, adapter)

    def _ask(self) -> None:
        """One request, or several for the same prompt at once."""
        text = self._text()
        prompt = len(text.tokens)
        for _ in range(self._rng.choice((1, 1, 1, 3))):
            self._asked += 1
            most = self._options.longest - prompt
            answer = min(most, self._rng.choice((1, 2, 6, 12, most)))
            self._log(f"asks r{self._asked}: {prompt} tokens of {text.adapter}, {answer} to answer")
            self._replica.ask(Asked(f"r{self._asked}", text, prompt, answer))

    def _abort(self) -> None:
        if requests := sorted(self._replica.scheduler.requests):
            req_id = self._rng.choice(requests)
            self._log(f"aborts {req_id}")
            self._replica.abort(req_id)

    def _reset(self) -> None:
        rng, replica = self._rng, self._replica
        if rng.random() < 0.5:  # as a pause does
            while replica.batches:
                replica.take_output()
        if rng.random() < 0.2:
            replica.load_weights()
        else:
            replica.reset(connector=True, running=rng.random() < 0.5)
        if rng.random() < 0.5:
            replica.peers.follow(replica.weights)

    def _forget(self) -> None:
        """vLLM's own prefix cache is reset, if no request runs, and ours. The weights stay."""
        self._replica.reset(connector=False, running=False)

    def _change_peers(self) -> None:
        """A peer has computed a prompt, or has evicted something, or all have new weights."""
        rng, peers, replica = self._rng, self._replica.peers, self._replica
        if peers.weights != replica.weights or not peers.is_ready:
            if rng.random() < 0.7:
                peers.follow(replica.weights)
            return
        peer = rng.choice(PEERS)
        if rng.random() < 0.2:
            held = peers.holdings[peer]
            peers.hold(peer, held - set(rng.sample(sorted(held), len(held) // 2)))
            return
        text = self._text()
        text.continue_to(self._options.longest // BLOCK_TOKENS * BLOCK_TOKENS)
        groups = replica.learn(text)
        digest = rng.choice(replica.files.digests[1:])
        length = rng.randint(1, max(1, max(len(keys) for keys in groups)))
        computed = {key for keys in groups for key in keys[:length] if rng.random() < 0.95}
        if text.adapter is not None:
            computed = {salted(key, digest) for key in computed}
        peers.hold(peer, peers.holdings[peer] | computed)

    def _join(self) -> None:
        peers = self._replica.peers
        held = sorted(peers.holdings[self._rng.choice(PEERS)])
        if held and peers.is_ready:
            peers.join(self._rng.sample(held, min(3, len(held))))

    def _damage(self) -> None:
        """Another replica, or a crash, has done something to a file on the disk."""
        rng = self._rng
        files = sorted(self._replica.peers.folder.rglob("*.row"))
        if not files:
            return
        file, other = rng.choice(files), rng.choice(files)
        content = file.read_bytes()
        match rng.choice(("removed", "cut off", "changed", "swapped")):
            case "removed":
                file.unlink()
            case "cut off":
                file.write_bytes(content[: len(content) // 2])
            case "changed":
                place = ROW_ALIGNMENT + rng.randrange(PAGE_BYTES)
                file.write_bytes(bytes(each ^ (n == place) for n, each in enumerate(content)))
            case "swapped":
                file.write_bytes(other.read_bytes())

    def _replace_adapter(self) -> None:
        """Somebody writes other files, and has the engine use them, or forgets that for a while."""
        rng, replica = self._rng, self._replica
        if self._options.adapters:
            name = rng.choice(NAMES)
            self._log(f"other files of {name}")
            replica.files.replace(name)
            if rng.random() < 0.7:
                replica.announce_adapter(name, in_place=rng.random() < 0.5)
