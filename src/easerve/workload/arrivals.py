"""When requests come: arrival processes by name.

Times are seconds from the start and never decrease. What is drawn starts with a gap, so that the
first request is no special case; a trace is taken as it is written. The first n times do not
depend on how many are asked for, unless they are rescaled or a ramp: a run that is cut short has
seen the same arrivals.
"""

import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PARAMETERS = {
    "poisson": ("rate_per_s",),
    "gamma": ("rate_per_s", "cv"),
    "constant": ("rate_per_s",),
    "trace": ("path",),
    "ramp": ("rate_per_s", "end_rate_per_s"),
    "steps": ("steps",),
    "immediate": (),
}
ALL = ("rate_per_s", "cv", "path", "end_rate_per_s", "steps")
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

    ``ramp``: Poisson, the rate going linearly from ``rate_per_s`` to ``end_rate_per_s`` in the time
    in which the number of requests is expected. ``steps``: Poisson, in steps of (rate per second,
    seconds), again from the first when the last has ended. ``immediate``: all at 0, which other
    tools call a rate of inf.

    Raises ValueError when a parameter is missing, not of this kind, or out of range.
    """

    kind: str
    rate_per_s: float | None = None
    cv: float | None = None
    path: Path | None = None
    rescaled: bool = False
    end_rate_per_s: float | None = None
    steps: tuple[tuple[float, float], ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in PARAMETERS:
            raise ValueError(f"arrivals are one of {', '.join(KINDS)}, not {self.kind!r}")
        for name in ALL:
            given, needed = getattr(self, name) is not None, name in PARAMETERS[self.kind]
            if given != needed:
                raise ValueError(f"{self.kind} arrivals {'need' if needed else 'take no'} {name}")
        if self.rescaled and self.kind not in DRAWN:
            raise ValueError(f"{self.kind} arrivals are not drawn and take no rescaled")
        for name in ("rate_per_s", "end_rate_per_s"):
            rate_per_s = getattr(self, name)
            if rate_per_s is not None and not 0 < rate_per_s < math.inf:
                raise ValueError(f"{name} must be more than 0 and finite, not {rate_per_s}")
        if self.cv is not None and not MIN_CV <= self.cv <= MAX_CV:
            raise ValueError(f"cv must be {MIN_CV:g} to {MAX_CV:g}, not {self.cv}")
        if self.steps is not None:
            _check_steps(self.steps)
            if not any(rate_per_s for rate_per_s, _ in self.steps):
                raise ValueError("one of the steps must have a rate of more than 0")

    def times(self, num_requests: int, rng: random.Random) -> list[float]:
        """The first arrival times, in seconds.

        Raises ValueError for a trace that is wrong or too short, OSError for one that cannot be
        read.
        """
        if num_requests < 0:
            raise ValueError(f"the number of requests must not be negative, but is {num_requests}")
        if self.path is not None:
            return _first(self.path, num_requests)
        if self.steps is not None:
            return list(itertools.islice(_stepped(itertools.cycle(self.steps), rng), num_requests))
        if self.rate_per_s is None:  # immediate
            return [0.0] * num_requests
        if self.kind == "constant":
            return [number / self.rate_per_s for number in range(1, num_requests + 1)]
        if self.end_rate_per_s is not None:
            return _ramp(self.rate_per_s, self.end_rate_per_s, num_requests, rng)
        return self._drawn(self.rate_per_s, num_requests, rng)

    def _drawn(self, rate_per_s: float, num_requests: int, rng: random.Random) -> list[float]:
        cv = 1.0 if self.cv is None else self.cv
        shape = 1 / cv**2
        scale_s = 1 / (rate_per_s * shape)
        gaps = (rng.gammavariate(shape, scale_s) for _ in range(num_requests))
        times = list(itertools.accumulate(gaps))
        if not self.rescaled or not times:
            return times
        end_s = num_requests / rate_per_s
        return [time_s / times[-1] * end_s for time_s in times]

    def whole(self, rng: random.Random) -> list[float] | None:
        """All times of a trace, or of the steps run through once; None for what has no end."""
        if self.path is not None:
            return read_trace(self.path)
        return None if self.steps is None else poisson_steps(self.steps, rng)


def _ramp(start: float, end: float, num_requests: int, rng: random.Random) -> list[float]:
    """By time transformation: of a Poisson process of rate 1, whose n-th point is near n, each
    point is taken to when so many requests are expected. ``start`` and ``end`` are per second.

    Until ``whole_s`` that is start·t + (end - start)·t² / (2·whole_s); then the rate stays.
    """
    whole_s = 2 * num_requests / (start + end)
    times: list[float] = []
    point = 0.0
    for _ in range(num_requests):
        point += rng.expovariate(1.0)
        if point > num_requests:
            times.append(whole_s + (point - num_requests) / end)
        else:
            # The root of the quadratic, in the form that is also right for start = end.
            root = math.sqrt(start**2 + 2 * (end - start) / whole_s * point)
            times.append(2 * point / (start + root))
    return times


def poisson_steps(steps: Sequence[tuple[float, float]], rng: random.Random) -> list[float]:
    """The times of Poisson arrivals whose rate changes in steps of (rate per second, seconds).

    A rate of 0 is a pause. A Poisson process has no memory: each step is drawn from its own start.
    Raises ValueError for a step that cannot be.
    """
    _check_steps(steps)
    return list(_stepped(steps, rng))


def _check_steps(steps: Sequence[tuple[float, float]]) -> None:
    for rate_per_s, duration_s in steps:
        if not (0 <= rate_per_s < math.inf and 0 < duration_s < math.inf):
            raise ValueError(f"a step cannot have a rate of {rate_per_s} for {duration_s} seconds")


def _stepped(steps: Iterable[tuple[float, float]], rng: random.Random) -> Iterator[float]:
    start_s = 0.0
    for rate_per_s, duration_s in steps:
        end_s = start_s + duration_s
        time_s = start_s + rng.expovariate(rate_per_s) if rate_per_s else end_s
        while time_s < end_s:
            yield time_s
            time_s += rng.expovariate(rate_per_s)
        start_s = end_s


def parse(
    rate: str | None = None,
    kind: str | None = None,
    *,
    cv: float | None = None,
    end_rate: str | None = None,
    steps: str | None = None,
    path: Path | None = None,
) -> Arrivals:
    """A command line's words. ``rate`` is requests per second, or ``inf`` for all at once.

    Without a ``kind``, what else is given tells: a trace, steps, a ramp, gamma for a ``cv``, else
    Poisson. Raises ValueError for words that cannot be, or that do not go together.
    """
    kind = kind or _implied(rate, cv, end_rate, steps, path)
    if _is_infinite(rate) and kind in ("poisson", "gamma", "constant", "immediate"):
        kind, rate = "immediate", None
    return Arrivals(
        kind,
        None if rate is None else _rate(rate),
        cv,
        path,
        end_rate_per_s=None if end_rate is None else _rate(end_rate),
        steps=None if steps is None else parse_steps(steps),
    )


def _implied(
    rate: str | None, cv: float | None, end_rate: str | None, steps: str | None, path: Path | None
) -> str:
    if path is not None:
        return "trace"
    if steps is not None:
        return "steps"
    if end_rate is not None:
        return "ramp"
    if _is_infinite(rate):
        return "immediate"
    return "poisson" if cv is None else "gamma"


def _is_infinite(rate: str | None) -> bool:
    return rate is not None and rate.strip().lower() in ("inf", "infinity")


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"a rate is a number of requests per second, not {text!r}") from None


def parse_steps(text: str) -> tuple[tuple[float, float], ...]:
    """``5x60,20x30``: 5 requests a second for 60 seconds, then 20 for 30.

    Raises ValueError that names the step that is wrong.
    """
    steps: list[tuple[float, float]] = []
    for step in text.split(","):
        rate, _, seconds = re.sub("[×X]", "x", step).partition("x")
        try:
            steps.append((float(rate), float(seconds)))
        except ValueError:
            raise ValueError(f"{step!r} is not like 5x60 (rate per second x seconds)") from None
    return tuple(steps)


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
