"""Times of requests: tables of percentiles, distributions with the limits that were promised."""

from collections.abc import Iterator, Sequence

from easerve.bench.drawings.facts import promised
from easerve.bench.drawings.figure import colours
from easerve.bench.drawings.labels import METRICS, Unit, labels, rounded, unit_of
from easerve.bench.drawings.parts import Cell, Chart, Limit, Series, Table
from easerve.bench.drawings.results import Run
from easerve.bench.drawings.written import Columns, Spread

PARTS = {"mean": "mean", "p50": "P50", "p90": "P90", "p99": "P99"}
DRAWN = ("ttft_s", "tpot_s", "latency_s")
"""Metrics that every request has one value of."""
MAX_NAME = 5
"""Characters, of a limit in a chart."""
MAX_POINTS = 500
MAX_POINTS_IN_ALL = 24_000
LOG_FROM = 20
"""Times the smallest value, from where on an axis is logarithmic."""


def tables(runs: Sequence[Run]) -> Iterator[Table]:
    """Of one run a row per metric, else a table per metric with a row per run."""
    metrics = [key for key in METRICS if any(_is_told(run, key) for run in runs)]
    if len(runs) == 1:
        rows = []
        for key in metrics:
            unit = unit_of(_values(runs[0].spreads[key]))
            rows.append([f"{METRICS[key]}, {unit.name}", *_cells(runs[0], key, unit)])
        if rows:
            yield Table("Times of completed requests", ["", *PARTS.values()], rows)
        return
    for key in metrics:
        unit = unit_of(v for run in runs if key in run.spreads for v in _values(run.spreads[key]))
        named = zip(labels(runs), runs, strict=True)
        rows = [[label, *_cells(run, key, unit)] for label, run in named if _is_told(run, key)]
        yield Table(f"{METRICS[key]}, {unit.name}", ["run", *PARTS.values()], rows)


def _is_told(run: Run, key: str) -> bool:
    """Nobody waits for a slot where there are enough, which nobody needs to read."""
    spread = run.spreads.get(key)
    values = [] if spread is None else _values(spread)
    return any(value is not None and (value > 0 or key != "slot_wait_s") for value in values)


def _values(spread: Spread) -> list[float | None]:
    return [getattr(spread, part) for part in PARTS]


def _cells(run: Run, key: str, unit: Unit) -> list[Cell]:
    spread = run.spreads.get(key)
    if spread is None:
        return [None] * len(PARTS)
    return [rounded(unit.of(value)) for value in _values(spread)]


def charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Distributions of the runs that tell every request; of each load in charts of its own."""
    told = [run for run in runs if run.requests is not None]
    number = colours([run.system for run in runs])
    by_rate = sorted(told, key=lambda run: run.rate_per_s or 0.0)
    loads = list(dict.fromkeys(run.load for run in by_rate))
    most = max(50, min(MAX_POINTS, MAX_POINTS_IN_ALL // max(1, len(told) * len(DRAWN))))
    is_compared = len({run.system for run in told}) > 1
    if not is_compared:
        loads = [""]  # one system: a line per load
    for load in loads:
        of_load = [run for run in told if load in ("", run.load)]
        by_system = len({run.system for run in of_load}) == len(of_load) and is_compared
        for key in DRAWN:
            title = f"{METRICS[key]}{', ' + load if load and len(loads) > 1 else ''}"
            shown = [number[run.system] if by_system else None for run in of_load]
            chart = _distribution(title, key, of_load, shown, most)
            if chart is not None:
                yield chart


def _distribution(
    title: str, key: str, runs: Sequence[Run], shown: Sequence[int | None], most: int
) -> Chart | None:
    found = [_times(run.requests, key) for run in runs if run.requests is not None]
    if not any(times for times, _ in found):
        return None
    unit = unit_of(time for times, _ in found for time in times)
    named = zip(labels(runs), found, shown, strict=True)
    steps = [
        _step(name, [unit.scale * time for time in times], num, most, colour)
        for name, (times, num), colour in named
    ]
    limits = _limits(runs, key, unit)
    drawn = [x for each in steps for x in each.x if isinstance(x, int | float)]
    drawn += [limit.value for limit in limits]
    is_log = min(drawn) > 0 and max(drawn) >= LOG_FROM * min(drawn)
    return Chart(
        f"{title}: share of requests within a time",
        f"{METRICS[key]}, {unit.name}",
        "% of requests",
        steps,
        "step",
        limits=limits,
        x_log=is_log,
        x_range=_room(min(drawn), max(drawn), is_log),
        y_range=(0, 103),
    )


def _room(low: float, high: float, is_log: bool) -> tuple[float, float]:
    """A little more than what is drawn, so that nothing lies on the edge."""
    if is_log:
        return low / 1.2, high * 1.2
    room = 0.04 * (high - low) or 0.5 * high or 1.0
    return max(0.0, low - room), high + room


def _times(requests: Columns, key: str) -> tuple[list[float], int]:
    """Sorted times of the completed, and the number that they are a share of: those and all that
    did not complete. One that has no such time at all (a TPOT of a single token) is not counted.
    """
    values = zip(getattr(requests, key), requests.outcome, strict=True)
    times = sorted(v for v, outcome in values if outcome == "completed" and v is not None)
    return times, len(times) + sum(outcome != "completed" for outcome in requests.outcome)


def _step(name: str, times: Sequence[float], num: int, most: int, colour: int | None) -> Series:
    """At most so many steps, the fastest and the slowest request among them."""
    last = len(times) - 1
    count = min(most, len(times))
    ranks = sorted({round(last * at / max(1, count - 1)) for at in range(count)})
    y = [100 * (rank + 1) / num for rank in ranks]
    return Series(name, [times[rank] for rank in ranks], y, colour=colour)


def _limits(runs: Sequence[Run], key: str, unit: Unit) -> list[Limit]:
    """Those of the tiers on which all agree."""
    agreed = {name: each[0] for name, each in promised(runs).items() if len(each) == 1}
    values = {name: getattr(limits, key) for name, limits in agreed.items()}
    return [
        Limit(unit.scale * value, _short(name, unit, value), "x")
        for name, value in values.items()
        if value is not None
    ]


def _short(name: str, unit: Unit, value_s: float) -> str:
    """Names of tiers stand beside each other; those of others would not."""
    return name if len(name) <= MAX_NAME else f"{unit.scale * value_s:.4g} {unit.name}"
