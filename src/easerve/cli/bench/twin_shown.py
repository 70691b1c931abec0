"""Results of ``easerve bench twin`` as tables and charts."""

from collections.abc import Sequence
from typing import Any

from easerve.bench.report import Cell, Chart, Section, Series, Table
from easerve.types import Stage

METRICS = ("ttft_s.mean", "ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "tpot_s.p50", "tpot_s.p99")
Result = dict[str, Any]


def of_twin(result: Result) -> list[Section]:
    return [_times(result), _busy(result)]


def _times(result: Result) -> Section:
    tables = [_table(row) for row in result["rates"]]
    charts = [_chart(result, "ttft_s.p50", "TTFT, median"), _chart(result, "tpot_s.p50", "TPOT")]
    slower = [row["slower"] for row in result["rates"]]
    others = [row["others_cores"] for row in result["rates"]]
    text = (
        f"{result['num_requests']} requests at each rate, with a picture each, on "
        f"{result['num_cores']} cores; costs: {result['profile']}. The simulator got arrivals, "
        "prompts and lengths of answers as they were served, and nothing else of what came of "
        "them. Just before each run the engines took "
        f"{min(slower):.2f} to {max(slower):.2f} times as long as in the profile; meanwhile other "
        f"processes used {min(others):.2f} to {max(others):.2f} cores."
    )
    return Section("Served beside simulated", text, [*tables, *charts])


def _table(row: Result) -> Table:
    rows: list[Sequence[Cell]] = []
    for metric in METRICS:
        name, _, part = metric.partition(".")
        label = f"{name.removesuffix('_s').upper()} {part.upper() if part != 'mean' else part}, ms"
        cells = (row[side][metric] for side in ("measured", "simulated"))
        rows.append((label, *(None if c is None else 1e3 * c for c in cells), _error(row, metric)))
    rows.append(("requests/s", *_sides(row, "throughput_per_s"), _error(row, "throughput_per_s")))
    title = f"{row['rate_per_s']:g} requests/s"
    return Table(title, ("", "measured", "simulated", "error"), rows)


def _busy(result: Result) -> Section:
    rows: list[Sequence[Cell]] = []
    for row in result["rates"]:
        cells = [each for stage in Stage for each in _sides(row, f"busy.{stage}")]
        rows.append((f"{row['rate_per_s']:g}", *cells))
    columns = [f"{stage} {side}" for stage in Stage for side in ("measured", "simulated")]
    text = (
        "Share of the run that an engine worked: measured as CPU time of the thread that runs its "
        "steps, simulated as the time that its steps took, which is more where they shared a core."
    )
    table = Table("Busy share", ("requests/s", *columns), rows)
    return Section("Engines", text, [table])


def _sides(row: Result, name: str) -> list[Cell]:
    return [row["measured"][name], row["simulated"][name]]


def _error(row: Result, name: str) -> str:
    error = row["error"][name]
    return "–" if error is None else f"{100 * error:+.0f} %"


def _chart(result: Result, metric: str, title: str) -> Chart:
    x = [float(row["rate_per_s"]) for row in result["rates"]]
    series = [
        Series(side, x, [1e3 * row[side][metric] for row in result["rates"]])
        for side in ("measured", "simulated")
    ]
    return Chart(title, "requests/s", "ms", series)
