"""The pages: made of the book, the scenarios and the fitted knobs, and of nothing else."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from easerve.cli.reproduce import anchors, tables, topologies
from easerve.cli.reproduce.anchors import SHOWN_SET
from easerve.cli.reproduce.fit import Fit, squared_log_error
from easerve.cli.reproduce.plan import KNOB_SETS, UNTUNED, Side, Study
from easerve.cli.reproduce.text import (
    Cell,
    limits,
    listed,
    number,
    paragraph,
    table,
    who,
)
from easerve.cli.reproduce.verdicts import (
    TIMES,
    Results,
    compared,
    consistencies,
)

TABLES_PAGE = "reproduction-tables.md"
FIGURES = "figures"
NUM_EFFECTS = 3
"""Of each sign."""
WITHOUT_HOLDING = ("when-none", "no-flow")
"""Variants without a rule that holds requests back before Encode."""
COMPARED_AT = 2.0
"""The rate, requests/s, at which systems stand side by side; or a study's first one."""

HEAD = """\
# The published experiments, simulated

The paper's experiments (arXiv 2609.31551) on modelled engines, beside what was published. `easerve
reproduce` runs the experiments of `scenarios/` and writes this page; no number of it is typed.
`easerve reproduce --quick` runs what the anchors need and prints their table; `--check` compares
that with [reproduction.json](reproduction.json), which keeps every run, and ends with exit code 1
if this page is stale. Nothing here was measured on the paper's hardware."""

RULES = """\
**Untuned**: the defaults of costs (measured kernels) and of engines. How the GPUs are divided into
engines, the topology, is no default but a choice: those of the [configurations](#configurations)
are chosen as the published figures suggest, and {best}. **With named knobs**: the [changes
below](#named-knobs), fitted on {fitted} and nothing else; all other scenarios are held out.
**Source** `abstract`: the paper's abstract; `digest`: public digests of the paper, not the paper.

**Within 25 %** is what it says; of a ratio, the change (the ratio less one) is judged, and 0.01 is
forgiven. **Direction only**: not that near, but the difference to every rival, which is every other
anchor of the same figure and rate here, has the published sign and, in logarithms, at least a third
of the published size. **Not reproduced**: the rest. A figure is the median over seeds of
independent runs; goodput counts the requests that met a tier's TTFT and TPOT over the time of the
run; *best rate* is the largest over the experiment's rates."""

BEST_SHOWN = (
    "[what each system comes to at its best one](#each-system-at-its-best-topology) stands beside "
    "them"
)

CONSISTENCY = """\
N requests at rate L through a bottleneck of rate m, first come first served, take N / m, and the
99th percentile waits 0.99 N (1 / m − 1 / L). For published pairs this says how long the 99th
percentile should be with the published throughput, and with which rate the two would fit."""


class Page(NamedTuple):
    """What pages are made of."""

    studies: Sequence[Study]
    fit: Fit
    results: Results


def main(page: Page) -> str:
    """docs/reproduction.md."""
    return "\n".join(_main(page)) + "\n"


def _main(page: Page) -> Iterator[str]:
    page = _ordered(page)
    found = {study.name: list(compared(page.results, study)) for study in page.studies}
    yield HEAD
    yield ""
    yield _volume(page)
    yield ""
    fitted = listed([f"`{name}`" for name in page.fit.scenarios])
    chosen = [study for study in page.studies if study.topologies]
    rules = RULES.format(fitted=fitted, best=BEST_SHOWN if chosen else "no others were tried")
    yield "\n\n".join(map(paragraph, rules.split("\n\n")))
    yield "\n## How many anchors hold\n"
    yield from anchors.counts(page.studies, page.fit.scenarios, found)
    if chosen:
        yield f"\n{anchors.dependent(found)}"
        yield "\n## Each system at its best topology\n"
        yield from _topologies(page, chosen)
    yield "\n## Configurations\n"
    yield from _configurations(page)
    yield "\n## Anchors"
    for study in page.studies:
        if found[study.name]:
            yield from anchors.table_of(study, found[study.name])
    yield "\n## Do the published figures fit each other?\n"
    yield from _consistencies(page)
    yield "\n## Named knobs\n"
    yield from _knobs(page)
    comparisons = [study for study in page.studies if study.is_comparison]
    if comparisons:
        yield "\n## Systems side by side\n"
        yield from _comparisons(page, comparisons)
    others = [study for study in page.studies if not study.is_comparison]
    mechanisms = [study for study in others if is_ablation(study)]
    if mechanisms:
        yield "\n## Without one mechanism at a time: where the gain comes from\n"
        yield from _ablations(page, mechanisms)
    for study in others:
        if not is_ablation(study):
            yield from _study(page, study)


def is_ablation(study: Study) -> bool:
    """Of our system alone, at several rates."""
    experiment = study.experiment
    ours = experiment.systems == (study.scenario.system,)
    return ours and not experiment.grid and len(study.rates_per_s) > 1


def _ordered(page: Page) -> Page:
    """What was fitted first, then what compares systems, with anchors first; then the rest."""

    def place(study: Study) -> tuple[bool, bool, bool]:
        fitted = study.name in page.fit.scenarios
        return not fitted, not study.is_comparison, not study.scenario.anchors

    return page._replace(studies=sorted(page.studies, key=place))


def _volume(page: Page) -> str:
    runs = page.results.book.runs
    hours = sum(run.get("simulated_s") or 0.0 for run in runs.values()) / 3600
    requests = sum(run.get("num_requests") or 0 for run in runs.values())
    return paragraph(
        f"All of it: {len(runs):,} runs, {requests:,} requests, {hours:,.0f} virtual hours. "
        "What a simulated second costs on a machine is said by `easerve bench simulate`."
    )


def _topologies(page: Page, studies: Sequence[Study]) -> Iterator[str]:
    yield paragraph(
        f"Untuned, with the first seed alone. Every system, ours too, may choose from its "
        f"topologies (*best of*: their number) and from the rates the one with the most "
        f"goodput {tables.TIER}; *as it is*: the most with the engines of the configurations. "
        "Throughput at the last rate is that of the topology with the most of it. Ours has the "
        "rules of this repository, not the paper's; *ours ÷ it*: both at their best; *published*: "
        "the paper's own over the other. "
        f"[All topologies at every rate]({TABLES_PAGE})."
    )
    for study in studies:
        yield f"\n### {study.scenario.title}: best topologies\n"
        yield from table(*topologies.best(page.results, study))


def _configurations(page: Page) -> Iterator[str]:
    yield paragraph(
        "The engines of each system as it is, where systems are compared. E: encode, P: prefill, "
        "D: decode; TP: GPUs of an engine."
    )
    yield ""
    yield from table(*topologies.configurations([s for s in page.studies if s.is_comparison]))


def _ablations(page: Page, studies: Sequence[Study]) -> Iterator[str]:
    yield paragraph(
        "Untuned; goodput in requests/s, at the last two rates of each. *nothing*: one request a "
        f"call, no local prefill, no flow control. {_holding(page, studies)}Beyond "
        "what the engines can do, goodput says who waits rather than how much is served: a queue "
        "held before Encode is shared by all, so that all are late together, and a share that is "
        "kept exactly leaves the side with the smaller half idle at times, unless a guard gives it "
        "up. Largest gains and losses are those of 1 % at least. Throughput and all other figures "
        f"are on the page of [tables]({TABLES_PAGE})."
    )
    yield ""
    yield from table(*tables.ablations(page.results, studies, UNTUNED))
    yield ""
    for study in studies:
        rate_per_s = study.rates_per_s[-1]
        yield f"- {study.name}, {rate_per_s:g}/s: {_effects(page, study, rate_per_s)}"


def _holding(page: Page, studies: Sequence[Study]) -> str:
    """Where goodput grows at the last rate when nothing holds requests back, in a sentence."""
    parts = []
    for study in studies:
        effects = tables.effects(
            page.results, study, UNTUNED, tables.GOODPUT, study.rates_per_s[-1]
        )
        gains = [each.text for each in effects if is_free(each)]
        if gains:
            parts.append(f"{' and '.join(gains)} in {study.name}")
    if not parts:
        return ""
    return (
        "Requests that the rules hold back cost goodput near saturation: without the rule it is, "
        f"at the last rate, {listed(parts)}. "
    )


def is_free(effect: tables.Effect) -> bool:
    return effect.variant in WITHOUT_HOLDING and effect.ratio > 1


def _effects(page: Page, study: Study, rate_per_s: float) -> str:
    """The largest gains and losses, those of TTFT, too."""
    parts = []
    for metric, text in ((tables.GOODPUT, f"goodput {tables.TIER}"), ("ttft_s.p99", "P99 TTFT")):
        found = tables.effects(page.results, study, UNTUNED, metric, rate_per_s)
        less = [each.text for each in found if each.ratio < 1][:NUM_EFFECTS]
        more = [each.text for each in reversed(found) if each.ratio > 1][:NUM_EFFECTS]
        gains, losses = (less, more) if metric.startswith(TIMES) else (more, less)
        ends = [", ".join(each) or "none of 1 %" for each in (gains, losses)]
        parts.append(f"{text}: largest gains {ends[0]}; largest losses {ends[1]}")
    return f"{'. '.join(parts)}."


def _consistencies(page: Page) -> Iterator[str]:
    yield f"{CONSISTENCY}\n"
    rows: list[list[Cell]] = []
    for study in page.studies:
        for each in consistencies(study):
            anchor = each.anchor
            rows.append(
                [
                    f"{study.name}: {who(Side(anchor.system, anchor.variant or ''))}",
                    anchor.rate_per_s,
                    anchor.published,
                    each.published_ttft_s,
                    each.ttft_p99_s,
                    each.rate_per_s,
                ]
            )
    columns = ["run", "rate, req/s", "throughput, req/s", "P99 TTFT, s"]
    columns += ["P99 TTFT by the throughput, s", "rate with which both fit, req/s"]
    yield from table(columns, rows)


def _knobs(page: Page) -> Iterator[str]:
    fitted_on = [study for study in page.studies if study.name in page.fit.scenarios]
    errors = [squared_log_error(page.results, fitted_on, knobs) for knobs in KNOB_SETS]
    yield paragraph(
        "Chosen by a search over the choices of `scenarios/fitted.yaml` (`easerve reproduce "
        "--fit`). Mean squared logarithm of simulated over published, a factor of two at most, on "
        f"what they are fitted on: {number(errors[0])} untuned, {number(errors[1])} with them."
    )
    yield ""
    rows: list[list[Cell]] = []
    for name, knob in page.fit.knobs.items():
        chosen = knob.choices[knob.chosen]
        text = ", ".join(f"`{path}: {value}`" for path, value in chosen.items()) or "left alone"
        rows.append([name, text, str(len(knob.choices)), knob.why])
    yield from table(["knob", "chosen", "of", "why it is one"], rows)


def _comparisons(page: Page, studies: Sequence[Study]) -> Iterator[str]:
    yield paragraph(
        "Untuned. Goodput is that of the best rate, by tier from strict to loose; the rest at "
        f"{COMPARED_AT:g} requests/s. An engine is busy while it has anything to do, a decode "
        f"engine with a single sequence as well. [Every rate, all scenarios, and with named "
        f"knobs]({TABLES_PAGE})."
    )
    for name in PICTURES:
        yield f"\n![{PICTURES[name]}]({FIGURES}/{name}.svg)"
    for study in studies:
        if not study.scenario.anchors:
            continue
        slo = study.scenario.slo.slos().get(tables.TIER)
        limit = "" if slo is None else f" ({tables.TIER}: {limits(slo)})"
        yield f"\n### {study.scenario.title}{limit}\n"
        rate_per_s = COMPARED_AT if COMPARED_AT in study.rates_per_s else study.rates_per_s[0]
        yield from table(*tables.systems(page.results, study, UNTUNED, rate_per_s))


PICTURES = {
    "goodput-rtx6000-ada": "Goodput S3 over the offered rate, RTX 6000 Ada",
    "goodput-a100-80": "Goodput S3 over the offered rate, A100",
    "ttft": "Distribution of TTFT at 2 requests/s",
    "tpot": "Distribution of TPOT at 2 requests/s",
    "utilisation": "How busy the engines of each stage are at 2 requests/s",
}


def _study(page: Page, study: Study) -> Iterator[str]:
    yield f"\n## {study.scenario.title}\n"
    if study.experiment.grid:
        yield from _grid(page, study)
        return
    yield "Untuned.\n"
    yield from table(*tables.variants(page.results, study, UNTUNED))
    for rate_per_s in study.rates_per_s:
        yield f"\nAt {rate_per_s:g}/s: {_effects(page, study, rate_per_s)}"


def _grid(page: Page, study: Study) -> Iterator[str]:
    yield (
        "Untuned; goodput S3, requests/s; of all configurations, and of those with one choice.\n"
    )
    yield from table(*tables.grid(page.results, study, UNTUNED))
    yield ""
    for rate_per_s in study.rates_per_s:
        best = tables.best_of_grid(page.results, study, UNTUNED, rate_per_s)
        if best is not None:
            name, most, near = best
            yield (
                f"At {rate_per_s:g}/s the best is `{name}` with {number(most)}; to 99 % of that "
                f"come {near} in all.  "
            )


def all_tables(page: Page) -> str:
    """docs/reproduction-tables.md."""
    return "\n".join(_all_tables(page)) + "\n"


def _all_tables(page: Page) -> Iterator[str]:
    yield "# The published experiments, simulated: every rate\n"
    yield (
        "Written by `easerve reproduce`, explained in [reproduction.md](reproduction.md). Goodput "
        "by tier, requests/s; medians over seeds."
    )
    for study in _ordered(page).studies:
        if study.experiment.grid:
            continue
        for knobs in KNOB_SETS:
            yield f"\n## {study.scenario.title}, {SHOWN_SET[knobs]}\n"
            if study.is_comparison:
                yield from table(*tables.all_rates(page.results, study, knobs))
                if study.topologies and knobs == UNTUNED:
                    yield "\nEvery topology, one seed:\n"
                    yield from table(*topologies.goodputs(page.results, study))
            else:
                yield from table(*tables.variants(page.results, study, knobs))
