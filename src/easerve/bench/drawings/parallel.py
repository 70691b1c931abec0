"""Parallel axes: a line for each trial, which meets every axis at what the trial has there.

Drawn as lines of a plain chart: plotly's own kind needs WebGL and code made at run time, which the
page does not allow itself.
"""

from collections.abc import Iterator, Sequence

from easerve.bench.drawings.axes import GREY, Json, plain
from easerve.bench.drawings.parts import Axis, Cell, shown

FAINT, STRONG, BEST = (200, 215, 228), (0, 70, 130), "#d55e00"
MAX_TICKS = 8
HEIGHT_PX = 420
SPREAD = 0.02
"""Lines through one value of a category are drawn so far apart, so that they can be counted."""


def lines(axes: Sequence[Axis]) -> Iterator[Json]:
    """From the lowest on the last axis to the highest, which is drawn last and marked."""
    *_, last = axes
    heights = [_number(each) for each in last.values]
    places = [_places(axis) for axis in axes]
    order = sorted(range(len(heights)), key=lambda line: heights[line])
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    names = [plain(axis.name) for axis in axes]
    for rank, line in enumerate(order):
        part = (heights[line] - low) / (high - low) if high > low else 1.0
        is_best = rank == len(order) - 1
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": f"{shown(heights[line])}",
            "x": names,
            "y": [place[line] for place in places],
            "line": {"color": BEST if is_best else _shade(part), "width": 3 if is_best else 1.2},
            "text": [f"{plain(axis.name)}: {plain(shown(axis.values[line]))}" for axis in axes],
            "hovertemplate": "%{text}",
        }


def layout(axes: Sequence[Axis]) -> Json:
    """Over that of other charts: no scale of its own, a vertical line and values at each axis."""
    notes = [note for axis in axes for note in _ticks(axis)]
    return {
        "xaxis": {
            "type": "category",
            "showgrid": False,
            "automargin": True,
            "range": [-0.3, len(axes) - 0.5],
            "tickfont": {"size": 11},
        },
        "yaxis": {"visible": False, "range": [-0.06, 1.06]},
        "shapes": [
            {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": {"color": GREY}}
            for x in range(len(axes))
        ],
        "annotations": notes,
        "showlegend": False,
        "height": HEIGHT_PX,
    }


def _places(axis: Axis) -> list[float]:
    """From 0 to 1, of each line."""
    if _is_scale(axis):
        numbers = [_number(each) for each in axis.values]
        low, high = min(numbers), max(numbers)
        return [(each - low) / (high - low) if high > low else 0.5 for each in numbers]
    at = _categories(axis)
    count = max(1, len(axis.values) - 1)
    return [
        min(1.0, max(0.0, at[each] + SPREAD * (line / count - 0.5)))
        for line, each in enumerate(axis.values)
    ]


def _categories(axis: Axis) -> dict[Cell, float]:
    values = sorted(set(axis.values), key=lambda each: (each is None, _key(each)))
    steps = max(1, len(values) - 1)
    return {each: at / steps if len(values) > 1 else 0.5 for at, each in enumerate(values)}


def _is_scale(axis: Axis) -> bool:
    """Numbers, more of them than have room as names."""
    known = set(axis.values)
    return len(known) > MAX_TICKS and all(isinstance(each, int | float) for each in known)


def _ticks(axis: Axis) -> Iterator[Json]:
    if not axis.values:
        return
    if _is_scale(axis):
        numbers = [_number(each) for each in axis.values]
        marked = {shown(min(numbers)): 0.0, shown(max(numbers)): 1.0}
    else:
        marked = {shown(each): at for each, at in _categories(axis).items()}
    for text, at in marked.items():
        yield {
            "x": plain(axis.name),
            "y": at,
            "text": plain(text),
            "showarrow": False,
            "xanchor": "right",
            "xshift": -4,
            "font": {"size": 10},
        }


def _number(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0


def _key(cell: Cell) -> tuple[bool, float, str]:
    return isinstance(cell, str), _number(cell), str(cell)


def _shade(part: float) -> str:
    pairs = zip(FAINT, STRONG, strict=True)
    red, green, blue = (round(low + part * (high - low)) for low, high in pairs)
    return f"rgb({red},{green},{blue})"
