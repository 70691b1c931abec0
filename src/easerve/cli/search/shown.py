"""A search as tables and charts, from its JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from easerve.bench.report import Axis, Cell, Chart, Section, Series, Table
from easerve.cli.search import confirm
from easerve.cli.search.result import ALLOCATION, GOODPUT, Result, best_so_far

MAX_LISTED = 12
MAX_ROWS = 12
IDLE = "idle"
"""In the reason of an allocation that leaves devices without work."""
PERCENT, SAME = 100, 0.999
NAMED = ("best", "runner_up", "closest")
NONE_KEEPS = (
    "No configuration that was tried keeps the promise: there is no winner. The closest is listed "
    "first."
)


def sections(result: Result) -> list[Section]:
    more = []
    if (told := result.get("confirmation")) is not None:
        more = [confirm.section(told, result["source"], result["required"])]
    return [*space(result), _trials(result), *more, *_charts(result)]


def of_space(result: Result) -> list[Section]:
    return [*space(result)]


def space(result: Result) -> Iterator[Section]:
    some_cannot = any(each["remote_only"] for each in result["allocations"])
    rows: list[list[Cell]] = []
    for each in result["allocations"]:
        stages = each["stages_per_s"] or {}
        slowest = min(stages, key=lambda stage: stages[stage]) if stages else None
        kept = "kept" if each["kept"] else "pruned"
        rows.append(
            [
                each["name"],
                kept,
                each["num_configurations"],
                each["capacity_per_s"],
                slowest,
                *([each["remote_only"] or None] if some_cannot else []),
                each["why"] or None,
            ]
        )
    columns = ["allocation", "", "configurations", "at most, req/s", "bottleneck"]
    columns += ["why no local prefill"] if some_cannot else []
    columns += ["why pruned"]
    parts = [Table("Allocations", columns, rows)]
    if result["impossible"]:
        parts.append(_impossible(result["impossible"]))
    knobs = [[path, _listed(values)] for path, values in result["knobs"].items()]
    parts.append(Table("Knobs", ["knob", "values"], knobs))
    text = (
        f"{result['title']}: {result['num_configurations']} configurations of "
        f"{len(result['allocations'])} allocations, {result['num_candidates']} of which are "
        f"searched. Capacities of stages alone: {result['capacities']}."
    )
    yield Section("What was searched", text, parts)


def _impossible(pruned: Sequence[Mapping[str, str]]) -> Table:
    """Those with the same reason in one row."""
    names: dict[str, list[str]] = {}
    for each in pruned:
        what = each["why"].partition(":")[0]
        why = f"{what}: another has all its engines and more" if IDLE in what else each["why"]
        names.setdefault(why, []).append(each["name"])
    rows: list[list[Cell]] = [[_listed(each), len(each), why] for why, each in names.items()]
    return Table("Allocations that cannot be", ["allocations", "number", "why"], rows)


def _listed(values: Sequence[Any]) -> str:
    shown = [*map(_plain, values)]
    if len(shown) > MAX_LISTED:
        shown = [*shown[:3], "…", *shown[-2:]]
    return ", ".join(shown)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _trials(result: Result) -> Section:
    named = {name: result[name] for name in NAMED if result[name] is not None}
    rows: list[list[Cell]] = [[name.replace("_", "-"), *_row(each)] for name, each in named.items()]
    ranked = sorted(result["trials"], key=lambda each: -(each[GOODPUT] or 0.0))
    rows += [["", *_row(each)] for each in ranked if not _is_listed(each, result)][:MAX_ROWS]
    columns = ["", "trial", "allocation", "knobs", "goodput, req/s", "± 95 %", "attainment, %"]
    columns += ["at, req/s", "state"]
    left = len(ranked) - len(rows)
    more = f", and {left} more" if left else ""
    return Section("Trials", _said(result), [Table(f"Trials, by goodput{more}", columns, rows)])


def _is_listed(trial: Mapping[str, Any], result: Result) -> bool:
    named = (result[name] for name in NAMED)
    return any(each is not None and each["trial"] == trial["trial"] for each in named)


def _row(trial: Mapping[str, Any]) -> list[Cell]:
    attainment = trial["attainment"]
    state = f"{trial['state']}{', cached' if trial['cached'] else ''}"
    return [
        trial["trial"],
        trial[ALLOCATION],
        knobs(trial),
        trial[GOODPUT],
        trial["confidence_per_s"],
        None if attainment is None else PERCENT * attainment,
        trial["rate_per_s"],
        f"{state}: {trial['why']}" if trial["why"] else state,
    ]


def knobs(trial: Mapping[str, Any]) -> str:
    pairs = trial["knobs"].items()
    return ", ".join(f"{path.rpartition('.')[2]} {_plain(value)}" for path, value in pairs)


def _said(result: Result) -> str:
    told = (
        f"{result['num_trials']} trials by {result['method']} (seed {result['seed']}), "
        f"{result['num_pruned']} stopped early, {result['num_failed']} failed, "
        f"{result['num_cached']} answered from the cache; {result['wall_s']:.0f} s. "
        f"Objective ({result['objective']}): {promise(result)}, mean over seeds "
        f"{', '.join(map(str, result['seeds']))}. {result['load']}."
    )
    found = result["best"]
    if found is None:
        return f"{NONE_KEEPS}\n\n{told}"
    won = f"The best is {found[ALLOCATION]} with {knobs(found)}: goodput {with_confidence(found)}."
    rates = result["rates_per_s"]
    if len(rates) > 1 and found["rate_per_s"] > SAME * rates[-1]:
        won += " It does so at the highest rate that was tried: --rate tells how much more it can."
    second = result["runner_up"]
    if second is not None:
        won += f" Next is {second[ALLOCATION]} with {knobs(second)}: {with_confidence(second)}."
    return f"{won}\n\n{told}"


def with_confidence(trial: Mapping[str, Any]) -> str:
    """As in ``2.53 ± 0.04 req/s``."""
    half = trial["confidence_per_s"]
    return f"{trial[GOODPUT]:.3g}{'' if half is None else f' ± {half:.2g}'} req/s"


def promise(result: Result) -> str:
    rates = result["rates_per_s"]
    share = f"{PERCENT * result['required']:g} %"
    if len(rates) == 1:
        return f"goodput {result['tier']} at {rates[0]:g} req/s, of which {share} keep it"
    return (
        f"goodput {result['tier']} at the highest rate of which {share} keep it, between "
        f"{rates[0]:.3g} and {rates[-1]:.3g} req/s"
    )


def _charts(result: Result) -> Iterator[Section]:
    done = [each for each in result["trials"] if each[GOODPUT] is not None]
    if not done:
        return
    yield Section("Best so far", "", [progress(result)])
    axes = [Axis(ALLOCATION, [each[ALLOCATION] for each in done])]
    for path in result["knobs"]:
        name = path.rpartition(".")[2]
        axes.append(Axis(name, [each["knobs"].get(path) for each in done]))
    axes.append(Axis("goodput, req/s", [each[GOODPUT] for each in done]))
    chart = Chart("Every trial, darker where goodput is higher", "", "", axes, "parallel")
    yield Section("Configurations", "", [chart])
    if shares := result.get("importance"):
        bars = Series("importance", list(shares), [PERCENT * each for each in shares.values()])
        text = (
            "How much of what separates the best tenth of the trials from all is due to each knob "
            "(PED-ANOVA), by what was tried."
        )
        chart = Chart("Importance of knobs", "", "share, %", [bars], "bar")
        rows: list[list[Cell]] = [[name, PERCENT * each] for name, each in shares.items()]
        table = Table("Importance", ["knob", "share, %"], rows)
        yield Section("Importance", text, [table, chart])


def progress(result: Result) -> Chart:
    """The best so far, and each trial."""
    trials = result["trials"]
    numbers = [each["trial"] for each in trials]
    steps = Series("best so far", numbers, best_so_far(trials, result["required"]))
    each = Series("trial", numbers, [trial[GOODPUT] for trial in trials], muted=True)
    return Chart("Goodput over trials", "trial", "goodput, req/s", [steps, each], "line")
