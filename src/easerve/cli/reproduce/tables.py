"""What the runs of a study came to, as rows: systems beside each other, variants, a grid."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from easerve.cli.reproduce.plan import Side, Study
from easerve.cli.reproduce.text import Cell, change, label, who
from easerve.cli.reproduce.verdicts import Results
from easerve.goodput import TIERS
from easerve.types import Stage

TIER = "S3"
GOODPUT = f"goodput_per_s.{TIER}"
LOAD_METRICS = (
    "throughput_per_s",
    *(f"{name}.{part}" for name in ("ttft_s", "tpot_s") for part in ("p50", "p99")),
    *(f"utilisation.{stage.value}" for stage in Stage),
)
VARIANT_METRICS = ("throughput_per_s", GOODPUT, "ttft_s.p99", "tpot_s.p99")
PAPER = "paper"
"""The variant with the paper's own rules."""
NOTABLE = 0.01


class Rows(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def compared_sides(study: Study) -> Iterator[Side]:
    """Every system as it is and in each variant that changes it, once for those that run alike;
    not a grid's.
    """
    for system in study.experiment.systems:
        yield Side(system, "")
        for variant in study.alike(system):
            yield Side(system, variant)


def shown_sides(study: Study) -> list[Side]:
    """Every system as it is, and those with the paper's own rules."""
    return [side for side in compared_sides(study) if side.variant in ("", PAPER)]


def scaled(value: float | None, metric: str) -> float | None:
    return None if value is None else value * label(metric).scale


def headed(metric: str) -> str:
    text, unit, _ = label(metric)
    return f"{text}, {unit}" if unit else text


def systems(results: Results, study: Study, knobs: str, rate_per_s: float) -> Rows:
    """Goodput at the best rate by tier, the rest at one rate; of variants only the paper's."""
    columns = ["system", *TIERS, *map(headed, LOAD_METRICS)]
    rows = []
    for side in shown_sides(study):
        goodputs = [
            results.best(study, knobs, side, study.rates_per_s, f"goodput_per_s.{tier}")
            for tier in TIERS
        ]
        figures = _at(results, study, knobs, side, rate_per_s)
        rows.append([side_name(study, side), *goodputs, *figures])
    return Rows(columns, rows)


def _at(
    results: Results, study: Study, knobs: str, side: Side, rate_per_s: float
) -> list[float | None]:
    return [
        scaled(results.value(study, knobs, side, rate_per_s, metric), metric)
        for metric in LOAD_METRICS
    ]


def all_rates(results: Results, study: Study, knobs: str) -> Rows:
    """Every system at every rate."""
    columns = ["system", "rate, req/s", *TIERS, *map(headed, LOAD_METRICS)]
    rows: list[list[Cell]] = []
    for side in compared_sides(study):
        for rate_per_s in study.rates_per_s:
            goodputs = [
                results.value(study, knobs, side, rate_per_s, f"goodput_per_s.{tier}")
                for tier in TIERS
            ]
            figures = _at(results, study, knobs, side, rate_per_s)
            rows.append([side_name(study, side), rate_per_s, *goodputs, *figures])
    return Rows(columns, rows)


def variants(results: Results, study: Study, knobs: str) -> Rows:
    """Every variant at every rate."""
    several = len(study.rates_per_s) > 1
    columns = ["variant"]
    for rate_per_s in study.rates_per_s:
        end = f" at {rate_per_s:g}/s" if several else ""
        columns += [f"{headed(metric)}{end}" for metric in VARIANT_METRICS]
    rows: list[list[Cell]] = []
    for side in compared_sides(study):
        figures = [
            scaled(results.value(study, knobs, side, rate_per_s, metric), metric)
            for rate_per_s in study.rates_per_s
            for metric in VARIANT_METRICS
        ]
        rows.append([side_name(study, side), *figures])
    return Rows(columns, rows)


class Effect(NamedTuple):
    """A variant's figure, ``ratio`` times that of the scenario as it is."""

    ratio: float
    variant: str
    text: str


def effects(
    results: Results, study: Study, knobs: str, metric: str, rate_per_s: float
) -> list[Effect]:
    """What each variant changes, from the least figure to the largest; less than 1 % is left out.

    A figure of 0 changes as much as any can.
    """
    found = []
    for side in compared_sides(study):
        plain = results.value(study, knobs, Side(side.system, ""), rate_per_s, metric)
        value = results.value(study, knobs, side, rate_per_s, metric)
        if side.variant and value is not None and plain and abs(value / plain - 1) >= NOTABLE:
            text = f"{side_name(study, side)} {change(value, plain)}"
            found.append(Effect(value / plain, side.variant, text))
    return sorted(found)


def side_name(study: Study, side: Side) -> str:
    """As short as it may be in its study; variants that run alike are named together."""
    names = ", ".join(study.alike(side.system).get(side.variant, [side.variant]))
    if len(study.experiment.systems) > 1:
        return who(Side(side.system, names))
    return names or "as it is"


def ablations(results: Results, studies: Sequence[Study], knobs: str) -> Rows:
    """Variants of several studies in one table, each study at its last two rates."""
    columns = ["variant"]
    places = []
    for study in studies:
        short = study.scenario.title.partition(" ")[0].partition("-")[0]
        for rate_per_s in study.rates_per_s[-2:]:
            columns += [f"{short} {rate_per_s:g}/s: {TIER}", "P99 TTFT, s"]
            places += [(study, rate_per_s, metric) for metric in (GOODPUT, "ttft_s.p99")]
    names = dict.fromkeys(name for study in studies for name in ["", *study.experiment.variants])
    rows: list[list[Cell]] = []
    for name in names:
        row: list[Cell] = [name or "as it is"]
        for study, rate_per_s, metric in places:
            there = not name or name in study.experiment.variants
            side = Side(study.experiment.systems[0], name)
            value = results.value(study, knobs, side, rate_per_s, metric) if there else None
            row.append(value)
        rows.append(row)
    return Rows(columns, rows)


def grid(results: Results, study: Study, knobs: str) -> Rows:
    """Goodput over the points of a grid: of all, and of those with each choice of each list."""
    system = study.experiment.systems[0]
    names = [
        name for name in study.experiment.all_variants if name not in study.experiment.variants
    ]
    columns = ["configurations", "number"]
    for rate_per_s in study.rates_per_s:
        columns += [f"{word} at {rate_per_s:g}/s" for word in ("best", "median", "least")]
    rows = [_grid_row(results, study, knobs, system, "all", names)]
    for choices in study.experiment.grid:
        for choice in choices:
            chosen = [name for name in names if choice in name.split()]
            rows.append(_grid_row(results, study, knobs, system, choice, chosen))
    return Rows(columns, rows)


def _grid_row(
    results: Results, study: Study, knobs: str, system: str, title: str, names: Sequence[str]
) -> list[Cell]:
    row: list[Cell] = [title, len(names)]
    for rate_per_s in study.rates_per_s:
        values = [each for each, _ in _goodputs(results, study, knobs, system, names, rate_per_s)]
        row += [max(values), median(values), min(values)] if values else [None] * 3
    return row


def _goodputs(
    results: Results,
    study: Study,
    knobs: str,
    system: str,
    names: Sequence[str],
    rate_per_s: float,
) -> list[tuple[float, str]]:
    found = []
    for name in names:
        value = results.value(study, knobs, Side(system, name), rate_per_s, GOODPUT)
        if value is not None:
            found.append((value, name))
    return found


def best_of_grid(
    results: Results, study: Study, knobs: str, rate_per_s: float
) -> tuple[str, float, int] | None:
    """The configuration with the most goodput, that, and how many come to 99 % of it."""
    names = [
        name for name in study.experiment.all_variants if name not in study.experiment.variants
    ]
    system = study.experiment.systems[0]
    found = _goodputs(results, study, knobs, system, names, rate_per_s)
    if not found:
        return None
    most, name = max(found, key=lambda pair: (pair[0], pair[1]))
    return name, most, sum(value >= 0.99 * most for value, _ in found)
