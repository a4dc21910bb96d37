"""A replica's copy of the index: who else holds a chunk, known without asking anybody.

Threading: `holders`, `address`, `enabled` and `len` may be read by any thread at any time, without
a lock: each is one read of a dictionary or an attribute. All else is for one writing thread, that
of the tracker's client. A reader may see part of an update; what it reads is a hint in any case.

Memory: under 200 bytes a key, key included (measured: 127 for keys of 36 bytes), however many hold
it, since equal groups of holders are one tuple; bounded by `max_keys`.
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

NOBODY: tuple[str, ...] = ()
MAX_NOTES = 10_000
"""Stale entries noted per peer; the oldest go first."""
MAX_GROUPS = 10_000
"""Groups of holders that are one tuple for all their keys; beyond them each key has its own."""


class Mirror:
    """What the replicas other than `incarnation` hold, as of `revision` of `epoch`.

    `enabled` is the operator's switch. `dropped` counts the keys left out because of `max_keys`.
    """

    def __init__(self, incarnation: str, *, max_keys: int = 500_000) -> None:
        self.enabled = True
        self.settings = INITIAL_SETTINGS
        self.epoch = ""
        self.revision = 0
        self.dropped = 0
        self._incarnation = incarnation
        self._max_keys = max_keys
        self._holders: dict[bytes, tuple[str, ...]] = {}
        self._groups: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._counts: Counter[str] = Counter()
        self._members: dict[str, str] = {}
        self._applied: dict[str, int] = {}
        self._stale: dict[str, dict[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, key: bytes) -> tuple[str, ...]:
        """The other replicas that hold `key`; none while sharing is switched off."""
        return self._holders.get(key, NOBODY) if self.enabled else NOBODY

    def listed(self, key: bytes) -> tuple[str, ...]:
        """Like `holders`, whether sharing is on or off."""
        return self._holders.get(key, NOBODY)

    def address(self, incarnation: str) -> str | None:
        """Where a peer's actor is; None if it is no member now."""
        return self._members.get(incarnation)

    @property
    def peers(self) -> frozenset[str]:
        """The incarnations of the other members."""
        return frozenset(self._members)

    def clear(self) -> None:
        """Forget everything but the operator's switch."""
        self.epoch, self.revision = "", 0
        self._holders = {}
        self._groups = {}
        self._counts = Counter()
        self._members = {}
        self._applied = {}
        self._stale = {}

    def apply(self, update: Update) -> None:
        """Take over what the tracker reports, or raise ValueError and leave all as it was."""
        update = check_update(update)
        if update.settings.version >= self.settings.version:
            self.settings = update.settings
            self.enabled = update.settings.enabled
        if update.members is not None:
            self._members = _others(update.members, self._incarnation)
        # A snapshot is built aside, so that readers never find less than before for no reason.
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

    def record_stale(self, key: bytes, incarnation: str, sequence: int) -> None:
        """A donor that had published up to `sequence` answered that it does not hold `key`.

        The entry goes, and what is still on its way from before that answer will not bring it back;
        a later publication will. If a later one is here already, it is the one to believe.
        """
        if sequence < self._applied.get(incarnation, 0) or incarnation not in self._members:
            return
        self._remove(self._holders, incarnation, (key,))
        notes = self._stale.setdefault(incarnation, {})
        notes[key] = sequence
        if len(notes) > MAX_NOTES:
            del notes[next(iter(notes))]

    def _apply(self, holders: dict[bytes, tuple[str, ...]], change: Change, key_bytes: int) -> None:
        incarnation, sequence = change.incarnation, change.sequence
        if change.replaces:
            self._remove_all(holders, incarnation)
        else:
            self._remove(holders, incarnation, unpack(change.removed, key_bytes))
        self._add(holders, incarnation, sequence, unpack(change.added, key_bytes))
        self._applied[incarnation] = sequence
        notes = self._stale.get(incarnation)
        if notes is not None:
            # Publications arrive in order: nothing older than this one can come any more.
            notes = {key: noted for key, noted in notes.items() if noted >= sequence}
            self._stale[incarnation] = notes

    def _add(
        self,
        holders: dict[bytes, tuple[str, ...]],
        incarnation: str,
        sequence: int,
        keys: Iterable[bytes],
    ) -> None:
        notes = self._stale.get(incarnation, {})
        wider: dict[tuple[str, ...], tuple[str, ...]] = {}
        added = 0
        for key in keys:
            group = holders.get(key, NOBODY)
            if incarnation in group or (notes and notes.get(key, 0) >= sequence):
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
            group = holders.get(key, NOBODY)
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
        # Seldom, so it is paid for by a pass over the keys and not by a set of them per peer.
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


def _others(members: Iterable[Member], own: str) -> dict[str, str]:
    return {member.incarnation: member.address for member in members if member.incarnation != own}
