"""A divided device as tables and charts, for the terminal and for a page."""

from collections.abc import Iterator, Sequence
from typing import Any

from easerve.bench.report import Cell, Chart, Section, Series, Table
from easerve.cli.gpu_steps import Record, runs_of
from easerve.engines.partition.sweep import Runs

COLUMNS = ("p50 ms", "p95 ms", "in target", "forwards", "late", "prefill", "of alone")
LEGEND = (
    "p50, p95: latency of an encode batch from when it can begin, waiting for the encoder "
    "included. In target: share of batches with this latency, forwards: with their forward, within "
    "{:g} ms; late: share of forwards that began beside a prefill step that held units of theirs. "
    "Prefill: {} a second, and of prefill alone."
)
NUM_POINTS = 60
"""Of a distribution, drawn."""
ATTAINED = 0.95


def sections(result: Record) -> list[Section]:
    """As gpu_bench makes it."""
    card = [] if result["simulated"] else [_card(result)]
    return card + [each for device in result["devices"] for each in _device(device)]


def _card(result: Record) -> Section:
    rows: list[tuple[Cell, Cell]] = [*_facts(result["card"])]
    for name in ("threads", "processes"):
        verdict = result[name]
        if verdict is not None:
            rows.append((f"parts of two {name}", ("" if verdict["ok"] else "NOT ") + "disjoint"))
            rows.append(("", verdict["why"]))
    rows += [(f"step {name} failed", error) for name, error in result["errors"].items()]
    return Section("The GPU", "", [Table("The GPU", ("what", "found"), rows)])


def _facts(card: Record) -> Iterator[tuple[str, Cell]]:
    """Of what was found before the step ended."""
    if "source" in card:
        yield "card, torch", f"{card['source']}, {card['torch']}"
    if "driver" in card:
        yield "driver", card["driver"] or "unknown"
    if "context_ms" in card:
        yield "its CUDA", f"{card['cuda'] // 1000}.{card['cuda'] % 1000 // 10}"
        yield "SMs, granule, idle", f"{card['num_sms']}, {card['granule']}, {card['idle_sms']}"
        yield "a context, ms", _median(card["context_ms"])
        yield "a stream, ms", _median(card["stream_ms"])
    if "confine_us" in card:
        yield "set_stream, us", card["set_stream_us"]
        yield "switch, us", card["confine_us"]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _device(device: Record) -> Iterator[Section]:
    runs = runs_of(device)
    if runs:
        yield _surface(device, runs)
    if device["contention"]:
        yield contention(device)


def _surface(device: Record, runs: Sequence[Runs]) -> Section:
    units = sorted({each.units for each in runs} - {0})
    p95_ms = {(each.batch, each.units, each.beside): 1e3 * each.p95_s for each in runs}
    batches = sorted({each.batch for each in runs})
    sides = [(batch, beside) for batch in batches for beside in (False, True)]
    rows = [
        (
            str(each or "all"),
            *(_round(p95_ms.get((batch, each, beside)), 1) for batch, beside in sides),
        )
        for each in (*units, 0)
    ]
    columns = ("SMs", *(f"{batch} +P" if beside else str(batch) for batch, beside in sides))
    target_ms = 1e3 * device["target_s"]
    title = f"p95 of a forward in ms, by batch, alone or beside prefill (+P): {device['source']}"
    table = Table(title, columns, rows)
    series = [
        Series(
            f"batch {batch}",
            [float(each) for each in units],
            [p95_ms.get((batch, each, True), p95_ms.get((batch, each, False))) for each in units],
        )
        for batch in batches
    ]
    chart = Chart(
        f"A forward beside prefill: {device['source']}",
        "SMs of the encoder",
        "p95, ms",
        series,
        limit=target_ms,
    )
    least = ", ".join(
        f"batch {batch}: {row['units']}{'' if row['met'] else ' (misses it)'}"
        for batch, row in device["min_units"].items()
    )
    text = f"Fewest SMs within {target_ms:g} ms: {least}."
    return Section(f"Latency surface: {device['source']}", text, [table, chart])


def contention(device: Record) -> Section:
    """``source``: what it was measured on; ``work``: what prefill is counted in."""
    found = device["contention"]
    steps = list(dict.fromkeys(row["step"] for row in found))
    named = ("case", "step") if len(steps) > 1 else ("case",)
    rows = [
        (
            *(row[name] for name in named),
            *(_round(row[name], 1) for name in ("p50_ms", "p95_ms")),
            *(_round(row[name], 2) for name in ("in_target", "forwards_in_target", "late")),
            _round(row["prefill_per_s"], 1),
            _round(row["prefill_share"], 3),
        )
        for row in found
    ]
    columns = (*("rule", "steps")[: len(named)], *COLUMNS)
    table = Table(f"Encode beside prefill: {device['source']}", columns, rows)
    legend = LEGEND.format(1e3 * device["target_s"], device.get("work", "chunks"))
    return Section(
        f"Encode beside prefill: {device['source']}",
        f"{legend}\n\n{' '.join(_best(found, step) for step in steps)}",
        [table, *(_distribution(found, step) for step in steps), _shares(found, steps)],
    )


def _best(found: Sequence[Record], step: str) -> str:
    """Who leaves prefill most, of those that hold the target, by forwards and by latency."""
    said = []
    for name, what in (("forwards_in_target", "forwards"), ("in_target", "batches")):
        fit = [row for row in found if row["step"] == step and (row[name] or 0) >= ATTAINED]
        best = max(fit, key=lambda row: float(row["prefill_share"]), default=None)
        held = "no rule" if best is None else f"{best['case']} ({best['prefill_share']:.0%})"
        said.append(f"{ATTAINED:.0%} of {what} within the target: {held}")
    return f"Most prefill in {step} steps, with {'; with '.join(said)}."


def _distribution(found: Sequence[Record], step: str) -> Chart:
    series = []
    for row in found:
        values = sorted(row["latencies_ms"])
        if row["step"] == step and values:
            ranks = [round(at * (len(values) - 1) / NUM_POINTS) for at in range(NUM_POINTS + 1)]
            y = [(rank + 1) / len(values) for rank in ranks]
            series.append(Series(row["case"], [values[rank] for rank in ranks], y))
    return Chart(f"Latency of encode, {step} steps", "ms", "share of batches", series)


def _shares(found: Sequence[Record], steps: Sequence[str]) -> Chart:
    series = [
        Series(
            step,
            [row["case"] for row in found if row["step"] == step],
            [row["prefill_share"] for row in found if row["step"] == step],
        )
        for step in steps
    ]
    return Chart("Prefill that is left", "rule", "share of alone", series, kind="bar")


def _round(value: Any, digits: int) -> float | None:
    return None if value is None else round(float(value), digits)
