"""A replica's copy of the index: which peers hold a chunk, without a call.

Threading: `holders`, `serving`, `address`, `enabled` and `len` may be read by any thread at any
time without a lock: each reads a dictionary or an attribute once. All other methods are for one
writing thread, that of the tracker's client. A reader may see part of an update; the mirror is only
a hint anyway.

Memory: under 200 bytes a key, key included (measured: 127 for keys of 36 bytes), for any number of
holders, because equal groups of holders share one tuple. Bounded by `max_keys`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from xinference_xavier.protocol.tracker import (
    INITIAL_SETTINGS,
    Change,
    Member,
    Update,
    check_update,
    unpack,
)

_NO_HOLDERS: tuple[str, ...] = ()
MAX_STALE = 10_000  # stale entries remembered for each peer; the oldest go first
MAX_GROUPS = 10_000
"""Groups of holders whose keys share one tuple; beyond them each key has its own."""


class Mirror:
    """What the replicas other than `incarnation` hold, as of `revision` of `epoch`.

    `enabled` is the operator's switch. `serving` are the peers that can be fetched from now; others
    may hold chunks, too. `dropped` counts the keys left out because of `max_keys`.
    """

    def __init__(self, incarnation: str, *, max_keys: int = 500_000) -> None:
        self.enabled = True
        self.settings = INITIAL_SETTINGS
        self.dropped = 0
        self._incarnation = incarnation
        self._max_keys = max_keys
        self.clear()

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, key: bytes) -> tuple[str, ...]:
        """The peers that hold `key`; none while sharing is switched off."""
        return self._holders.get(key, _NO_HOLDERS) if self.enabled else _NO_HOLDERS

    def all_holders(self, key: bytes) -> tuple[str, ...]:
        """Like `holders`, but also while sharing is switched off."""
        return self._holders.get(key, _NO_HOLDERS)

    def address(self, incarnation: str) -> str | None:
        """The address of a peer's actor; None if it is not a member."""
        return self._members.get(incarnation)

    @property
    def peers(self) -> frozenset[str]:
        """The incarnations of the other members."""
        return frozenset(self._members)

    def clear(self) -> None:
        """Forget everything but the operator's switch."""
        self.epoch, self.revision = "", 0
        self._holders: dict[bytes, tuple[str, ...]] = {}
        self._groups: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._counts: Counter[str] = Counter()  # keys, by incarnation
        self._members: dict[str, str] = {}  # addresses, by incarnation
        self._roster: dict[str, Member] = {}  # with this replica, in the order of joining
        self.serving: frozenset[str] = frozenset()
        self.eldest = ""  # the incarnation of the member that joined first
        self._applied: dict[str, int] = {}  # sequences, by incarnation
        self._stale: dict[str, dict[bytes, int]] = {}  # sequences, by incarnation and key

    def apply(self, update: Update) -> None:
        """Apply `update`, or raise ValueError and change nothing."""
        update = check_update(update)
        if update.settings.version >= self.settings.version:
            self.settings = update.settings
            self.enabled = update.settings.enabled
        if update.snapshot or update.members or update.left:
            self._apply_members(update)
        # Build a snapshot aside, so that readers never find it half empty.
        holders: dict[bytes, tuple[str, ...]] = {} if update.snapshot else self._holders
        if update.snapshot:
            self._groups, self._counts = {}, Counter()
        for change in update.changes:
            if change.incarnation != self._incarnation:
                self._apply(holders, change, update.key_bytes)
        for incarnation in self._applied.keys() - self._members.keys():
            self._forget(holders, incarnation)
        self._holders = holders
        self.epoch, self.revision = update.epoch, update.revision

    def _apply_members(self, update: Update) -> None:
        if update.snapshot:
            self._roster = {}
        for incarnation in update.left:
            self._roster.pop(incarnation, None)
        self._roster |= {member.incarnation: member for member in update.members}
        peers = [each for name, each in self._roster.items() if name != self._incarnation]
        self._members = {peer.incarnation: peer.address for peer in peers}
        self.serving = frozenset(peer.incarnation for peer in peers if peer.serves)
        self.eldest = next(iter(self._roster), "")

    def record_stale(self, key: bytes, incarnation: str, sequence: int) -> None:
        """Remove an entry: a donor that had published up to `sequence` does not hold `key`.

        Publications up to `sequence` that arrive later do not bring it back, later ones do. If a
        later one has been applied already, it is newer than the answer, and the entry stays.
        """
        if sequence < self._applied.get(incarnation, 0) or incarnation not in self._members:
            return
        self._remove(self._holders, incarnation, (key,))
        stale = self._stale.setdefault(incarnation, {})
        stale[key] = sequence
        if len(stale) > MAX_STALE:
            del stale[next(iter(stale))]

    def _apply(self, holders: dict[bytes, tuple[str, ...]], change: Change, key_bytes: int) -> None:
        incarnation, sequence = change.incarnation, change.sequence
        if change.replaces:
            self._remove_all(holders, incarnation)
        else:
            self._remove(holders, incarnation, unpack(change.removed, key_bytes))
        self._add(holders, incarnation, sequence, unpack(change.added, key_bytes))
        self._applied[incarnation] = sequence
        stale = self._stale.get(incarnation)
        if stale is not None:
            # Publications arrive in order: older ones than this no longer come.
            stale = {key: last for key, last in stale.items() if last >= sequence}
            self._stale[incarnation] = stale

    def _add(
        self,
        holders: dict[bytes, tuple[str, ...]],
        incarnation: str,
        sequence: int,
        keys: Iterable[bytes],
    ) -> None:
        stale = self._stale.get(incarnation, {})
        wider: dict[tuple[str, ...], tuple[str, ...]] = {}
        added = 0
        for key in keys:
            group = holders.get(key, _NO_HOLDERS)
            if incarnation in group or (stale and stale.get(key, 0) >= sequence):
                continue
            if not group and len(holders) >= self._max_keys:
                self.dropped += 1
                continue
            if group not in wider:
                wider[group] = self._group({*group, incarnation})
            holders[key] = wider[group]
            added += 1
        self._counts[incarnation] += added

    def _remove(
        self, holders: dict[bytes, tuple[str, ...]], incarnation: str, keys: Iterable[bytes]
    ) -> None:
        narrower: dict[tuple[str, ...], tuple[str, ...]] = {}
        removed = 0
        for key in keys:
            group = holders.get(key, _NO_HOLDERS)
            if incarnation not in group:
                continue
            if group not in narrower:
                narrower[group] = self._group({*group} - {incarnation})
            if narrower[group]:
                holders[key] = narrower[group]
            else:
                del holders[key]
            removed += 1
        self._counts[incarnation] -= removed

    def _remove_all(self, holders: dict[bytes, tuple[str, ...]], incarnation: str) -> None:
        # Rare, so a pass over all keys is cheaper than keeping a set of keys for each peer.
        if self._counts[incarnation]:
            held = [key for key, group in holders.items() if incarnation in group]
            self._remove(holders, incarnation, held)

    def _forget(self, holders: dict[bytes, tuple[str, ...]], incarnation: str) -> None:
        self._remove_all(holders, incarnation)
        del self._applied[incarnation], self._counts[incarnation]
        self._stale.pop(incarnation, None)
        self._groups = {group: group for group in self._groups if incarnation not in group}

    def _group(self, incarnations: set[str]) -> tuple[str, ...]:
        group = tuple(sorted(incarnations))
        if len(self._groups) >= MAX_GROUPS:
            return self._groups.get(group, group)
        return self._groups.setdefault(group, group)
