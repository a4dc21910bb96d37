"""The prefixes that a replica keeps in its pool, as the chunks that its engine made of them.

Threading: on the replica's background loop. Bounded: the replica keeps only what the tracker wants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xinference_xavier.pool.eviction import Protection
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.sweep import protect
from xinference_xavier.protocol.prefixes import Kept, KeptPrefix, check_wanted


class ComputedPrefix(NamedTuple):
    """vLLM has scheduled a request that computes a prefix. `keys` are those of its chunks."""

    prefix: str
    tokens: int
    keys: Sequence[bytes]


@dataclass(slots=True)
class _Prefix:
    tokens: int
    keys: Sequence[bytes]
    firm: bool = False


class KeptPrefixes:
    """At most `fraction` of the pool is kept firmly. Prefixes beyond that are evicted last."""

    def __init__(
        self, pool: Pool, fraction: float, take_computed: Callable[[], Iterable[ComputedPrefix]]
    ) -> None:
        """`take_computed` returns the prefixes that the engine was given since its last call."""
        self._pool = pool
        self._take_computed = take_computed
        self._budget = int(pool.slots * fraction)
        self._prefixes: dict[str, _Prefix] = {}
        self._uses: Counter[bytes] = Counter()
        self._firm_uses: Counter[bytes] = Counter()

    def keep(self, wanted: Mapping[str, bool] | None) -> Kept:
        """Keep these prefixes, firmly or not, and no others; return what is kept now. None changes
        nothing."""
        if wanted is not None:
            self._change(check_wanted(wanted))
        kept = {
            name: KeptPrefix(
                prefix.tokens,
                len(prefix.keys),
                sum(self._pool.lookup(key) is not None for key in prefix.keys),
                prefix.firm,
            )
            for name, prefix in self._prefixes.items()
        }
        return Kept(kept, self._pool.slots, self._budget, len(self._firm_uses))

    def prompts(self) -> list[Sequence[bytes]]:
        """The keys of each."""
        return [prefix.keys for prefix in self._prefixes.values()]

    def _change(self, wanted: Mapping[str, bool]) -> None:
        for name in self._prefixes.keys() - wanted.keys():
            self._drop(name)
        for computed in self._take_computed():
            if computed.prefix in wanted:
                self._add(computed)
        for name, prefix in self._prefixes.items():
            self._set_firm(prefix, wanted[name])

    def _add(self, computed: ComputedPrefix) -> None:
        name, tokens, keys = computed
        if name in self._prefixes:
            if self._prefixes[name].keys == keys:
                return
            self._drop(name)  # the model has another chat template now
        self._prefixes[name] = _Prefix(tokens, keys)
        protect(self._pool, _add(self._uses, keys), Protection.SOFT)

    def _set_firm(self, prefix: _Prefix, firm: bool) -> None:
        if prefix.firm == firm:
            return
        if not firm:
            protect(self._pool, _remove(self._firm_uses, prefix.keys), Protection.SOFT)
        elif len(self._firm_uses.keys() | prefix.keys) > self._budget:
            return
        else:
            protect(self._pool, _add(self._firm_uses, prefix.keys), Protection.FIRM)
        prefix.firm = firm

    def _drop(self, name: str) -> None:
        prefix = self._prefixes.pop(name)
        self._set_firm(prefix, False)
        protect(self._pool, _remove(self._uses, prefix.keys), Protection.NONE)


def _add(uses: Counter[bytes], keys: Iterable[bytes]) -> list[bytes]:
    """Those that nobody used before."""
    new = [key for key in keys if key not in uses]
    uses.update(keys)
    return new


def _remove(uses: Counter[bytes], keys: Sequence[bytes]) -> list[bytes]:
    """Those that nobody uses any more."""
    uses.subtract(keys)
    gone = [key for key in keys if not uses[key]]
    for key in gone:
        del uses[key]
    return gone
