"""A line through the last measurements, the newer ones counting more.

Pure; belongs to whoever makes it.
"""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest: about the last ten count
_SAME = 0.05  # variance of x, in squares of its mean


class LinearFit:
    """Of y over x: their means, and as `slope` how much y grows with x, None while all x were
    about the same."""

    def __init__(self) -> None:
        self.x = 0.0
        self.y = 0.0
        self._count = 0
        self._variance = 0.0
        self._covariance = 0.0

    def add(self, x: float, y: float) -> None:
        self._count += 1
        weight = max(_WEIGHT, 1 / self._count)
        more_x, more_y = x - self.x, y - self.y
        self.x += weight * more_x
        self.y += weight * more_y
        self._variance = (1 - weight) * (self._variance + weight * more_x**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_x * more_y)

    @property
    def slope(self) -> float | None:
        """Not less than 0, nor more than of a line through the origin."""
        if self._variance <= _SAME * self.x**2:
            return None
        return min(max(self._covariance / self._variance, 0.0), self.y / self.x)
