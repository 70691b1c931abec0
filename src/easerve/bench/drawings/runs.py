"""Runs and searches beside each other, as sections of a report."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from easerve.bench.drawings import capacity, facts, goodput, over_time, times
from easerve.bench.drawings.figure import colours
from easerve.bench.drawings.labels import are_mixed, labels
from easerve.bench.drawings.parts import Section
from easerve.bench.drawings.results import Capacity, Run
from easerve.bench.drawings.seeds import has_seeds, merged
from easerve.bench.drawings.variants import distinguished

GOODPUT = (
    "Goodput is the number of requests that met every limit of their tier, over the run's time; "
    "attainment is their share of all that were sent. Those that were not completed met nothing."
)
DISTRIBUTIONS = (
    "A request that was not completed counts as one that never came, so a line of a run with "
    "failures ends below 100 %. Dashed uprights are the limits of the tiers."
)
SIMULATED = "All of this is simulated; nothing was measured."
MIXED = "Dashed lines and hatched bars are simulated, all others measured."
SEEDS = (
    "Runs that differ in their seed only are one row: counts are added up, other figures, "
    "percentiles too, are means over the seeds. A band around a line is from the lowest to the "
    "highest of them."
)
HIGHEST = (
    "In brackets: the lowest rate at which the promise was broken. ≥: it was kept at every rate "
    "that was tried. –: it was not kept even by requests alone."
)
MAX_OVER_TIME = 4
"""Runs that are drawn over their time."""


def sections(runs: Sequence[Run], found: Sequence[Capacity] = ()) -> list[Section]:
    """``found``: of searches, whose probes are among the runs. There is one of either at least.

    What nobody may overlook comes first.
    """
    runs, found = distinguished(runs, found)
    rows = merged(runs)
    made = [
        *_highest(found, runs),
        _goodput(runs, rows),
        _times(runs, rows),
        *_over_time(runs),
        _requests(rows),
        Section("What was run", "", list(facts.tables(runs))),
    ]
    kept = [section for section in made if section.parts]
    alert = "\n".join([*capacity.alerts(found), *facts.alerts(runs)])
    return [replace(kept[0], alert=alert), *kept[1:]]


def _highest(found: Sequence[Capacity], runs: Sequence[Run]) -> Iterator[Section]:
    if found:
        number = colours([run.system for run in runs] + [each.system for each in found])
        text = "\n\n".join([HIGHEST, *capacity.notes(found)])
        yield Section("Highest rates", text, list(capacity.drawn(found, number)))


def _goodput(runs: Sequence[Run], rows: Sequence[Run]) -> Section:
    promises = goodput.promises(runs)
    charts = list(goodput.charts(runs))
    text = [GOODPUT]
    if has_seeds(runs):
        text.append(SEEDS)
    if are_mixed(runs):
        text.append(MIXED)
    elif runs and runs[0].source == "simulated":
        text.append(SIMULATED)
    tables = [*goodput.tables(rows), *([] if promises is None else [promises])]
    return Section("Goodput", "\n\n".join(text), [*tables, *charts])


def _times(runs: Sequence[Run], rows: Sequence[Run]) -> Section:
    charts = list(times.charts(runs))
    text = [*([DISTRIBUTIONS] if charts else []), *facts.notes(rows)]
    return Section("Times", "\n\n".join(text), [*times.tables(rows), *charts])


def _requests(rows: Sequence[Run]) -> Section:
    causes = facts.causes(rows)
    tables = [facts.outcomes(rows)] if rows else []
    return Section("Requests", "", [*tables, *([] if causes is None else [causes])])


def _over_time(runs: Sequence[Run]) -> Iterator[Section]:
    named = [(label, over_time.charts(run)) for label, run in zip(labels(runs), runs, strict=True)]
    drawn = [(label, charts) for label, charts in named if charts]
    left = len(drawn) - MAX_OVER_TIME
    for number, (label, charts) in enumerate(drawn[:MAX_OVER_TIME], 1):
        is_last = number == MAX_OVER_TIME
        text = f"{left} more runs are not drawn over time." if left > 0 and is_last else ""
        title = "Over time" if len(drawn) == 1 else f"Over time: {label}"
        yield Section(title, text, charts)
