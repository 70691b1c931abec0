"""Runs of each family's topology at rates, each made once, by several processes if there are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from easerve.search import trying
from easerve.search.trying import Candidate, Load, Outcome, Point, Task

NUM_HALVINGS, NEAR = 5, 1.02
"""To the rates between which a capacity is; systems fall off steeply there."""

Mapped = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""As the built-in map; on several processes where there are some."""
Tick = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and of how much."""


class Trials:
    """Runs of each family's topology, each made once; ``load`` and ``seeds`` are those of all."""

    def __init__(
        self,
        candidates: Mapping[str, Candidate],
        load: Load,
        seeds: Sequence[int],
        mapped: Mapped = map,
        tick: Tick = lambda what, done, of: None,
    ) -> None:
        self._candidates, self._load, self._seeds = candidates, load, seeds
        self._mapped, self._tick = mapped, tick
        self._points: dict[str, dict[float, Point]] = {name: {} for name in candidates}

    def run(self, what: str, asked: Iterable[tuple[str, float]]) -> None:
        """Families at rates."""
        wanted = [(name, rate) for name, rate in asked if rate not in self._points[name]]
        wanted = list(dict.fromkeys(wanted))
        tasks = [self._task(*each, seed) for each in wanted for seed in self._seeds]
        outcomes = []
        for outcome in self._mapped(trying.run, tasks):
            outcomes.append(outcome)
            self._tick(what, len(outcomes), len(tasks))
        num = len(self._seeds)
        for number, (name, rate) in enumerate(wanted):
            part = outcomes[number * num : (number + 1) * num]
            self._points[name][rate] = trying.point(rate, part)

    def _task(self, name: str, rate_per_s: float, seed: int, traced: bool = False) -> Task:
        scenario = self._load.at(self._candidates[name].scenario, rate_per_s, seed)
        return Task(scenario, self._load.slo, traced)

    def points(self, name: str) -> list[Point]:
        """Rising."""
        return [point for _, point in sorted(self._points[name].items())]

    def at(self, name: str, rate_per_s: float) -> Point:
        """It is run if it was not."""
        self.run("comparing", [(name, rate_per_s)])
        return self._points[name][rate_per_s]

    def refine(self) -> None:
        """Halve between the last rate that is kept and the next one, of all families at once."""
        for _ in range(NUM_HALVINGS):
            middles = {name: _middle(self.points(name)) for name in self._candidates}
            self.run(
                "looking for capacities",
                [(name, middle) for name, middle in middles.items() if middle is not None],
            )

    def traced(self, rates_per_s: Mapping[str, float]) -> dict[str, Outcome]:
        """A run with the first seed, step by step."""
        tasks = [
            self._task(name, rate, self._seeds[0], traced=True)
            for name, rate in rates_per_s.items()
        ]
        return dict(zip(rates_per_s, self._mapped(trying.run, tasks), strict=True))


def _middle(points: Sequence[Point]) -> float | None:
    """None where the two rates are near, or no rate is broken."""
    low = max((each.rate_per_s for each in points if each.is_kept), default=0.0)
    high = min((each.rate_per_s for each in points if each.rate_per_s > low), default=None)
    if high is None or high <= low * NEAR:
        return None
    return float(f"{(low + high) / 2:.4g}")
