"""When requests come: arrival processes by name.

Times are seconds from the start and never decrease. What is drawn starts with a gap, so that the
first request is no special case; a trace is taken as it is written. The first n times do not
depend on how many are asked for, unless they are rescaled: a run that is cut short has seen the
same arrivals.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PARAMETERS = {
    "poisson": ("rate_per_s",),
    "gamma": ("rate_per_s", "cv"),
    "constant": ("rate_per_s",),
    "trace": ("path",),
}
KINDS = tuple(PARAMETERS)
DRAWN = ("poisson", "gamma")
MIN_CV, MAX_CV = 1e-3, 1e3  # as good as constant, and as good as all at once


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process: one of ``KINDS`` and the parameters of that kind, no others.

    ``rate_per_s`` is the mean rate. ``cv`` is the gaps' coefficient of variation, their standard
    deviation over their mean: 1 is Poisson, more is burstier. The gaps are gamma distributed with
    shape 1 / cv², which is what vLLM's bench calls burstiness. ``rescaled``: the times are
    stretched so that the last one is the number of requests over the rate, as vLLM's bench does.
    ``path`` is the file that ``read_trace`` reads.

    Raises ValueError when a parameter is missing, not of this kind, or out of range.
    """

    kind: str
    rate_per_s: float | None = None
    cv: float | None = None
    path: Path | None = None
    rescaled: bool = False

    def __post_init__(self) -> None:
        if self.kind not in PARAMETERS:
            raise ValueError(f"arrivals are one of {', '.join(KINDS)}, not {self.kind!r}")
        for name in ("rate_per_s", "cv", "path"):
            given, needed = getattr(self, name) is not None, name in PARAMETERS[self.kind]
            if given != needed:
                raise ValueError(f"{self.kind} arrivals {'need' if needed else 'take no'} {name}")
        if self.rescaled and self.kind not in DRAWN:
            raise ValueError(f"{self.kind} arrivals are not drawn and take no rescaled")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise ValueError(f"rate_per_s must be more than 0 and finite, not {self.rate_per_s}")
        if self.cv is not None and not MIN_CV <= self.cv <= MAX_CV:
            raise ValueError(f"cv must be {MIN_CV:g} to {MAX_CV:g}, not {self.cv}")

    def times(self, num_requests: int, rng: random.Random) -> list[float]:
        """The first arrival times, in seconds.

        Raises ValueError for a trace that is wrong or too short, OSError for one that cannot be
        read.
        """
        if num_requests < 0:
            raise ValueError(f"the number of requests must not be negative, but is {num_requests}")
        if self.path is not None:
            return _first(self.path, num_requests)
        assert self.rate_per_s is not None
        if self.kind == "constant":
            return [number / self.rate_per_s for number in range(1, num_requests + 1)]
        cv = 1.0 if self.cv is None else self.cv
        shape = 1 / cv**2
        scale_s = 1 / (self.rate_per_s * shape)
        gaps = (rng.gammavariate(shape, scale_s) for _ in range(num_requests))
        times = list(itertools.accumulate(gaps))
        if not self.rescaled or not times:
            return times
        end_s = num_requests / self.rate_per_s
        return [time_s / times[-1] * end_s for time_s in times]


def poisson_steps(steps: Sequence[tuple[float, float]], rng: random.Random) -> list[float]:
    """The times of Poisson arrivals whose rate changes in steps of (rate per second, seconds).

    A rate of 0 is a pause. A Poisson process has no memory: each step is drawn from its own start.
    Raises ValueError for a step that cannot be.
    """
    times: list[float] = []
    start_s = 0.0
    for rate_per_s, duration_s in steps:
        if not (0 <= rate_per_s < math.inf and 0 < duration_s < math.inf):
            raise ValueError(f"a step cannot have a rate of {rate_per_s} for {duration_s} seconds")
        end_s = start_s + duration_s
        time_s = start_s + rng.expovariate(rate_per_s) if rate_per_s else end_s
        while time_s < end_s:
            times.append(time_s)
            time_s += rng.expovariate(rate_per_s)
        start_s = end_s
    return times


def read_trace(path: Path) -> list[float]:
    """Arrival times in seconds, one per line; empty lines and lines that begin with # are left out.

    Raises ValueError that names file and line, OSError when the file cannot be read.
    """
    times: list[float] = []
    # Bytes that are no text become a line that is no number, which is what the error should name.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if text and not text.startswith("#"):
                try:
                    times.append(_time(text, times[-1] if times else 0.0))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    return times


def _time(text: str, previous_s: float) -> float:
    try:
        time_s = float(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a number of seconds") from None
    if not 0 <= time_s < math.inf:
        raise ValueError(f"{text} is negative or not finite")
    if time_s < previous_s:
        raise ValueError(f"{text} is before the arrival at {previous_s}")
    return time_s


def _first(path: Path, num_requests: int) -> list[float]:
    times = read_trace(path)
    if len(times) < num_requests:
        raise ValueError(f"{path} has {len(times)} arrivals, but {num_requests} requests are asked")
    return times[:num_requests]
