"""Compares this replica with its peers before it fetches from them or they from it.

The namespace lists what two replicas must have in common. In case the list has a hole, rows move
only between peers that computed the same ones: both sketch a chunk that both have computed.
Each replica computes canaries at its start: one of a chunk, by which two replicas trust each other,
and later a long one, by which they may stop. Where an engine cannot, it is the first chunk that two
replicas happen to have in common.

A replica whose sketch differs from that of the namespace's eldest member moves to the next
namespace, where it compares itself with whoever is there. So replicas that compute alike find each
other.

Threading: the replica's background loop. The scheduler thread may read `trusts_all`.
"""

import asyncio
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from xinference_xavier.errors import LinkError, shown
from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol.transfer import PROTOCOL_VERSION, check_version
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import ask, spawn, within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.stats.schema import ComparisonStats

logger = logging.getLogger(__name__)

Sketch = Mapping[str, tuple[str, Sequence[float]]]
"""The type of the numbers and samples of them, by layer."""

TOLERANCES = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1}
"""How far samples may be apart, relative to their size: far above what rounding does to deep
layers, far below what another layout does, which is more than 1."""
_COARSE = 0.3  # for types of 8 bits
_MAX_OWN = 1000  # chunks that may serve for a comparison
_MAX_TRIED = 100_000  # chunks that peers have not computed themselves
_MIN_PAUSE, _MAX_PAUSE = 0.05, 1.0  # seconds between two rounds
_DEADLINE = 5.0


class Difference(NamedTuple):
    layer: str
    amount: float  # relative; infinite if the layers cannot be compared


class ProbeResult(NamedTuple):
    """The result of a probe: with a `key`, the name of a canary's chunk, which is the same in all
    engines, the chunk's `sketch`.

    Without a key, the result of an audit: `donor` is where the rows came from (None: this engine),
    and `difference` how they differ from what the engine computes now (None: not at all). If the
    probe was `lost`, the engine did not compute it.
    """

    key: bytes | None
    sketch: Sketch
    donor: str | None = None
    difference: Difference | None = None
    lost: bool = False


def difference(own: Sketch, other: Sketch) -> Difference | None:
    """The first layer that differs by more than its tolerance, among those of which both have
    samples: one may lack a KV-cache group."""
    for layer, (dtype, samples) in own.items():
        if layer not in other:
            continue
        other_dtype, other_samples = other[layer]
        if (dtype, len(samples)) != (other_dtype, len(other_samples)):
            return Difference(layer, math.inf)
        amount = _distance(samples, other_samples)
        if amount > TOLERANCES.get(dtype, _COARSE):
            return Difference(layer, amount)
    return None


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    size = max(math.hypot(*one), math.hypot(*other))
    return math.dist(one, other) / size if size else 0.0


class Canary:
    """`sketch(key)` samples a chunk that this engine computed; without it, all peers are trusted.

    `differs(peer, difference, parts)` is called once for each peer that computes differently;
    `parts` if we leave the namespace because of it.
    """

    def __init__(
        self,
        incarnation: str,
        sketch: Callable[[bytes], Sketch | None] | None,
        mirror: Mirror,
        namespace: SharedNamespace,
        differs: Callable[[str, Difference, bool], None],
    ) -> None:
        self._incarnation = incarnation
        self._sketch = sketch
        self._mirror = mirror
        self._namespace = namespace
        self._differs = differs
        self._trusted: frozenset[str] = frozenset()
        self.differing: set[str] = set()
        """Members that compute differently."""
        self._own: OrderedDict[bytes, None] = OrderedDict()  # the latest last
        self._probes: dict[bytes, Sketch] = {}
        self._tried: set[tuple[str, bytes]] = set()
        self._compared: set[tuple[str, bytes]] = set()  # and found equal
        self._news = asyncio.Event()
        self.trusts_all = sketch is None
        self._log = RateLimitedLog(logger)
        self.stats = ComparisonStats()
        self._set_trusted(self._trusted)

    def probed(self, key: bytes, sketch: Sketch) -> None:
        """The engine has computed a canary's chunk, or some groups of it. Peers do the same, so it
        is not published."""
        self._probes[key] = {**self._probes.get(key, {}), **sketch}
        self.stats.canaries = len(self._probes)
        self._news.set()

    def reset(self) -> None:
        """The engine's weights may have changed: forget what it computed, and all comparisons."""
        self._probes.clear()
        self.stats.canaries = 0
        self._own.clear()
        self._tried.clear()
        self._compared.clear()
        self.differing.clear()
        self._set_trusted(frozenset())

    def distrust(self, peer: str, found: Difference, *, parts: bool = False) -> None:
        """Stop trusting `peer`, whose rows differ from ours. `parts`: we leave its namespace."""
        self._set_trusted(self._trusted - {peer})
        self.differing.add(peer)
        self.stats.differing += 1
        self.stats.peer, self.stats.layer = peer, found.layer
        self.stats.amount = min(found.amount, 1e9)  # JSON has no infinity
        self._differs(peer, found, parts)

    def doubt(self, peer: str) -> None:
        """Compare again: `peer` does not trust us, perhaps since a reset that we missed."""
        self._set_trusted(self._trusted - {peer})
        self._compared = {(name, key) for name, key in self._compared if name != peer}
        self._news.set()

    def trusts(self, peer: str) -> bool:
        return self._sketch is None or peer in self._trusted

    def members_changed(self, members: frozenset[str]) -> None:
        self._set_trusted(self._trusted & members)
        self.differing &= members
        self._tried = {(peer, key) for peer, key in self._tried if peer in members}
        self._compared = {(peer, key) for peer, key in self._compared if peer in members}
        self._news.set()

    def computed(self, keys: Iterable[bytes]) -> None:
        """This engine computed these chunks, and peers may copy them."""
        for key in keys:
            self._own[key] = None
            if len(self._own) > _MAX_OWN:
                self._own.popitem(last=False)
        self._news.set()

    def answer(
        self, version: object, namespace: str, peer: str, key: bytes, sketch: Sketch
    ) -> Sketch | None:
        """Our sketch for `peer`, which sends its own; None if we have not computed the chunk.

        Raises LinkError.
        """
        check_version(version)
        other = _checked(sketch)
        if namespace != self._namespace.current or peer not in self._mirror.peers.members:
            return None
        own = self._own_sketch(key)
        if own and other and own.keys() & other.keys():
            spawn(self._judge(peer, key, own, other))
        return own

    def _own_sketch(self, key: bytes) -> Sketch | None:
        return self._probes.get(key) or (self._sketch(key) if self._sketch is not None else None)

    async def run(self) -> None:
        """Compare with peers until cancelled."""
        while True:
            with suppress(TimeoutError):  # peers may have published something
                await within(_MAX_PAUSE, self._news.wait())
            self._news.clear()
            for peer in self._mirror.peers.members - self.differing:
                key = self._common_chunk(peer)
                if key is not None:
                    await self._compare(peer, key)
            await asyncio.sleep(_MIN_PAUSE)

    def _common_chunk(self, peer: str) -> bytes | None:
        """A chunk to compare: of a peer that is trusted already, only a canary's."""
        if peer in self._trusted:
            done = self._tried, self._compared
            new = (key for key in self._probes if not any((peer, key) in each for each in done))
            return next(new, None)
        bit = self._mirror.peers.set_of((peer,))
        published = (key for key in reversed(self._own) if self._mirror.full_set(key) & bit)
        keys = itertools.chain(self._probes, published)
        return next((key for key in keys if (peer, key) not in self._tried), None)

    async def _compare(self, peer: str, key: bytes) -> None:
        own = self._own_sketch(key)
        if own is None:  # it was evicted
            self._own.pop(key, None)
            return
        try:
            other = await self._ask(peer, key, own)
        except Exception as error:  # whatever it is, the peer is not trusted
            self._log.warn(peer, "cannot compare: peer=%s error=%r", peer, error)
            return
        if self._own_sketch(key) != own:  # a reset came in between
            return
        if other is None or not own.keys() & other.keys():
            if len(self._tried) >= _MAX_TRIED:
                self._tried.clear()
            self._tried.add((peer, key))
        else:
            await self._judge(peer, key, own, other)

    async def _judge(self, peer: str, key: bytes, own: Sketch, other: Sketch) -> None:
        if peer in self.differing:
            return  # it was faster
        found = difference(own, other)
        if found is None:
            if peer not in self._mirror.peers.members:
                return
            if key in self._probes:
                self._compared.add((peer, key))
            if peer in self._trusted:
                return
            self._set_trusted(self._trusted | {peer})
            logger.info("peer computes equal rows: incarnation=%s peer=%s", self._incarnation, peer)
            return
        # Also of one that has left meanwhile, perhaps because it was faster to find out.
        parts = peer == self._mirror.eldest
        self.distrust(peer, found, parts=parts)
        if parts:
            await self._namespace.part()

    async def _ask(self, peer: str, key: bytes, own: Sketch) -> Sketch | None:
        address = self._mirror.peers.address(peer)
        if address is None:
            raise LinkError("it has left")
        question = PROTOCOL_VERSION, self._namespace.current, self._incarnation, key, own
        return _checked(await ask(_DEADLINE, address, replica_uid(peer), "sketch", *question))

    def _set_trusted(self, trusted: frozenset[str]) -> None:
        self._trusted = trusted
        if self._sketch is not None:
            self._mirror.trust(trusted)
        self.trusts_all = self._sketch is None or trusted >= self._mirror.peers.members
        self.stats.compared = len(trusted)


def _checked(sketch: Any) -> Sketch | None:
    """Raises LinkError."""
    if sketch is None or (isinstance(sketch, dict) and all(map(_is_layer, sketch.items()))):
        return sketch
    raise LinkError(f"malformed sketch: {shown(sketch)}")


def _is_layer(item: tuple[object, object]) -> bool:
    match item:
        case (str(), (str(), [*samples])):
            return all(isinstance(each, float) and math.isfinite(each) for each in samples)
    return False
