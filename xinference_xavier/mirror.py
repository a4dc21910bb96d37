"""A copy of the index: which replicas hold a chunk, without a call.

The peers that hold a chunk are an integer, a set of their numbers (`Peers`). So a lookup, or the
search for the holders of a whole prefix, costs almost the same whatever the number of peers.

Threading: any thread may read at any time without a lock: a reader looks at one dictionary or one
attribute. All other methods are for one writing thread, that of the tracker's client, which can
apply an update in short pieces and let other threads run in between. A reader may see part of an
update. The mirror is only a hint anyway.

Memory: under 120 bytes a key (measured), because a key is known by its last 12 bytes: 64 bits of
its hash, and its group. Two keys that share them cost a fetch of a chunk that its donor lacks.
Equal sets of holders are one integer. At most `max_keys` keys are kept; beyond that, the keys
published or used least recently are dropped.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from struct import iter_unpack

from xinference_xavier.limits import LIMIT
from xinference_xavier.peers import Peer, Peers
from xinference_xavier.protocol.tracker import (
    INITIAL_SETTINGS,
    SHORT_KEY,
    Change,
    Comparison,
    Member,
    Update,
    Verdict,
    check_update,
)
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

MAX_SHARED = 100_000
"""Sets that are one object wherever they are held; beyond them each holder has its own."""
PIECE = 250
"""Keys of a piece: about an eighth of a millisecond."""
_SHARDS = 256
"""Dictionaries that keys are divided among by a byte of their hash, because a dictionary that grows
holds Python's lock for as long as it copies its entries."""

_SHORT = slice(-SHORT_KEY, None)  # made once: lookups are many
_Shards = list[dict[bytes, int]]


class Mirror:
    """What the replicas other than `incarnation` hold, as of `revision` of `epoch`.

    `enabled` is the operator's switch. Nothing can be fetched unless this replica `is_compared`.
    `differing` are the replicas that it has met and that compute something else, with how.
    """

    def __init__(self, incarnation: str, *, max_keys: int = 2_000_000) -> None:
        self.peers = Peers(incarnation)
        self.enabled = True
        self.settings = INITIAL_SETTINGS
        self._log = RateLimitedLog(logger)
        self._max_keys = max_keys
        self.clear()

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    # -- reading ------------------------------------------------------------------------------

    def usable_set(self, key: bytes) -> int:
        """The peers that `key` can be fetched from."""
        short = key[_SHORT]
        return self._shards[short[0]].get(short, 0) & self._usable

    def usable_run(self, keys: Sequence[bytes], among: int) -> tuple[int, int]:
        """The number of leading `keys` that one peer of the set `among` can send, and the set of
        peers that can send all of them: `among` if the number is 0. Quicker than key by key."""
        shards, common = self._shards, among & self._usable
        for count, key in enumerate(keys):
            short = key[_SHORT]
            having = common & shards[short[0]].get(short, 0)
            if not having:
                return count, common if count else among
            common = having
        return len(keys), common if keys else among

    def full_set(self, key: bytes) -> int:
        """The peers that hold `key`, even if nothing can be fetched from them."""
        short = key[_SHORT]
        return self._shards[short[0]].get(short, 0)

    def holders(self, key: bytes) -> tuple[str, ...]:
        """`usable_set` by name, for people."""
        return tuple(sorted(self.peers.names(self.usable_set(key))))

    def may_fetch(self, name: str) -> bool:
        """True if this peer can fetch from this replica. It knows its own verdict, which may be
        news to us, but not that we were reset, and left, while it stood still."""
        is_member = self.peers.address(name) is not None
        return self.is_compared and is_member and name not in self._distrusted

    def is_usable(self, peer: str) -> bool:
        """True if chunks can be fetched from `peer`, provided that it holds any."""
        return bool(self._usable & self.peers.set_of((peer,)))

    def differs(self, name: str) -> bool:
        """True if this peer is known to compute other rows than this replica."""
        return name in self.differing or name in self._distrusted

    @property
    def unlike(self) -> frozenset[str]:
        """The peers with which this replica will not share, as far as is known."""
        undecided = (Verdict.WAITING, Verdict.COMPARED)
        return frozenset(
            each.name
            for each in [*self.peers.values()]
            if each.name in self._distrusted or each.verdict not in undecided
        )

    @property
    def trusted(self) -> frozenset[str]:
        """The peers that compute what this replica computes."""
        return frozenset(each.name for each in [*self.peers.values()] if self._trusts(each))

    # -- writing ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything but the operator's switch."""
        self.epoch, self.revision = "", 0
        self.peers.clear()
        self._shards = _empty()
        self._size = 0
        self._usable = 0  # the set of peers that can be fetched from
        self._shared: dict[int, int] = {}
        self._roster: dict[str, Member] = {}  # with this replica
        self._met: dict[str, None] = {}  # incarnations that we may have rows of
        self.is_compared = False
        self.differing: dict[str, Comparison] = {}  # by incarnation
        self._distrusted: dict[str, None] = {}  # incarnations; they may leave and come back

    def set_compared(self, compared: bool) -> None:
        """Note whether this replica computes what others of its namespace compute."""
        self.is_compared = compared
        self._set_usable()

    def distrust(self, name: str) -> None:
        """Share nothing with this peer until we leave the namespace, whatever the tracker says."""
        _remember(self._distrusted, name)
        self._set_usable()

    def apply(self, update: Update) -> None:
        """Apply `update`, or raise ValueError and change nothing."""
        for _ in self.apply_in_pieces(update):
            pass

    def apply_in_pieces(self, update: Update) -> Iterator[None]:
        """Like `apply`, but other threads run between the iterator's items. The update is complete
        when the iterator is exhausted; if it is not, the same update, or a later one since the same
        revision, must follow."""
        check_update(update)
        touched = 0
        for keys in self._steps(update):
            touched += keys
            if touched >= PIECE:
                touched = 0
                yield

    def _steps(self, update: Update) -> Iterator[int]:
        """Yields how many keys each step has touched."""
        if update.settings.version >= self.settings.version:
            self.settings = update.settings
            self.enabled = update.settings.enabled
        if update.snapshot or update.members or update.left:
            self._apply_members(update)
        self.differing = {
            each.incarnation: each.comparison
            for each in update.differing
            if each.incarnation in self._met
        }
        self._set_usable()
        # Build a snapshot aside, so that readers never find it half empty.
        shards = _empty() if update.snapshot else self._shards
        if update.snapshot:
            self._size = 0
        fresh = {peer.name for peer in self.peers.values() if update.snapshot or not peer.is_listed}
        for change in update.changes:
            peer = self.peers.get(change.incarnation)
            if peer is not None and peer.address is not None:
                if change.replaces and peer.name not in fresh:
                    yield from self._remove_all(shards, ~peer.bit)
                fresh.discard(peer.name)
                yield from self._apply(shards, peer, change, update.key_bytes)
        absent = [each for each in self.peers.values() if each.address is None and each.is_listed]
        if absent and not update.snapshot:
            yield from self._remove_all(shards, ~sum(each.bit for each in absent))
        for peer in absent:
            peer.is_listed, peer.published = False, 0
            peer.stale.clear()
        self.peers.forget_absent()
        old, self._shards = self._shards, shards
        self._set_usable()
        self.epoch, self.revision = update.epoch, update.revision
        while update.snapshot and any(old):
            yield _free_latest(old)

    def _apply_members(self, update: Update) -> None:
        if update.snapshot:
            self._roster = {}
        for incarnation in update.left:
            self._roster.pop(incarnation, None)
        self._roster |= {member.incarnation: member for member in update.members}
        self.peers.follow(self._roster.values(), update.epoch)
        for name in self.peers:
            _remember(self._met, name)

    def record_stale(self, key: bytes, name: str, sequence: int) -> None:
        """Remove an entry: this peer does not hold `key`, and had published up to `sequence`.

        Publications up to `sequence` that arrive later do not bring it back, later ones do. If a
        later one has been applied already, it is newer than the answer, and the entry stays.
        """
        peer = self.peers.get(name)
        if peer is None or peer.address is None or sequence < peer.published:
            return
        short = key[_SHORT]
        self._remove(self._shards, ~peer.bit, (short,))
        peer.stale[short] = sequence
        if len(peer.stale) > LIMIT:
            del peer.stale[next(iter(peer.stale))]

    def used(self, keys: Iterable[bytes]) -> None:
        """These keys go last."""
        for key in keys:
            short = key[_SHORT]
            shard = self._shards[short[0]]
            if short in shard and self._moves:
                shard[short] = shard.pop(short)

    @property
    def _moves(self) -> bool:
        """True if order matters yet. Moving keys makes a dictionary grow."""
        return self._size > self._max_keys // 2

    def _set_usable(self) -> None:
        fetchable = (each.bit for each in self.peers.values() if each.serves and self._trusts(each))
        self._usable = sum(fetchable) if self.enabled else 0

    def _trusts(self, peer: Peer) -> bool:
        alike = peer.verdict is Verdict.COMPARED and peer.name not in self._distrusted
        return self.is_compared and alike

    def _apply(self, shards: _Shards, peer: Peer, change: Change, key_bytes: int) -> Iterator[int]:
        peer.is_listed = True
        for keys in _pieces(change.removed, key_bytes):
            self._remove(shards, ~peer.bit, keys)
            yield len(keys)
        for keys in _pieces(change.added, key_bytes):
            if stale := peer.stale:
                keys = [key for key in keys if stale.get(key, -1) < change.sequence]
            self._add(shards, peer.bit, keys)
            yield len(keys)
        peer.published = change.sequence
        if peer.stale:  # publications arrive in order: older ones than this no longer come
            peer.stale = {key: n for key, n in peer.stale.items() if n >= change.sequence}

    def _add(self, shards: _Shards, bit: int, keys: Iterable[bytes]) -> None:
        wider: dict[int, int] = {}
        moves = self._moves
        for key in keys:
            shard = shards[key[0]]
            held = shard.get(key, 0)
            if not held:
                if self._size >= self._max_keys:
                    self._drop(shards, key[0])
                    shard = shards[key[0]]
                self._size += 1
            elif moves:
                del shard[key]
            held_now = wider.get(held)
            if held_now is None:
                held_now = wider[held] = self._one(held | bit)
            shard[key] = held_now

    def _drop(self, shards: _Shards, first: int) -> None:
        """Make room. Keys are spread evenly, so that any shard's oldest are about the oldest."""
        places = ((first + n) % _SHARDS for n in range(_SHARDS))
        place = next(place for place in places if shards[place])
        count = len(shards[place]) // 16 + 1
        shards[place] = dict(islice(shards[place].items(), count, None))
        self._log.warn("full", "no room for the chunks of peers: max_keys=%d", self._max_keys)
        self._size -= count

    def _remove(self, shards: _Shards, kept: int, keys: Iterable[bytes]) -> None:
        """Only the set `kept` may still hold these keys."""
        narrower: dict[int, int] = {}
        for key in keys:
            shard = shards[key[0]]
            held = shard.get(key, 0)
            held_now = narrower.get(held)
            if held_now is None:
                held_now = narrower[held] = self._one(held & kept)
            if held_now:
                shard[key] = held_now
            elif held:
                del shard[key]
                self._size -= 1

    def _remove_all(self, shards: _Shards, kept: int) -> Iterator[int]:
        # Rare, so a pass over all keys is cheaper than keeping a set of keys for each peer.
        for shard in shards:
            yield len(shard)
            self._remove(shards, kept, [key for key, held in shard.items() if held & ~kept])

    def _one(self, peers: int) -> int:
        """The same set as one object: with hundreds of peers, each takes 60 bytes."""
        if len(self._shared) >= MAX_SHARED:
            self._shared = {}
        return self._shared.setdefault(peers, peers)


def _remember(names: dict[str, None], name: str) -> None:
    """The latest go last; of too many, the oldest go."""
    names[name] = names.pop(name, None)
    if len(names) > LIMIT:
        del names[next(iter(names))]


def _empty() -> _Shards:
    return [{} for _ in range(_SHARDS)]


def _free_latest(shards: _Shards) -> int:
    """Free the latest two keys of each shard; returns how many. To free all keys at once would take
    long, and shard by shard, all of the memory would go back to the system with the last one."""
    return sum(1 for shard in 2 * shards if shard and shard.popitem())


def _pieces(packed: bytes, key_bytes: int) -> Iterator[list[bytes]]:
    """The short forms of packed keys."""
    short = min(key_bytes, SHORT_KEY)
    for start in range(0, len(packed), PIECE * key_bytes):
        piece = memoryview(packed)[start : start + PIECE * key_bytes]
        # Slicing takes twice as long.
        yield [key for (key,) in iter_unpack(f"{key_bytes - short}x{short}s", piece)]
