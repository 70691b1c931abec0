"""What runs are called beside each other, and units that suit the numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from easerve.bench.drawings.results import Run

INVALID = "INVALID"
METRICS = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "latency_s": "Latency",
    "slot_wait_s": "Wait for a slot",
}


class Unit(NamedTuple):
    """``scale``: how many of it a second has."""

    name: str
    scale: float

    def of(self, seconds: float | None) -> float | None:
        return None if seconds is None else seconds * self.scale


def unit_of(times_s: Iterable[float | None]) -> Unit:
    """Milliseconds, unless some time is a second or more."""
    longest_s = max((time_s for time_s in times_s if time_s is not None), default=0.0)
    return Unit("s", 1) if longest_s >= 1 else Unit("ms", 1000)


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each, none twice and as short as it may be beside the others."""
    names = systems(runs)
    if len({run.load for run in runs}) > 1:
        names = [f"{name}, {run.load}" for name, run in zip(names, runs, strict=True)]
    times = Counter(names)
    seen: set[str] = set()
    return [
        _once(_marked(name, run, times[name] > 1), seen)
        for name, run in zip(names, runs, strict=True)
    ]


def are_mixed(runs: Sequence[Run]) -> bool:
    """Whether some were measured and others simulated."""
    return len({run.source for run in runs}) > 1


def _marked(name: str, run: Run, has_double: bool) -> str:
    seed = f", seed {run.seed}" if has_double and run.seed is not None else ""
    return f"{name}{seed}{', ' + INVALID if run.invalid_because else ''}"


def systems(runs: Sequence[Run]) -> list[str]:
    """The system of each run; with where it ran, if some were measured and others simulated."""
    if not are_mixed(runs):
        return [run.system for run in runs]
    return [f"{run.system} ({run.source})" for run in runs]


def _once(name: str, seen: set[str]) -> str:
    numbered = (f"{name} #{number}" for number in count(2))
    while name in seen:
        name = next(numbered)
    seen.add(name)
    return name


def rounded(value: float | None, digits: int = 3) -> float | None:
    """To so many digits that count, as many as are worth reading."""
    return None if value is None else float(f"{value:.{digits}g}")
