"""How often media requests arrive, and how burstily: estimated from the gaps between them."""

from easerve.types import NS_PER_S

GAIN = 0.1
FAST_GAIN = 0.3
STEP = 3.0
SAMPLE_AFTER_STEP = 4
SILENCE = 20.0
QUIET = 4.0


class Arrivals:
    """Exponentially weighted means of the gaps and of their squares.

    The first gaps of a sample weigh the same, later ones ``GAIN`` (the last ten count). A second,
    faster mean that is ``STEP`` times off says that the rate has stepped: it replaces the first.
    A gap of more than ``SILENCE`` means (of bursts: times the square of ``cv``, as the tail of
    their gaps is longer) is no gap but a silence: the next one starts a new sample.
    Until an arrival ends it, a gap that is longer than ``QUIET`` means lowers the rate as it grows.
    Arrivals of one instant are one arrival: a request with many items is no burst.
    """

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._num_gaps = 0  # of the sample; 0: nothing is known but the last arrival
        self._mean_s = self._fast_s = self._square = 0.0

    def observe(self, now_ns: int) -> None:
        """Something arrived."""
        last_ns, self._last_ns = self._last_ns, now_ns
        if last_ns is None or now_ns == last_ns:
            return
        gap_s = (now_ns - last_ns) / NS_PER_S
        if self._num_gaps and gap_s > SILENCE * self._mean_s * max(1.0, self.cv) ** 2:
            self._num_gaps = 0
            return
        self._num_gaps += 1
        evenly = 1 / self._num_gaps
        gain = max(GAIN, evenly)
        self._mean_s += gain * (gap_s - self._mean_s)
        self._square += gain * (gap_s * gap_s - self._square)
        self._fast_s += max(FAST_GAIN, evenly) * (gap_s - self._fast_s)
        if not 1 / STEP <= self._fast_s / self._mean_s <= STEP:
            self._square *= (self._fast_s / self._mean_s) ** 2  # as bursty as before
            self._mean_s = self._fast_s
            self._num_gaps = SAMPLE_AFTER_STEP

    @property
    def last_ns(self) -> int | None:
        """When something arrived last."""
        return self._last_ns

    def gap_s(self, now_ns: int) -> float | None:
        """The mean gap as it looks at ``now_ns``; None before the second arrival."""
        if self._last_ns is None:
            return None
        open_s = (now_ns - self._last_ns) / NS_PER_S
        if not self._num_gaps:
            return open_s or None
        return max(self._mean_s, open_s / QUIET)

    def rate_per_s(self, now_ns: int) -> float:
        """Arrivals per second; 0 while unknown."""
        gap_s = self.gap_s(now_ns)
        return 1 / gap_s if gap_s else 0.0

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps: 1 for Poisson, more for bursts; 1 while unknown."""
        if self._num_gaps < 2:
            return 1.0
        return float(max(0.0, self._square / self._mean_s**2 - 1) ** 0.5)
