"""The members of a namespace and the chunks they hold: one class for tracker, replicas and routers.

The tracker records `News` and applies them to its own index; a replica's and a router's follow it
by applying the same news. A replica's has the other members only.

Each member has the set of what it holds, and each chunk the set of its holders: an integer that has
their bits. So a lookup takes as long with 256 members as with two, and a member that leaves costs
as much as it held. `check_integrity` says how the two belong together.

Threading: any thread may look up at any time without a lock: it reads one dictionary or attribute.
All else is for one thread, which can apply an update in short pieces and let others run in between.
A reader may see part of an update. An index is only a hint anyway.

Measured with a million chunks and 2, 16, 64 or 256 members: see `docs/architecture.md`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from struct import iter_unpack
from typing import Any, Generic, TypeVar

from xinference_xavier.limits import LIMIT
from xinference_xavier.protocol.tracker import (
    INITIAL_SETTINGS,
    SHORT_KEY,
    Change,
    Left,
    Member,
    News,
    Settings,
    Update,
    check_update,
)

PIECE = 500
"""Keys that are applied before other threads get a turn: about a fifth of a millisecond."""

_SHORT = slice(-SHORT_KEY, None)  # made once: lookups are many


@dataclass(eq=False)
class Holder:
    """A member, the bit that has its place in sets, and what it holds as of its publication
    `sequence`. `stale` are chunks that it turned out not to hold, each with the publication as of
    which it does not."""

    name: str
    bit: int
    sequence: int = 0
    keys: set[bytes] = field(default_factory=set)
    stale: dict[bytes, int] = field(default_factory=dict)


H = TypeVar("H", bound=Holder)


class Members(dict[str, H]):
    """The members by incarnation. `usable` is the set of those whose chunks can be fetched."""

    settings = INITIAL_SETTINGS
    usable = -1

    def foresee(self, news: Iterable[News]) -> None:
        """All `news` of an update that is about to be applied."""

    def follow(self, news: Member | Left | Settings) -> None:
        raise NotImplementedError


M = TypeVar("M", bound=Members[Any])


class Index(Generic[M]):
    """What `members` hold, as of `revision` of `epoch`; its length is the number of chunks."""

    def __init__(self, members: M) -> None:
        self.members = members
        self._holders: dict[bytes, int] = {}
        self.epoch, self.revision = "", 0

    def __len__(self) -> int:
        return len(self._holders)

    # -- reading ------------------------------------------------------------------------------

    def full_set(self, key: bytes) -> int:
        """The members that hold `key`, even if nothing can be fetched from them."""
        return self._holders.get(key[_SHORT], 0)

    def usable_set(self, key: bytes) -> int:
        """The members that `key` can be fetched from."""
        return self._holders.get(key[_SHORT], 0) & self.members.usable

    def usable_run(self, keys: Sequence[bytes], among: int) -> tuple[int, int]:
        """The number of leading `keys` that one member of the set `among` can send, and the set of
        members that can send all of them: `among` if the number is 0. Quicker than key by key."""
        holders, common = self._holders, among & self.members.usable
        for count, key in enumerate(keys):
            having = common & holders.get(key[_SHORT], 0)
            if not having:
                return count, common if count else among
            common = having
        return len(keys), common if keys else among

    # -- writing ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all members and what they hold."""
        self.epoch, self.revision = "", 0
        self._holders.clear()
        self.members.clear()

    def apply(self, update: Update) -> None:
        """Apply `update`, or raise ValueError and change nothing."""
        for _ in self.apply_in_pieces(update):
            pass

    def apply_in_pieces(self, update: Update) -> Iterator[None]:
        """Like `apply`, but other threads run between the iterator's items. The update is complete
        when the iterator is exhausted; if it is not, the same update, or a later one since the same
        revision, must follow."""
        check_update(update)
        self.members.foresee(update.news)
        touched = 0
        for keys in self._steps(update):
            touched += keys
            if touched >= PIECE:
                touched = 0
                yield
        self.epoch, self.revision = update.epoch, update.revision

    def _steps(self, update: Update) -> Iterator[int]:
        """Yields how many keys each step has touched."""
        if update.snapshot:
            named = {each.incarnation for each in update.news if isinstance(each, Member)}
            for name in self.members.keys() - named:
                yield from self.follow(Left(name))
        for news in update.news:
            yield from self.follow(news)

    def follow(self, news: News) -> Iterator[int]:
        """Apply one of the news, in steps that yield how many keys they have touched."""
        if isinstance(news, Change):
            yield from self._change(self.members[news.incarnation], news)
            return
        if isinstance(news, Left) and (holder := self.members.get(news.incarnation)) is not None:
            yield from self._keep(holder, frozenset())
            holder.sequence = 0
            holder.stale.clear()
        self.members.follow(news)

    def _change(self, holder: Holder, change: Change) -> Iterator[int]:
        if change.replaces:
            kept = set[bytes]()
            for keys in _pieces(change.added):
                kept.update(keys)
                yield len(keys)
            yield from self._keep(holder, kept)
        for keys in _pieces(change.removed):
            self._remove(holder, keys)
            yield len(keys)
        for keys in _pieces(change.added):
            if stale := holder.stale:
                keys = [key for key in keys if stale.get(key, -1) < change.sequence]
            self._add(holder, keys)
            yield len(keys)
        holder.sequence = change.sequence
        if holder.stale:  # publications arrive in order: older ones than this no longer come
            later = {key: n for key, n in holder.stale.items() if n >= change.sequence}
            holder.stale = later

    def record_stale(self, key: bytes, name: str, sequence: int) -> None:
        """Remove an entry: this member does not hold `key`, and had published up to `sequence`.

        Publications up to `sequence` that arrive later do not bring it back, later ones do. If a
        later one has been applied already, it is newer than the answer, and the entry stays.
        """
        holder = self.members.get(name)
        if holder is None or sequence < holder.sequence:
            return
        short = key[_SHORT]
        self._remove(holder, (short,))
        holder.stale[short] = sequence
        if len(holder.stale) > LIMIT:
            del holder.stale[next(iter(holder.stale))]

    def _add(self, holder: Holder, keys: Iterable[bytes]) -> None:
        holders, bit = self._holders, holder.bit
        for key in keys:
            held = holders.get(key)
            holders[key] = held | bit if held else bit  # the same object, if it is the only one
        holder.keys.update(keys)

    def _remove(self, holder: Holder, keys: Iterable[bytes]) -> None:
        holders, held = self._holders, holder.keys.intersection(keys)
        for key in held:
            if others := holders[key] & ~holder.bit:
                holders[key] = others
            else:
                del holders[key]
        holder.keys -= held

    def _keep(self, holder: Holder, kept: set[bytes] | frozenset[bytes]) -> Iterator[int]:
        """Remove all but these keys."""
        before = [*holder.keys]
        for start in range(0, len(before), PIECE):
            keys = before[start : start + PIECE]
            self._remove(holder, [key for key in keys if key not in kept])
            yield len(keys)

    # -- for tests ----------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError unless members and chunks agree. Takes a pass over all keys."""
        members = self.members.values()
        held = dict[bytes, int]()
        for holder in members:
            assert holder.bit.bit_count() == 1, f"{holder.name} has the bits {holder.bit:b}"
            assert not holder.keys & holder.stale.keys(), f"{holder.name} holds what is stale"
            for key in holder.keys:
                held[key] = held.get(key, 0) | holder.bit
        assert len({holder.bit for holder in members}) == len(members), "two members have one bit"
        assert held == self._holders, "members and chunks disagree"


def _pieces(packed: bytes) -> Iterator[list[bytes]]:
    view = memoryview(packed)
    for start in range(0, len(packed), PIECE * SHORT_KEY):
        piece = view[start : start + PIECE * SHORT_KEY]
        # Slicing takes twice as long.
        yield [key for (key,) in iter_unpack(f"{SHORT_KEY}s", piece)]
