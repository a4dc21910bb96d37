"""Who holds what, as sets of integers, for tests of the router."""

from xinference_xavier.mirror import PeerSets


class Held:
    """`chunks` are by the name of the replica; those of `mute` cannot be fetched."""

    def __init__(self, chunks: dict[str, list[bytes]], mute: str = "") -> None:
        self.sets = PeerSets()
        self._mute = self.sets.bit(mute) if mute else 0
        self._held: dict[bytes, int] = {}
        for name, keys in chunks.items():
            bit = self.sets.bit(name)
            for key in keys:
                self._held[key] = self._held.get(key, 0) | bit

    def full_set(self, key: bytes) -> int:
        return self._held.get(key, 0)

    def usable_set(self, key: bytes) -> int:
        return self.full_set(key) & ~self._mute
