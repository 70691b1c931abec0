"""The simulator as an objective: a scenario's own system, configured anew, under a ladder of rates.

A score is found by halving on the ladder: attainment falls as the rate rises, and between the last
rate that keeps the promise and the first that does not both attainment and goodput are taken to be
straight. The same seed draws the same requests for every configuration, at every rate.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import easerve
from easerve.config import ConfigError
from easerve.goodput import Slo, summarise
from easerve.search.objective import Score, Unworkable
from easerve.search.space import Configuration, Space
from easerve.sim import scenario as scenarios
from easerve.sim.overlay import FILES
from easerve.sim.scenario import Scenario
from easerve.sim.simulate import simulate

OURS = "easerve"
REQUIRED = 0.9
FACTOR = 1.1
"""Between neighbours of a ladder: what is straight between them is wrong by less than noise."""
SOURCES = ("policy", "sim", "costs", "workload", "goodput.py", "config.py", "search/simulated.py")
"""Of the package: what a simulated score depends on, tables of kernels and models as well."""
TIER = "slo"


def ladder(lowest: float, highest: float) -> tuple[float, ...]:
    """Rates from the one to the other, each ``FACTOR`` times the one before or a little less."""
    steps = max(1, math.ceil(math.log(highest / lowest) / math.log(FACTOR)))
    return tuple(lowest * (highest / lowest) ** (step / steps) for step in range(steps + 1))


@dataclass(frozen=True)
class SimulatedObjective:
    """``content``: of a scenario file. ``rates_per_s``: rising; one alone is the rate to serve."""

    content: Mapping[str, Any]
    space: Space
    slo: Slo
    rates_per_s: tuple[float, ...]
    seeds: tuple[int, ...]
    required: float = REQUIRED

    @property
    def key(self) -> str:
        """Of scenario, promise, ladder and this version of the simulator; of files that the
        scenario names, what is in them.
        """
        unused = ("title", "experiment", "anchors", "slo", "system")
        told = {name: each for name, each in self.content.items() if name not in unused}
        told["systems"] = told["systems"].get(OURS)
        parts = [
            told,
            *_named(self.content),
            repr(self.slo),
            self.rates_per_s,
            self.required,
            sources(),
        ]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def scenario(self, configuration: Configuration) -> Scenario:
        """Raises ConfigError."""
        changes = self.space.changes(configuration)
        laid = scenarios.laid(
            self.content, {f"systems.{OURS}.{path}": each for path, each in changes.items()}
        )
        return scenarios.build(laid, configuration.allocation)

    def score(self, configuration: Configuration, seed: int) -> Score:
        try:
            scenario = self.scenario(configuration)
            return on_ladder(
                self.rates_per_s, self.required, lambda rate: self._at(scenario, rate, seed)
            )
        except ConfigError as error:
            raise Unworkable(str(error)) from None

    def _at(self, scenario: Scenario, rate_per_s: float, seed: int) -> Score:
        run = simulate(scenario.at(rate_per_s, seed), OURS)
        summary = summarise(run.records, run.end_s, {TIER: self.slo})
        goodput, attainment = summary.goodput_per_s[TIER], summary.attainment[TIER]
        return Score(goodput or 0.0, attainment or 0.0, rate_per_s)


def on_ladder(rates_per_s: Sequence[float], required: float, at: Callable[[float], Score]) -> Score:
    """At the highest rate that keeps the promise to ``required`` of all, or at the lowest of all.

    ``at``: what a rate comes to. It is asked for as few as halving needs.
    """
    low, high = 0, len(rates_per_s)  # the first is taken to keep it, beyond the last nothing does
    known: dict[int, Score] = {}
    while high - low > 1:
        middle = (low + high) // 2
        known[middle] = at(rates_per_s[middle])
        low, high = (middle, high) if known[middle].attainment >= required else (low, middle)
    below = known.get(low) or at(rates_per_s[low])
    if below.attainment < required or high == len(rates_per_s):
        return below
    return _between(below, known[high], required)


def _between(below: Score, above: Score, required: float) -> Score:
    part = (below.attainment - required) / (below.attainment - above.attainment)
    return Score(
        below.goodput_per_s + part * (above.goodput_per_s - below.goodput_per_s),
        required,
        below.rate_per_s + part * (above.rate_per_s - below.rate_per_s),
    )


@cache
def sources() -> str:
    """A digest of the simulator: scores of another one are not of the same kind."""
    root = Path(easerve.__file__).parent
    found = hashlib.sha256()
    for name in SOURCES:
        path = root / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _named(content: Mapping[str, Any]) -> Iterator[str]:
    """Digests of the files that a scenario names."""
    for *sections, key in (name.split(".") for name in FILES):
        inner: Any = content
        for section in sections:
            inner = inner.get(section) or {}
        name = inner.get(key)
        if isinstance(name, str) and Path(name).is_file():
            yield hashlib.sha256(Path(name).read_bytes()).hexdigest()
