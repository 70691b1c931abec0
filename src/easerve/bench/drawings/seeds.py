"""Runs that differ in their seed only, as one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from easerve.bench.drawings.results import Run
from easerve.bench.drawings.written import Spread

PARTS = ("mean", "p50", "p99", "p90")


def merged(runs: Sequence[Run]) -> list[Run]:
    """By system and rate. Counts are added up, all other figures are means over the seeds, those of
    a percentile too. Invalid runs stay as they are.
    """
    groups: dict[object, list[Run]] = {}
    for number, run in enumerate(runs):
        key = number if run.invalid_because else (run.system, run.source, run.load)
        groups.setdefault(key, []).append(run)
    order = {system: number for number, system in enumerate(dict.fromkeys(r.system for r in runs))}
    found = [_one(group) for group in groups.values()]
    return sorted(found, key=lambda run: (order[run.system], run.source, run.rate_per_s or 0.0))


def has_seeds(runs: Sequence[Run]) -> bool:
    """Whether some of them differ in their seed only."""
    return len(merged(runs)) < len(runs)


def _one(group: Sequence[Run]) -> Run:
    first = group[0]
    if len(group) == 1:
        return first
    spreads = dict.fromkeys(name for run in group for name in run.spreads)
    return replace(
        first,
        seed=None,
        num_requests=sum(run.num_requests for run in group),
        completed=sum(run.completed for run in group),
        goodput_per_s=_means([run.goodput_per_s for run in group]),
        attainment=_means([run.attainment for run in group]),
        spreads={
            name: _spread([r.spreads[name] for r in group if name in r.spreads]) for name in spreads
        },
        throughput_per_s=_mean(run.throughput_per_s for run in group),
        output_tokens_per_s=_mean(run.output_tokens_per_s for run in group),
        counts=_sums([run.counts for run in group]),
        causes=_sums([run.causes for run in group]),
        small_sample=list(dict.fromkeys(name for run in group for name in run.small_sample)),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _means(figures: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    names = dict.fromkeys(name for each in figures for name in each)
    return {name: _mean(each.get(name) for each in figures) for name in names}


def _sums(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: sum(each.get(name, 0) for each in counts) for name in names}


def _spread(spreads: Sequence[Spread]) -> Spread:
    return Spread(*(_mean(getattr(spread, part) for spread in spreads) for part in PARTS))
