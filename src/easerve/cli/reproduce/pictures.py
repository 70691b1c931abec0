"""The page's figures as SVG, the same bytes for the same book and the same matplotlib."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from easerve.cli.reproduce import tables
from easerve.cli.reproduce.book import SPREAD_RATE_PER_S
from easerve.cli.reproduce.plan import UNTUNED, Point, Side, Study
from easerve.cli.reproduce.text import number, who
from easerve.cli.reproduce.verdicts import Results
from easerve.config import ConfigError
from easerve.types import Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {
    "svg.hashsalt": "easerve",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}
WIDTH_INCHES, PANEL_INCHES = 5.0, 2.4
COLOURS = {
    "easerve": "#0b6e4f",
    "vllm": "#1f77b4",
    "vllm-epd": "#8ab6d6",
    "dynamo": "#d1495b",
    "epdserve": "#edae49",
    "hydrainfer": "#7b5ea7",
}
BROAD = "vllm-epd"
"""Drawn broad: Dynamo's line often lies upon it."""
STAGE_COLOURS = {Stage.ENCODE: "#edae49", Stage.PREFILL: "#0b6e4f", Stage.DECODE: "#1f77b4"}
Panel = Callable[["Axes", Results, Study], None]


def check() -> None:
    """Raises ConfigError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib: install it, or ask for --no-figures")


def write(folder: Path, results: Results, studies: Sequence[Study]) -> list[Path]:
    """Every figure, into the folder. Raises ConfigError without matplotlib, and OSError."""
    check()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(STYLE):
        for name, panels in _figures(studies):
            figure = Figure((WIDTH_INCHES, PANEL_INCHES * len(panels) + 0.7))
            _drawn(figure, panels, results)
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            paths.append(path)
    return paths


def _figures(studies: Sequence[Study]) -> Iterator[tuple[str, list[tuple[Study, Panel]]]]:
    """Names of files, and a panel for each study that has what it shows."""
    comparisons = [study for study in studies if study.is_comparison]
    machines: Mapping[str, None] = dict.fromkeys(each.scenario.hardware for each in comparisons)
    for machine in machines:
        on_it = [study for study in comparisons if study.scenario.hardware == machine]
        yield f"goodput-{machine}", [(study, _goodput) for study in on_it]
    if not comparisons:
        return
    first = comparisons[0].scenario.hardware if len(machines) == 1 else _paper_machine(comparisons)
    shown = [
        study
        for study in comparisons
        if study.scenario.hardware == first and SPREAD_RATE_PER_S in study.rates_per_s
    ]
    for name, panel in (("ttft", _ttft), ("tpot", _tpot), ("utilisation", _utilisation)):
        if shown:
            yield name, [(study, panel) for study in shown]


def _paper_machine(studies: Sequence[Study]) -> str:
    """The one with most anchors."""
    count: dict[str, int] = {}
    for study in studies:
        count.setdefault(study.scenario.hardware, 0)
        count[study.scenario.hardware] += len(study.scenario.anchors)
    return max(count, key=lambda machine: count[machine])


def _drawn(figure: "Figure", panels: Sequence[tuple[Study, Panel]], results: Results) -> None:
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for (study, panel), ax in zip(panels, axes, strict=True):
        panel(ax, results, study)
        ax.set_title(study.scenario.title, fontsize=9, loc="left")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=3)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.55 / figure.get_figheight()))


def _line(side: Side) -> dict[str, Any]:
    """How a system's lines look."""
    return {
        "color": COLOURS.get(side.system, "#555555"),
        "linestyle": "--" if side.variant else "-",
        "linewidth": 3.0 if side.system == BROAD else 1.5,
        "label": who(side),
    }


def _goodput(ax: "Axes", results: Results, study: Study) -> None:
    for side in tables.shown_sides(study):
        values = [
            results.value(study, UNTUNED, side, rate_per_s, tables.GOODPUT)
            for rate_per_s in study.rates_per_s
        ]
        shown = [float("nan") if value is None else value for value in values]
        ax.plot(study.rates_per_s, shown, marker="o", markersize=3, **_line(side))
    ax.set_xlabel("offered, requests/s")
    ax.set_ylabel("goodput S3, requests/s")
    ax.set_xticks(list(study.rates_per_s))
    ax.set_ylim(bottom=0)


def _ttft(ax: "Axes", results: Results, study: Study) -> None:
    _distribution(ax, results, study, "ttft_s", "TTFT, s")


def _tpot(ax: "Axes", results: Results, study: Study) -> None:
    _distribution(ax, results, study, "tpot_s", "TPOT, s")


def _distribution(ax: "Axes", results: Results, study: Study, name: str, title: str) -> None:
    for side in tables.shown_sides(study):
        head = (study.name, UNTUNED, side.variant, side.system)
        point = Point(*head, SPREAD_RATE_PER_S, study.seeds[0])
        values = results.book.quantiles.get(point, {}).get(name, [])
        if values:
            shares = [rank / (len(values) - 1) for rank in range(len(values))]
            ax.plot(values, shares, **_line(side))
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(_plain)
    ax.xaxis.set_minor_formatter(_plain)
    ax.tick_params(axis="x", which="minor", labelsize=7)
    ax.set_xlabel(title)
    ax.set_ylabel("share of requests")
    ax.set_ylim(0, 1)


def _plain(value: float, _: float) -> str:
    """Of the numbers between powers of ten only some are named, as the axis may be long."""
    first = f"{value:e}"[0]
    return number(value) if first in "125" else ""


def _utilisation(ax: "Axes", results: Results, study: Study) -> None:
    sides = tables.shown_sides(study)
    height = 0.8 / len(Stage)
    for row, stage in enumerate(Stage):
        metric = f"utilisation.{stage.value}"
        values = [
            100 * (results.value(study, UNTUNED, side, SPREAD_RATE_PER_S, metric) or 0.0)
            for side in sides
        ]
        at = [place + (row - 1) * height for place in range(len(sides))]
        ax.barh(at, values, height, color=STAGE_COLOURS[stage], label=stage.value)
    ax.set_yticks(range(len(sides)), [who(side) for side in sides])
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xlabel("engines busy, %")
