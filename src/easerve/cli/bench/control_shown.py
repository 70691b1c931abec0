"""``bench control`` as tables and charts."""

from collections.abc import Mapping
from typing import Any

from easerve.bench.report import Cell, Chart, Section, Series, Table
from easerve.cli.bench.control_systems import DIRECT

LATE_S = 0.005
RATE_COLUMNS = ("system", "TTFT p50", "p99", "added p50", "p99", "whole p50", "p99", "CPU ms")
FULL_COLUMNS = ("system", "req/s", "CPU ms", "req/s a core", "TTFT p50", "p99", "lost")
Result = Mapping[str, Any]


def sections(result: Result) -> list[Section]:
    return [
        _summary(result),
        *(_section(name, load) for name, load in result["modalities"].items()),
    ]


def _summary(result: Result) -> Section:
    latency, cores = result["latency_s"], result["cores"]
    engines = ", ".join(f"{name.removesuffix('_s')} {1e3 * s:g} ms" for name, s in latency.items())
    text = [
        f"Engines of fixed latency ({engines}), {result['num_output_tokens']} tokens an answer, "
        f"streamed. Routers on core {_list(cores['router'])}, all else on {_list(cores['rest'])}.",
        f"Added to the time to the first token near 200 requests/s: "
        f"{_ms(result['added_p50_s'])} ms at the median, {_ms(result['added_p99_s'])} ms at the "
        f"99th percentile. At saturation {result['max_req_per_s']:,.0f} requests/s, with "
        f"{1e3 * result['cpu_s_per_request']:.2f} ms of CPU time a request: "
        f"{result['req_per_s_of_a_core']:,.0f} requests/s would fill a core.",
    ]
    if result["is_client_bound"]:
        text.append(
            "Client and engines, which share the other cores, are what saturated: asked directly "
            "they are hardly faster."
        )
    if result["ratio_vs_router"] is not None:
        text.append(
            f"By CPU time that is {result['ratio_vs_router']:.2f} times what a core of vllm-router "
            "passes on in its prefill/decode mode. It is written in Rust and makes two calls for a "
            "request; ours makes three for text and four for a picture, has the picture decoded, "
            "and decides."
        )
    else:
        text.append("vllm-router was not found; pip install vllm-router, or name it by --router.")
    ratio = result["ratio_vs_router"]
    rows = [
        ("added to TTFT near 200/s, p50", f"{_ms(result['added_p50_s'])} ms"),
        ("the same, p99", f"{_ms(result['added_p99_s'])} ms"),
        ("requests/s at saturation", f"{result['max_req_per_s']:,.0f}"),
        ("CPU time a request", f"{_ms(result['cpu_s_per_request'])} ms"),
        ("requests/s that fill a core", f"{result['req_per_s_of_a_core']:,.0f}"),
        ("over vllm-router's, PD", "–" if ratio is None else f"{ratio:.2f} times"),
    ]
    table = Table("Figures that stand for all", ("figure", "value"), rows)
    return Section("The control plane alone", "\n\n".join(text), [table])


def _section(modality: str, load: Result) -> Section:
    rates = load["rates"]
    rows = [
        (f"{rate}/s {name}", *_rate_cells(row))
        for rate, systems in rates.items()
        for name, row in systems.items()
    ]
    full = [(name, *_full_cells(row)) for name, row in load["saturated"].items()]
    late = [
        f"{rate}/s {name}"
        for rate, systems in rates.items()
        for name, row in systems.items()
        if (row["lateness_p99_s"] or 0) > LATE_S
    ]
    text = (
        "Milliseconds. Added: to the time to the first token, over the engines asked directly; "
        "whole: of the whole answer."
    )
    if late:
        text += f"\n\nThe client itself was late: {', '.join(late)}. Their times say too much."
    names = [name for name in load["saturated"] if name != DIRECT]
    chart = Chart(
        f"Added to TTFT, {modality}",
        "offered requests/s",
        "ms at the median",
        [
            Series(
                name,
                [float(rate) for rate in rates],
                [_ms(systems[name]["added_p50_s"]) for systems in rates.values()],
            )
            for name in names
        ],
    )
    return Section(
        f"Requests with {'a picture' if modality == 'image' else 'text only'}",
        text,
        [
            Table("At a rate (Poisson arrivals)", RATE_COLUMNS, rows),
            Table("At saturation (closed loop)", FULL_COLUMNS, full),
            chart,
        ],
    )


def _rate_cells(row: Result) -> tuple[Cell, ...]:
    """In the order of RATE_COLUMNS."""
    names = ("ttft_p50_s", "ttft_p99_s", "added_p50_s", "added_p99_s")
    whole = ("latency_p50_s", "latency_p99_s", "cpu_s")
    return tuple(_ms(row[name]) for name in (*names, *whole))


def _full_cells(row: Result) -> tuple[Cell, ...]:
    """In the order of FULL_COLUMNS."""
    each = 1 / row["cpu_s"] if row["cpu_s"] else None
    return (
        round(row["req_per_s"]),
        _ms(row["cpu_s"]),
        None if each is None else round(each),
        _ms(row["ttft_p50_s"]),
        _ms(row["ttft_p99_s"]),
        row["not_completed"],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)


def _list(cores: list[int]) -> str:
    return ", ".join(map(str, cores))
