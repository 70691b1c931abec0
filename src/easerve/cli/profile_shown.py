"""Results of ``easerve profile`` as tables and charts."""

from collections.abc import Iterator, Sequence
from typing import Any

from easerve.bench.report import Cell, Chart, Section, Series, Table, shown

Result = dict[str, Any]


def of_profile(result: Result) -> list[Section]:
    """Results are of the parts that were asked; those of older versions have all but the last."""
    capacity = [_capacity(result)] if "capacity_rows" in result else []
    if "surface" not in result:
        return capacity
    stages = [] if result["stages"] is None else [_stages(result)]
    return [_surface(result), _fewest(result), *stages, *capacity, _roofline(result)]


def _surface(result: Result) -> Section:
    units = sorted({row["units"] for row in result["surface"]})
    cells = {(row["batch"], row["contended"], row["units"]): row for row in result["surface"]}
    lines = sorted({(batch, contended) for batch, contended, _ in cells})
    rows = [
        (_name(batch, contended), *(_ms(cells.get((batch, contended, each))) for each in units))
        for batch, contended in lines
    ]
    unit = result["unit"]
    columns = ("batch", *(f"{each} {unit}{'s' if each > 1 else ''}" for each in units))
    limit = 1e3 * result["target_s"]
    charts = [
        Chart(title, f"{unit}s", "ms", list(_lines(result["surface"], contended)), limit=limit)
        for contended, title in ((False, "Alone, p95"), (True, "Beside a busy prefill, p95"))
        if any(row["contended"] is contended for row in result["surface"])
    ]
    late = sum(row["num_late"] for row in result["surface"])
    text = (
        f"{result['device']}, {result['model']} in {result['dtype']}; divided by "
        f"{result['partition']}. Forwards of {result['item_tokens']} tokens an item, "
        f"{result['num_runs']} runs of each, none left out; {late} of them began while prefill "
        "still held some of their units. Meanwhile other processes used "
        f"{result['others_cores']:.2f} cores."
    )
    table = Table("Forward of the encoder, p95 in ms", columns, rows)
    return Section("Latency by compute units and batch", text, [table, *charts])


def _fewest(result: Result) -> Section:
    over = set(result["over_target"])
    rows = [
        (batch, units, "no" if batch in over else "yes")
        for batch, units in result["min_units"].items()
    ]
    capacity = result["capacity_per_s"]
    text = (
        f"For a forward within {1e3 * result['target_s']:g} ms beside prefill. With the device to "
        f"itself and under load, encode does {shown(capacity['encode'])} items/s, prefill "
        f"{shown(capacity['prefill'])} tokens/s."
    )
    table = Table("Fewest units that meet the target", ("batch", f"{result['unit']}s", "met"), rows)
    return Section("What a batch gets", text, [table])


def _stages(result: Result) -> Section:
    """One engine of each stage, call by call."""
    stages, columns = result["stages"], ("", "ms, median", "core, ms", "API server, CPU ms")
    rows: list[Sequence[Cell]] = []
    for kind, name in (("encode", "batch"), ("prefill", "tokens"), ("pulls", "tokens")):
        rows += [
            (f"{kind.removesuffix('s')} {row[name]}", *_cells(row, "wall_p50_s"))
            for row in stages[kind]
        ]
    steps = [
        (f"{row['sequences']} of {row['context']} tokens", *_cells(row, "step_p50_s"))
        for row in stages["decode"]
    ]
    host = [(name, 1e3 * value) for name, value in stages["host"].items() if name.endswith("_s")]
    text = (
        "One engine of each stage, none beside another. The core is the process that runs the "
        "steps: for how long a call keeps it busy. A pull is of a KV cache, with one step. Of the "
        f"rest, CPU time. Decode does {shown(result['capacity_per_s']['decode'])} tokens/s. With "
        f"nothing to do the engines keep {stages['host']['idle_cores']:.2f} cores busy; beside an "
        f"encoder that never rests, prefill needs {100 * stages['crowding']:.0f} % more "
        "CPU time."
    )
    return Section(
        "Stages",
        text,
        [
            Table("Calls", columns, rows),
            Table("Steps of decode", columns, steps),
            Table("Around the engines", ("", "ms"), host),
        ],
    )


def _capacity(result: Result) -> Section:
    """One engine of each stage, in requests."""
    rows: list[Sequence[Cell]] = [
        (
            row["stage"],
            row["tp"],
            row["batch"],
            "any" if row["per_s"] is None else row["per_s"],
            1e3 * row["seconds"],
        )
        for row in result["capacity_rows"]
    ]
    text = (
        f"{result['device']}, {result['model']} in {result['dtype']}. Requests of "
        f"{result['capacity_workload']}; one engine that has nothing else to do and work without "
        "end. A batch is of items in an encoder's call, of prompts that prefill has at once, of "
        "sequences that decode at once, pulls included; ms are those of the call, of the prefill, "
        "of a token."
    )
    if result["others_cores"]:  # else nothing was measured this time
        text += f" Meanwhile other processes used {result['others_cores']:.2f} cores."
    if left_out := result["capacity_left_out"]:
        text += f" Left out: {'; '.join(left_out)}."
    columns = ("stage", "devices", "batch", "requests/s", "ms")
    of_stage = {
        stage: [row for row in result["capacity_rows"] if row["stage"] == stage and row["per_s"]]
        for stage in dict.fromkeys(row["stage"] for row in result["capacity_rows"])
    }
    charts = [
        Chart(f"{stage}, requests/s", "batch", "requests/s", list(_by_devices(found)))
        for stage, found in of_stage.items()
        if found
    ]
    return Section("Stages alone", text, [Table("Capacity of an engine", columns, rows), *charts])


def _by_devices(rows: Sequence[Result]) -> Iterator[Series]:
    for tp in dict.fromkeys(row["tp"] for row in rows):
        found = [row for row in rows if row["tp"] == tp]
        x = [float(row["batch"]) for row in found]
        yield Series(f"{tp} device{'s' if tp > 1 else ''}", x, [row["per_s"] for row in found])


def _cells(row: Result, wall: str) -> tuple[float, float, float]:
    return 1e3 * row[wall], 1e3 * row["engine_s"], 1e3 * row["api_s"]


def _roofline(result: Result) -> Section:
    peak, rows = result["peak"], result["roofline"]
    text = (
        f"Peak {peak['flops_per_s'] / 1e9:,.4g} GFLOP/s and {peak['bytes_per_s'] / 1e9:,.4g} GB/s, "
        f"measured on this device with all its units: {peak['how']}. "
    )
    if not rows:
        return Section("Why", text + "The FLOPs of this model's encoder are not counted.")
    ridge = peak["flops_per_s"] / peak["bytes_per_s"]
    text += (
        f"Below {ridge:.3g} FLOPs a byte it is the memory that bounds. FLOPs and bytes are counted "
        "from the model's configuration; times are medians of forwards alone on all units, with "
        "what the engine does besides. What is lacking up to the roof is work that does not divide "
        "by all units, and time that passes without any."
    )
    cells: list[Sequence[Cell]] = [
        (
            str(row["batch"]),
            row["flops"] / 1e9,
            row["intensity"],
            1e3 * row["forward_s"],
            row["flops_per_s"] / 1e9,
            f"{100 * row['share_of_peak']:.1f} %",
            f"{100 * row['share_of_roof']:.1f} %",
            row["bound"],
        )
        for row in rows
    ]
    columns = ("batch", "GFLOP", "FLOP/byte", "ms", "GFLOP/s", "of peak", "of roof", "roof is")
    table = Table("Forward of the encoder under the roofline", columns, cells)
    shares = [100 * row["share_of_peak"] for row in rows]
    chart = Chart(
        "Share of the device's peak",
        "batch",
        "%",
        [Series("share", [float(row["batch"]) for row in rows], shares)],
    )
    return Section("Why one request does not fill a device", text, [table, chart])


def _lines(rows: Sequence[Result], contended: bool) -> Iterator[Series]:
    for batch in dict.fromkeys(row["batch"] for row in rows):
        of_batch = [row for row in rows if (row["batch"], row["contended"]) == (batch, contended)]
        of_batch.sort(key=lambda row: row["units"])
        x = [float(row["units"]) for row in of_batch]
        yield Series(f"batch {batch}", x, [1e3 * row["p95_s"] for row in of_batch])


def _name(batch: int, contended: bool) -> str:
    return f"{batch} beside prefill" if contended else f"{batch} alone"


def _ms(row: Result | None) -> float | None:
    return None if row is None else 1e3 * float(row["p95_s"])
