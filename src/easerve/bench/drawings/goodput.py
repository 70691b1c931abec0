"""Goodput and attainment of runs, against the offered rate or by tier."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from easerve.bench.drawings.facts import promised
from easerve.bench.drawings.figure import colours
from easerve.bench.drawings.labels import are_mixed, labels, rounded, systems, unit_of
from easerve.bench.drawings.parts import Cell, Chart, Limit, Series, Table
from easerve.bench.drawings.results import Run
from easerve.bench.drawings.written import Limits

WANTED_PERCENT = 90
OFFERED = "offered requests/s"
SPREADS = (
    ("ttft_s", "p50", "TTFT P50"),
    ("ttft_s", "p99", "TTFT P99"),
    ("tpot_s", "p99", "TPOT P99"),
)
Figure = Callable[[Run], float | None]
OfTier = Callable[[Run, str], float | None]
Group = tuple[str, Sequence[Run]]


def tiers(runs: Sequence[Run]) -> list[str]:
    """The names of all objectives, as they come."""
    return list(dict.fromkeys(name for run in runs for name in (*run.slo, *run.goodput_per_s)))


def tables(runs: Sequence[Run]) -> Iterator[Table]:
    """A row per run; of a single run a row per tier."""
    names = tiers(runs)
    if not names:
        return
    if len(runs) == 1:
        (run,) = runs
        columns = ("tier", "goodput, /s", "attainment, %")
        rows = [(name, _shown(run, name, _goodput), _shown(run, name, _percent)) for name in names]
        yield Table("Goodput: requests that met the promise", columns, rows)
        return
    yield _table("Goodput: requests/s that met the promise", runs, _goodput)
    yield _table("Attainment: % of all requests", runs, _percent)


def promises(runs: Sequence[Run]) -> Table | None:
    """The limits of each tier that all runs agree on; None without one."""
    rows = [
        (name, *_limits(limits[0])) for name, limits in promised(runs).items() if len(limits) == 1
    ]
    columns = ("tier", "TTFT at most, ms", "TPOT at most, ms", "latency at most, ms")
    kept = [at for at in range(4) if any(row[at] is not None for row in rows)]
    if not rows:
        return None
    table = [[row[at] for at in kept] for row in rows]
    return Table("Promises", [columns[at] for at in kept], table)


def _limits(limits: Limits) -> tuple[float | None, ...]:
    times_s = (limits.ttft_s, limits.tpot_s, limits.latency_s)
    return tuple(None if time_s is None else 1000 * time_s for time_s in times_s)


def charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Against the rate where there are several, without invalid runs, else bars by tier."""
    names = tiers(runs)
    of_rate = [run for run in runs if run.rate_per_s is not None and not run.invalid_because]
    if len({run.rate_per_s for run in of_rate}) > 1:
        yield from _by_rate(of_rate, names)
    elif names and all(run.rate_per_s == runs[0].rate_per_s for run in runs):
        yield from _by_tier(runs, names)


def _by_rate(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Chart]:
    for title, unit, figure in FIGURES:
        for name, lines in _lines(title, runs, names, figure):
            yield Chart(
                f"{name} by offered rate",
                OFFERED,
                unit,
                [*lines, _all_met(runs)] if figure is _goodput else lines,
                limits=_marks(figure),
                x_range=_rates(runs),
                y_range=_range(figure),
            )
    for key, part, title in SPREADS:
        chart = _spread_by_rate(runs, title, _of_spread(key, part))
        if any(y is not None for line in chart.lines for y in line.y):
            yield chart


def _lines(
    title: str, runs: Sequence[Run], names: Sequence[str], figure: OfTier
) -> Iterator[tuple[str, list[Series]]]:
    """A chart for each tier where systems are compared, else all tiers in one."""
    groups = _groups(runs)
    if len(groups) > 1:
        for name in names:
            yield f"{title}, tier {name},", _by_system(runs, _of(figure, name))
    elif names:
        ((_, of_system),) = groups
        yield (
            title,
            [
                _line(name, of_system, _of(figure, name), number)
                for number, name in enumerate(names)
            ],
        )


def _rates(runs: Sequence[Run]) -> tuple[float, float]:
    """From nothing to a little more than the highest."""
    return 0, 1.05 * max(run.rate_per_s or 0.0 for run in runs)


def _spread_by_rate(runs: Sequence[Run], title: str, seconds: Figure) -> Chart:
    unit = unit_of(map(seconds, runs))
    lines = _by_system(runs, lambda run: unit.of(seconds(run)))
    return Chart(
        f"{title} by offered rate", OFFERED, f"{title}, {unit.name}", lines, x_range=_rates(runs)
    )


def _by_system(runs: Sequence[Run], figure: Figure) -> list[Series]:
    """A system has one colour, measured or simulated, in each chart of the page."""
    number = colours([run.system for run in runs])
    return [
        replace(
            _line(name, of_system, figure, number[of_system[0].system]),
            dashed=of_system[0].source == "simulated" and are_mixed(runs),
        )
        for name, of_system in _groups(runs)
    ]


def _by_tier(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Chart]:
    number = colours([run.system for run in runs])
    for title, unit, figure in FIGURES:
        bars = [
            Series(
                label,
                names,
                [figure(run, name) for name in names],
                colour=number[run.system],
                dashed=run.source == "simulated" and are_mixed(runs),
            )
            for label, run in zip(labels(runs), runs, strict=True)
        ]
        yield Chart(
            f"{title} by tier",
            "tier",
            unit,
            bars,
            "bar",
            limits=_marks(figure),
            y_range=_range(figure),
        )


def _marks(figure: OfTier) -> Sequence[Limit]:
    return [Limit(WANTED_PERCENT, f"{WANTED_PERCENT} %")] if figure is _percent else ()


def _range(figure: OfTier) -> tuple[float, float] | None:
    return (0, 103) if figure is _percent else None


def _groups(runs: Sequence[Run]) -> list[Group]:
    """The runs of each system, by rate."""
    groups: dict[str, list[Run]] = {}
    for name, run in zip(systems(runs), runs, strict=True):
        groups.setdefault(name, []).append(run)
    return list(groups.items())


def _line(name: str, runs: Sequence[Run], figure: Figure, colour: int | None = None) -> Series:
    """At each rate the mean over the runs, in a band from the lowest to the highest."""
    at_rate: dict[float, list[float]] = defaultdict(list)
    for run in runs:
        value = figure(run)
        if run.rate_per_s is not None and value is not None:
            at_rate[run.rate_per_s].append(value)
    rates = sorted(at_rate)
    found = [at_rate[rate] for rate in rates]
    has_band = any(min(values) < max(values) for values in found)
    return Series(
        name,
        rates,
        [fmean(values) for values in found],
        [min(values) for values in found] if has_band else None,
        [max(values) for values in found] if has_band else None,
        colour=colour,
    )


def _all_met(runs: Sequence[Run]) -> Series:
    rates = [0.0, max(run.rate_per_s or 0.0 for run in runs)]
    return Series("every request", rates, rates, muted=True)


def _table(title: str, runs: Sequence[Run], figure: OfTier) -> Table:
    names = tiers(runs)
    rows: list[list[Cell]] = [
        [label, *(_shown(run, name, figure) for name in names)]
        for label, run in zip(labels(runs), runs, strict=True)
    ]
    return Table(title, ["run", *names], rows)


def _shown(run: Run, tier: str, figure: OfTier) -> float | None:
    value = figure(run, tier)
    if value is None:
        return None
    return round(value, 1) if figure is _percent else rounded(value)


def _goodput(run: Run, tier: str) -> float | None:
    return run.goodput_per_s.get(tier)


def _percent(run: Run, tier: str) -> float | None:
    share = run.attainment.get(tier)
    return None if share is None else 100 * share


def _of(figure: OfTier, tier: str) -> Figure:
    return lambda run: figure(run, tier)


def _of_spread(key: str, part: str) -> Figure:
    def figure(run: Run) -> float | None:
        value: float | None = getattr(run.spreads.get(key), part, None)
        return value

    return figure


FIGURES = (
    ("Goodput", "requests/s that met it", _goodput),
    ("Attainment", "% of requests", _percent),
)
