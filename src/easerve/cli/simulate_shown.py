"""What a simulation came to, as JSON, as tables and as charts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

from easerve.bench.report import Cell, Chart, Section, Series, Table
from easerve.goodput import Slo, Summary
from easerve.sim.load import Workload
from easerve.sim.run import Run
from easerve.sim.scenario import Scenario
from easerve.sim.trace import BESIDE
from easerve.types import NS_PER_S, Stage

MAX_NAMED = 8
SHOWN = {f"{name}.{part}" for name in ("ttft_s", "tpot_s") for part in ("p50", "p99")}
"""Of a client, which simulated ones have not."""
NUM_POINTS = 200
NUM_BINS = 100


@dataclass(frozen=True, slots=True)
class Result:
    """One run. ``bound_per_s``: requests per second that the system's engines can do at best."""

    system: str
    workload: Workload
    summary: Summary
    run: Run
    bound_per_s: float
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the summary's keys and what only a simulation knows."""
        return {
            "system": self.system,
            "rate_per_s": self.workload.rate_per_s,
            "seed": self.workload.seed,
            **self.summary.as_dict(),
            "utilisation": self.run.utilisation(),
            "bound_per_s": self.bound_per_s,
            "mean_batch": self.run.mean_batch,
            "num_preempted": self.run.num_preempted,
            "simulated_s": self.run.end_s,
            "wall_s": self.wall_s,
        }


Number = float | int | None
Figure = Callable[[Result], Number]


def sections(scenario: Scenario, results: Sequence[Result]) -> list[Section]:
    """A table for each rate, a column for each system; of several seeds the medians."""
    slos = scenario.slo.slos()
    num_seeds = len({result.workload.seed for result in results})
    by_load: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        columns = by_load.setdefault(title_of(result.workload), {})
        columns.setdefault(result.system, []).append(result)
    tables = [
        Table(f"{scenario.title}, {title}", ("", *columns), _rows(slos, columns))
        for title, columns in by_load.items()
    ]
    notes = [*_notes(slos, results, num_seeds)]
    if scenario.experiment is not None and (variants := scenario.experiment.changes):
        named = [*variants][:MAX_NAMED]
        more = f" and {len(variants) - len(named)} more" if len(variants) > len(named) else ""
        notes.append(f"Variants of this scenario, for --variant: {', '.join(named)}{more}.")
    return [Section("Systems", "\n\n".join(notes), tables)]


def title_of(workload: Workload) -> str:
    """The load in a few words."""
    rate = workload.rate_per_s
    return workload.arrivals if rate is None else f"{rate:g} requests/s"


def _rows(
    slos: Mapping[str, Slo], columns: Mapping[str, Sequence[Result]]
) -> list[tuple[Cell, ...]]:
    return [
        (name, *(_median(figure, column) for column in columns.values()))
        for name, figure in figures(slos)
    ]


def figures(slos: Mapping[str, Slo]) -> Iterator[tuple[str, Figure]]:
    """The rows of a table."""
    yield "completed", lambda result: result.summary.completed
    yield "failed or refused", lambda result: result.summary.num_requests - result.summary.completed
    yield "throughput, /s", lambda result: result.summary.throughput_per_s
    yield "bound, /s", lambda result: result.bound_per_s
    for name in slos:
        yield f"goodput {name}, /s", partial(_of_slo, "goodput_per_s", name, 1)
    for name in slos:
        yield f"attainment {name}, %", partial(_of_slo, "attainment", name, 100)
    for title, key, unit, scale in (("TTFT", "ttft_s", "s", 1), ("TPOT", "tpot_s", "ms", 1000)):
        for part, word in (("mean", "mean"), ("p50", "P50"), ("p99", "P99")):
            yield f"{title} {word}, {unit}", partial(_of_spread, key, part, scale)
    yield "items a call", lambda result: result.run.mean_batch
    yield "preempted", lambda result: result.run.num_preempted
    for stage in Stage:
        yield f"{stage.value} busy, %", partial(_busy, stage.value)
    yield "simulated, s", lambda result: result.run.end_s
    yield "computed in, s", lambda result: result.wall_s
    yield "times real time", lambda result: result.run.end_s / result.wall_s


def _of_slo(key: str, name: str, scale: float, result: Result) -> Number:
    value: float | None = getattr(result.summary, key)[name]
    return None if value is None else scale * value


def _of_spread(key: str, part: str, scale: float, result: Result) -> Number:
    value: float | None = getattr(getattr(result.summary, key), part)
    return None if value is None else scale * value


def _busy(stage: str, result: Result) -> Number:
    share = result.run.utilisation().get(stage)
    return None if share is None else 100 * share


def _median(figure: Figure, results: Sequence[Result]) -> Cell:
    values = [value for result in results if (value := figure(result)) is not None]
    return median(values) if values else None


def _limits(slo: Slo) -> str:
    ttft = [] if slo.ttft_s is None else [f"{slo.ttft_s:g} s"]
    tpot = [] if slo.tpot_s is None else [f"{1000 * slo.tpot_s:g} ms"]
    latency = [] if slo.latency_s is None else [f"{slo.latency_s:g} s in all"]
    return " and ".join([*ttft, *tpot, *latency])


def _notes(slos: Mapping[str, Slo], results: Sequence[Result], num_seeds: int) -> Iterator[str]:
    yield (
        "Bound: requests that the engines could do at best, if nothing waited and all were "
        "completed."
    )
    if slos:
        limits = "; ".join(f"{name} {_limits(slo)}" for name, slo in slos.items())
        yield (
            f"TTFT and TPOT that are promised: {limits}. Goodput: requests that met both, over the "
            "run's time. Attainment: their share of all requests."
        )
    if num_seeds > 1:
        yield f"Each figure is the median of {num_seeds} seeds."
    small = {name for result in results for name in result.summary.small_sample} & SHOWN
    if small:
        yield f"Too few requests to trust: {', '.join(sorted(small))}."


def charts(results: Sequence[Result]) -> list[Section]:
    """Distributions of each run, and when the stages of each were busy; spans must be there."""
    parts = []
    for title, key, unit in (("TTFT", "ttft_s", "s"), ("TPOT", "tpot_s", "s")):
        series = [_distribution(_name(result, results), _times(result, key)) for result in results]
        parts.append(Chart(f"{title}: share of requests", unit, "share", series))
    spread = Section("Distributions", "", parts)
    timelines = [
        Chart(f"{_name(result, results)}: engines busy", "s", "share", _timelines(result.run))
        for result in results
    ]
    return [spread, Section("Stages", "Mean over the engines of each stage.", timelines)]


def _name(result: Result, results: Sequence[Result]) -> str:
    """As short as it may be beside the others."""
    parts = [result.system]
    if len({title_of(each.workload) for each in results}) > 1:
        parts.append(title_of(result.workload))
    if len({each.workload.seed for each in results}) > 1:
        parts.append(f"seed {result.workload.seed}")
    return ", ".join(parts)


def _times(result: Result, key: str) -> list[float]:
    times = [getattr(each, key) for each in result.run.records if each.outcome == "completed"]
    return sorted(time for time in times if time is not None)


def _distribution(name: str, times: Sequence[float]) -> Series:
    """At most so many points, the last of them the slowest request."""
    step = max(1, len(times) // NUM_POINTS)
    ranks = sorted({*range(0, len(times), step), len(times) - 1} - {-1})
    return Series(name, [times[rank] for rank in ranks], [(n + 1) / len(times) for n in ranks])


def _timelines(run: Run) -> list[Series]:
    bin_ns = max(1, round(run.end_s * NS_PER_S / NUM_BINS))
    busy: dict[str, list[int]] = {engine: [0] * (NUM_BINS + 1) for engine in run.stages}
    for span in run.spans:
        if span.kind in BESIDE:
            continue
        for number in range(span.begin_ns // bin_ns, span.end_ns // bin_ns + 1):
            begin_ns, end_ns = number * bin_ns, (number + 1) * bin_ns
            inside_ns = min(span.end_ns, end_ns) - max(span.begin_ns, begin_ns)
            busy[span.engine][min(number, NUM_BINS)] += max(0, inside_ns)
    x = [number * bin_ns / NS_PER_S for number in range(NUM_BINS)]
    return [
        Series(stage.value, x, [fmean(shares) / bin_ns for shares in zip(*engines, strict=True)])
        for stage in Stage
        if (engines := [busy[name][:NUM_BINS] for name, at in run.stages.items() if at is stage])
    ]
