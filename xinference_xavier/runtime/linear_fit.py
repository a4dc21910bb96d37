"""A line through measured points, of which newer ones count more."""

import math

_WEIGHT = 0.2  # of the newest point: about the last ten count
_MIN_SPREAD = 0.05  # variance of x over its squared mean


def slope_of(x: float, y: float, variance: float, covariance: float) -> float | None:
    """The slope of the line through points with the means `x` and `y`: at least 0 and at most
    y / x, so that the line is never negative for x > 0. None while all x are about equal."""
    if variance <= _MIN_SPREAD * x**2:
        return None
    return min(max(covariance / variance, 0.0), y / x)


class LinearFit:
    """A decaying linear fit of y over x. `x` and `y` are the weighted means."""

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

    def __bool__(self) -> bool:
        return self._count > 0

    @property
    def slope(self) -> float | None:
        """None while all x are about equal."""
        return slope_of(self.x, self.y, self._variance, self._covariance)

    def predict(self, x: float) -> float:
        """y at `x`, 0 without points. Until the points differ in x, the lowest value that any line
        through them could give: y is constant above them and proportional below."""
        slope = self.slope
        if slope is None:
            return self.y * min(1.0, x / self.x) if self.x else 0.0
        return max(0.0, self.y + slope * (x - self.x))  # rounding can make it less

    def largest(self, y: float) -> float:
        """The x up to which the prediction is at most `y`: 0 where even that is more."""
        slope = self.slope
        if slope:
            return max(0.0, self.x + (y - self.y) / slope)
        if y >= self.y:
            return math.inf
        return 0.0 if slope is not None or y <= 0 else self.x * y / self.y
