"""A verdict as JSON, as tables and as charts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from easerve.bench.report import Cell, Chart, Section, Series, Table
from easerve.goodput import Slo
from easerve.search.advice import AHEAD, SPLIT, Advice, Capacity, Serving
from easerve.search.reason import reason, time_shown
from easerve.search.trying import BEYOND, REQUIRED, Load


@dataclass(frozen=True, slots=True)
class About:
    """``promise``: the name of the tier, or the limits as they were given."""

    title: str
    num_gpus: int
    promise: str
    slo: Slo
    on_cpu: bool
    load: Load


def as_json(about: About, found: Advice) -> dict[str, Any]:
    return {
        "kind": "advice",
        "title": about.title,
        "num_gpus": about.num_gpus,
        "slo": {"name": about.promise, "ttft_s": about.slo.ttft_s, "tpot_s": about.slo.tpot_s}
        | {"latency_s": about.slo.latency_s, "required": REQUIRED},
        "verdict": found.verdict,
        "winner": found.winner.name,
        "break_even_per_s": found.break_even_per_s,
        "reason": reason(found, about.slo),
        "systems": {each.name: _system(about, each) for each in found.servings},
        "impossible": {name: list(why) for name, why in found.impossible.items()},
    }


def _system(about: About, serving: Serving) -> dict[str, Any]:
    capacity, candidate = serving.capacity, serving.chosen.candidate
    return {
        "system": candidate.scenario.system,
        "topology": candidate.name,
        "capacity_per_s": capacity and capacity.rate_per_s,
        "capacity_is_at_least": capacity is not None and capacity.at_least,
        "goodput_per_s": capacity and capacity.goodput_per_s,
        "best_goodput_per_s": serving.best_per_s,
        "best_at_per_s": serving.best and serving.best.rate_per_s,
        "gpu_s_per_request": _cost_s(about, serving),
        "bound_per_s": candidate.bound_per_s,
        "points": [
            {
                "rate_per_s": point.rate_per_s,
                "goodput_per_s": point.goodput_per_s,
                "attainment": point.attainment,
            }
            for point in serving.points
        ],
        "num_topologies": serving.num_topologies,
        "pruned": dict(serving.chosen.pruned),
        "refused": list(serving.refused),
    }


def _cost_s(about: About, serving: Serving) -> float | None:
    """Seconds of GPUs for a request that meets the promise, idle ones included, at best."""
    return about.num_gpus / serving.best_per_s if serving.best_per_s else None


def sections(about: About, found: Advice) -> list[Section]:
    return [
        Section("Systems", _best_note(about), [_best(about, found)]),
        Section("Rates", "", [_rates(about, found)]),
        Section("Verdict", "\n\n".join(verdict(about, found))),
    ]


def _best(about: About, found: Advice) -> Table:
    """Each at its best."""
    columns = ("", "topology", "of", "keeps, /s", "best goodput, /s", "at, /s", "GPU-s a request")
    rows: list[tuple[Cell, ...]] = [
        (
            each.name,
            each.chosen.candidate.name,
            each.num_topologies,
            _kept(each.capacity),
            None if each.best is None else each.best_per_s,
            None if each.best is None else each.best.rate_per_s,
            _cost_s(about, each),
        )
        for each in found.servings
    ]
    devices = "engines on a CPU" if about.on_cpu else "GPUs"
    return Table(f"{about.title}: {about.num_gpus} {devices}, {about.promise}", columns, rows)


def _kept(capacity: Capacity | None) -> str | float:
    if capacity is None:
        return "none"
    return f"≥ {capacity.rate_per_s:.4g}" if capacity.at_least else capacity.rate_per_s


def _best_note(about: About) -> str:
    return (
        f"Promise: {limits(about.slo)}. Keeps: the highest offered rate at which {REQUIRED:.0%} of "
        "all requests have it, at the best of so many topologies. Best goodput: of the rates that "
        "are kept; GPU-s: of all GPUs, for a request that has what is promised, there."
    )


def limits(slo: Slo) -> str:
    """In a few words."""
    named = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("latency", slo.latency_s))
    return ", ".join(f"{name} {time_shown(limit)}" for name, limit in named if limit is not None)


def _rates(about: About, found: Advice) -> Table:
    columns = ["offered, /s"]
    for each in found.servings:
        columns += [f"{each.name}, /s", "kept, %"]
    rows: list[list[Cell]] = []
    for rate in found.rates_per_s:
        row: list[Cell] = [rate]
        for each in found.servings:
            point = each.at(rate)
            row += [point.goodput_per_s, 100 * point.attainment]
        rows.append(row)
    return Table("Goodput and share of requests that have what is promised", columns, rows)


def verdict(about: About, found: Advice) -> Iterator[str]:
    """In words."""
    name = f"{found.winner.name} ({found.winner.chosen.candidate.name})"
    because = f"Because {reason(found, about.slo)}."
    if found.verdict == SPLIT:
        yield f"Verdict: split. Use {name}. {because}"
        yield _from(found)
    elif found.winner.best is None:
        yield (
            "Verdict: do not split, and nothing keeps the promise at any rate that was tried: "
            f"more GPUs, or a looser promise. {because}"
        )
    else:
        yield f"Verdict: do not split. Use {name}. {because}"
        top = found.rates_per_s[-1]
        if found.split is not None and found.whole is not None:
            yield (
                f"Break-even: none up to {top:g}/s; the best split, {found.split.name}, is nowhere "
                f"worth more by {AHEAD - 1:.0%}."
            )
    for family, why in found.impossible.items():
        yield f"{family} cannot be: {list(why)[-1]}."
    yield from _caveats(about, found)


def _from(found: Advice) -> str:
    even = found.break_even_per_s
    if even is None:
        return "Break-even: none, as whole engines cannot be and it keeps no rate that was tried."
    if found.whole is None or even <= found.rates_per_s[0]:
        return f"Break-even: ahead from the lowest rate on that was tried, {even:.3g}/s."
    return (
        f"Break-even: {even:.3g}/s. Below, aggregated engines have as much goodput, to "
        f"{AHEAD - 1:.0%}, and are simpler: do not split there."
    )


def _caveats(about: About, found: Advice) -> Iterator[str]:
    kept = found.winner.capacity
    if kept is None:
        lowest = found.winner.points[0].rate_per_s
        yield (
            f"{found.winner.name} keeps the promise at no rate that was tried, of which "
            f"{lowest:.3g}/s is the lowest."
        )
    elif (unseen := about.load.unseen(kept.rate_per_s)) > 1.5 * BEYOND:
        yield (
            f"Runs have {about.load.max_requests} requests at most: a rate that is {unseen:.0%} "
            "beyond what a system can do may look as if it were kept. --max-requests makes them "
            "longer."
        )
    if about.on_cpu:
        yield (
            "All engines share the cores. What servers and clients do on them is left out for all "
            "systems, so that rates are higher than real ones."
        )
    yield (
        "All of it is simulated (docs/simulation.md). Policies are the scenario's own; easerve "
        "search may find better ones for EAServe."
    )


def charts(about: About, found: Advice) -> Section:
    goodput, kept = [
        [
            Series(
                each.name,
                [point.rate_per_s for point in each.points],
                [getattr(point, key) for point in each.points],
                colour=number,
            )
            for number, each in enumerate(found.servings)
        ]
        for key in ("goodput_per_s", "attainment")
    ]
    return Section(
        "Charts",
        "",
        [
            Chart("Goodput", "offered requests/s", "goodput, requests/s", goodput),
            Chart("Attainment", "offered requests/s", "share", kept, limit=REQUIRED),
        ],
    )
