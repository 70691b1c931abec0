"""Bench results as tables and pictures, for the terminal and for a page."""

from collections.abc import Mapping
from typing import Any

from easerve.bench.report import Cell, Chart, Section, Series, Table
from easerve.cli.bench.encode import NONE, Result

FLOW_COLUMNS = ("req/s", "batch", "busy", "TTFT", "TPOT", "lost")
LOAD_COLUMNS = ("req/s", "batch", "busy", "wait", "TTFT", "TPOT", "lost")
LEGEND = (
    "Times are mean / P99 in ms; batch: pictures a call; busy: share of time that encoders work; "
    "wait: in the encode queue; lost: not completed."
)


def of_encode(result: Result) -> list[Section]:
    """Every part that was run."""
    makers = {
        "stage": _stage,
        "call": _call,
        "server": _server,
        "low": _low,
        "rates": _rates,
        "windows": _windows,
    }
    return [make(result) for part, make in makers.items() if part in result]


def _stage(result: Result) -> Section:
    rows = [
        (rule, _round(each["items_per_s"]), _ms(each["cpu_s"]), _round(each["batch_mean"], 1))
        for rule, each in result["stage"].items()
    ]
    columns = ("rule", "pictures/s", "CPU ms a picture", "batch")
    return Section(
        "The encode stage alone",
        f"Batched, the stage encodes {result['encode_stage_ratio']:.2f} times as many pictures.",
        [Table("Encode stage at saturation, all that follows a stub", columns, rows)],
    )


def _call(result: Result) -> Section:
    call = result["call"]
    size = call["num_items"]
    rows = [
        ("directly", _ms(call["direct_s"])),
        ("by the stage, handed over", _ms(call["stage_s"])),
    ]
    return Section(
        "One call",
        f"By the stage a call takes {call['ratio']:.2f} times as long as made directly.",
        [Table(f"One call of {size} pictures", ("made", "ms"), rows)],
    )


def _server(result: Result) -> Section:
    text = f"{LEGEND} The whole server answers {result['server_ratio']:.2f} times as many requests."
    if "server_ratio_expected" in result:
        text += (
            f" What the stage saves of the cores' time explains "
            f"{result['server_ratio_expected']:.2f}."
        )
    rows = [(rule, _ms(row["cpu_s"]), *_load(row)) for rule, row in result["server"].items()]
    columns = ("rule", "CPU ms", *LOAD_COLUMNS)
    table = Table("The whole server at saturation (closed loop)", columns, rows)
    return Section("The whole server", text, [table])


def _low(result: Result) -> Section:
    rows = [(rule, *_load(row)) for rule, row in result["low"].items()]
    table = Table("Low load (Poisson arrivals)", ("rule", *LOAD_COLUMNS), rows)
    text = f"Mean TTFT is {result['low_load_ttft_ratio']:.3f} times that of {NONE}."
    return Section("Low load", text, [table])


def _rates(result: Result) -> Section:
    rates = result["rates"]
    rows = [
        (f"{rate}/s, {rule}", *_load(row))
        for rate in next(iter(rates.values()))
        for rule, row in ((rule, rates[rule][rate]) for rule in rates)
    ]
    table = Table("Offered load and rule", ("offered, rule", *LOAD_COLUMNS), rows)
    charts = [
        Chart(title, "offered requests/s", unit, _by_rule(rates, *path), kind="line")
        for title, unit, path in (
            ("Mean TTFT", "s", ("ttft_s", "mean")),
            ("P99 TTFT", "s", ("ttft_s", "p99")),
            ("Encoder busy share", "share", ("busy_share",)),
            ("Pictures per call", "pictures", ("batch_mean",)),
        )
    ]
    return Section("Offered load and rule", LEGEND, [table, *charts])


def _windows(result: Result) -> Section:
    windows = result["windows"]
    rows = [(f"{1e3 * float(window):g} ms", *_load(row)) for window, row in windows.items()]
    x = [1e3 * float(window) for window in windows]
    charts = [
        Chart(title, "window, ms", unit, [Series("fixed", x, _values(windows, *path))])
        for title, unit, path in (
            ("Mean TTFT against the window", "s", ("ttft_s", "mean")),
            ("Encoder busy share against the window", "share", ("busy_share",)),
        )
    ]
    return Section(
        "A fixed waiting window",
        "A longer window frees the encoder and costs every request that time: no window is right "
        "at every load.",
        [Table("A fixed waiting window", ("window", *LOAD_COLUMNS), rows), *charts],
    )


def of_flow(result: Result) -> list[Section]:
    """Engines that run and modelled ones in one table."""
    rows = [
        (f"{name} ({where})", *_flow(row))
        for where, part in result.items()
        for name, row in part["systems"].items()
    ]
    promises = "; ".join(
        f"{where}: alone {1e3 * part['tpot_alone_s']:.1f} ms, promise "
        f"{1e3 * part['tpot_promise_s']:.1f} ms"
        for where, part in result.items()
    )
    table = Table("A burst, and credits", ("system", *FLOW_COLUMNS), rows)
    return [Section("Flow", f"TPOT {promises}. {LEGEND}", [table])]


def _flow(row: Result) -> tuple[Cell, ...]:
    """In the order of FLOW_COLUMNS."""
    return (
        _round(row["throughput_per_s"], 1),
        _round(row["batch_mean"], 1),
        _round(row["busy_share"], 2),
        _spread(row["ttft_s"]),
        _spread(row["tpot_s"]),
        row["not_completed"],
    )


def _load(row: Result) -> tuple[Cell, ...]:
    """In the order of LOAD_COLUMNS."""
    first, rest = _flow(row)[:3], _flow(row)[3:]
    return (*first, _spread(row["encode_wait_s"]), *rest)


def _spread(spread: Mapping[str, float | None]) -> str:
    mean, p99 = (spread[name] for name in ("mean", "p99"))
    return "-" if mean is None or p99 is None else f"{1e3 * mean:.1f} / {1e3 * p99:.0f}"


def _by_rule(rates: Mapping[str, Mapping[str, Result]], *path: str) -> list[Series]:
    return [
        Series(rule, [float(rate) for rate in rows], _values(rows, *path))
        for rule, rows in rates.items()
    ]


def _values(rows: Mapping[str, Result], *path: str) -> list[float | None]:
    values: list[Any] = []
    for row in rows.values():
        value: Any = row
        for key in path:
            value = value[key]
        values.append(value)
    return values


def _ms(seconds: float | None) -> float | None:
    return _round(None if seconds is None else 1e3 * seconds, 1)


def _round(value: float | None, digits: int = 0) -> float | None:
    return None if value is None else round(value, digits)
