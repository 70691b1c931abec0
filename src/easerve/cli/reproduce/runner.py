"""Runs, each once however many studies ask for it, on several processes."""

import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from easerve.cli.reproduce.plan import Point, Study, settings
from easerve.cli.simulate import once
from easerve.sim.scenario import Scenario

NUM_QUANTILES = 40
NOT_FIGURES = {
    *("system", "rate_per_s", "seed", "small_sample", "wall_s", "duration_s"),
    *("failed", "rejected", "timed_out", "cancelled", "lateness_p99_s", "bound_per_s"),
    *("output_tokens_per_s", "latency_s", "p90"),
}
Figures = Mapping[str, float | None]
"""What a run came to, by name, as in ``ttft_s.p99``."""
Quantiles = Mapping[str, Sequence[float]]
"""TTFT and TPOT of requests, from the least to the most in equal steps of their share."""


@dataclass(frozen=True, slots=True)
class Outcome:
    figures: Figures
    quantiles: Quantiles


def run(
    studies: Sequence[Study],
    points: Iterable[Point],
    jobs: int,
    tick: Callable[[str], None] = lambda _: None,
    known: dict[str, Outcome] | None = None,
) -> dict[Point, Outcome]:
    """In the order of ``points``, whatever the number of processes. ``known``: what has been run
    before, by all that decides it; what is run is added. ``tick`` is called for each point that is
    new. Raises ConfigError.
    """
    known = {} if known is None else known
    by_name = {study.name: study for study in studies}
    keys: dict[Point, str] = {}
    loads: dict[str, tuple[Scenario, str]] = {}
    for point in points:
        load = by_name[point.study].at(point.knobs, point.variant)
        load = load.at(point.rate_per_s, point.seed)
        key = keys[point] = settings(load, point.system)
        if key not in known:
            loads.setdefault(key, (load, point.system))
    count = Counter(keys.values())
    for key, outcome in zip(loads, outcomes(list(loads.values()), jobs), strict=True):
        scenario, system = loads[key]
        for _ in range(count[key]):
            tick(f"{scenario.title}: {system}, {scenario.workload.rate_per_s:g}/s")
        known[key] = outcome
    return {point: known[key] for point, key in keys.items()}


def outcomes(loads: Sequence[tuple[Scenario, str]], jobs: int) -> Iterator[Outcome]:
    """Of each scenario and system, in their order."""
    if jobs == 1 or len(loads) < 2:
        yield from (_outcome(load) for load in loads)
        return
    # Not forked: the bar's thread may hold a lock at that moment.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(loads)), context) as pool:
        yield from pool.map(_outcome, loads)


def _outcome(load: tuple[Scenario, str]) -> Outcome:
    result = once(*load)
    completed = [each for each in result.run.records if each.outcome == "completed"]
    times = {
        "ttft_s": [each.ttft_s for each in completed if each.ttft_s is not None],
        "tpot_s": [each.tpot_s for each in completed if each.tpot_s is not None],
    }
    quantiles = {name: _quantiles(each) for name, each in times.items()}
    return Outcome(dict(_flat(result.as_dict())), quantiles)


def _flat(content: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, float | None]]:
    for name, value in content.items():
        if name in NOT_FIGURES:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{head}{name}.")
        else:
            yield f"{head}{name}", None if value is None else rounded(value)


def _quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    ranks = [round(last * step / NUM_QUANTILES) for step in range(NUM_QUANTILES + 1)]
    return [rounded(ordered[rank]) for rank in ranks] if ordered else []


def rounded(value: float) -> float:
    """To five digits that count; what is whole then is an integer."""
    if not math.isfinite(value):
        return value
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() else short
