"""How long reads take: a line through latency and bytes, fitted to the reads so far, the older ones fading."""

from __future__ import annotations

_FADE = 0.97  # of the weight of everything before, with each read


class ReadTimes:
    """Seconds of a read = `latency` + bytes / `bandwidth`, by least squares. Before the first read: as it was given."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        self._guess = (latency, bandwidth)
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def measured(self) -> bool:
        return self._weight > 0

    def add(self, size: int, seconds: float) -> None:
        self._weight = self._weight * _FADE + 1
        self._x = self._x * _FADE + size
        self._y = self._y * _FADE + seconds
        self._xx = self._xx * _FADE + size * size
        self._xy = self._xy * _FADE + size * seconds

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second of the reads so far, latency included; None before the first."""
        return self._x / max(self._y, 1e-9) if self.measured else None

    def seconds(self, size: int) -> float:
        """Estimate for a read of so many bytes."""
        if not self.measured:
            latency, bandwidth = self._guess
            return latency + size / bandwidth
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        together = self._xy / self._weight - mean_x * mean_y
        if spread < 1e-3 * mean_x * mean_x or together <= 0:  # reads of one size tell nothing of a latency
            return mean_y * max(size / mean_x, 0.1) if mean_x else mean_y
        slope = together / spread
        latency = mean_y - slope * mean_x
        if latency < 0:
            return mean_y * size / mean_x
        return latency + slope * size
