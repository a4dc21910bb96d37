"""Lengths of answers, learned from those that have ended."""

from cachetools import LRUCache

from xinference_xavier.limits import LIMIT

_LATEST = 0.1  # least weight of the latest value: about the last ten count


class Mean:
    """The mean of the latest values; false before the first."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += max(_LATEST, 1 / self._count) * (value - self.value)

    def __bool__(self) -> bool:
        return self._count > 0


class Answers:
    """Lengths of answers in tokens: of a session; else of requests with about the same limit; else
    of all. Before the first has ended, an answer is as long as its limit allows."""

    def __init__(self) -> None:
        self._sessions: LRUCache[str, Mean] = LRUCache(LIMIT)
        self._limits: dict[int, Mean] = {}  # by the number of the limit's bits
        self._all = Mean()

    def expected(self, session: str, limit: int) -> float:
        """The mean; `limit` is the most that the client asks for, 0 if it does not say."""
        known = self._sessions.get(session) or self._limits.get(limit.bit_length()) or self._all
        if not known:
            return float(limit)
        return min(known.value, limit) if limit else known.value

    def learn(self, session: str, limit: int, tokens: int) -> None:
        """An answer has ended."""
        self._all.add(tokens)
        self._limits.setdefault(limit.bit_length(), Mean()).add(tokens)
        if session:
            mean = self._sessions.get(session) or Mean()
            mean.add(tokens)
            self._sessions[session] = mean
