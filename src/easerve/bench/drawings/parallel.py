"""Parallel axes: a line for each trial, which meets every axis at what the trial has there.

Drawn as lines of a plain chart: plotly's own kind needs WebGL and code made at run time, which the
page does not allow itself.
"""

from collections.abc import Iterator, Sequence

from easerve.bench.drawings.axes import GREY, Json, plain
from easerve.bench.drawings.parts import Axis, Cell, shown

FAINT, STRONG, BEST = (200, 215, 228), (0, 70, 130), "#d55e00"
MAX_TICKS, MAX_CHARS = 8, 4
ROW_PX, MARGIN_PX = 66, 40
EDGE = 0.05
"""So near to an end a value's name stays within the chart."""
SPREAD = 0.02
"""Lines through one value of a category are drawn so far apart, so that they can be counted."""


def lines(axes: Sequence[Axis]) -> Iterator[Json]:
    """From the lowest on the last axis to the highest, which is drawn last and marked."""
    *_, last = axes
    heights = [_number(each) for each in last.values]
    places = [_places(axis) for axis in axes]
    order = sorted(range(len(heights)), key=lambda line: heights[line])
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    rows = list(range(len(axes)))
    for rank, line in enumerate(order):
        part = (heights[line] - low) / (high - low) if high > low else 1.0
        is_best = rank == len(order) - 1
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": f"{shown(heights[line])}",
            "x": [place[line] for place in places],
            "y": rows,
            "line": {"color": BEST if is_best else _shade(part), "width": 3 if is_best else 1.2},
            "text": [f"{plain(axis.name)}: {plain(shown(axis.values[line]))}" for axis in axes],
            "hovertemplate": "%{text}",
        }


def layout(axes: Sequence[Axis]) -> Json:
    """Over that of other charts: axes lie under each other, so that their values have room on a
    phone as well; the name stands above each, values below it.
    """
    notes = [
        note for row, axis in enumerate(axes) for note in (_name(row, axis), *_ticks(row, axis))
    ]
    return {
        "xaxis": {"visible": False, "range": [-0.04, 1.04]},
        "yaxis": {"visible": False, "range": [len(axes) - 0.5, -0.5]},
        "shapes": [
            {"type": "line", "x0": 0, "x1": 1, "y0": row, "y1": row, "line": {"color": GREY}}
            for row in range(len(axes))
        ],
        "annotations": notes,
        "showlegend": False,
        "height": height_px(axes),
    }


def height_px(axes: Sequence[Axis]) -> int:
    return MARGIN_PX + ROW_PX * len(axes)


def _name(row: int, axis: Axis) -> Json:
    place = {"x": 0, "xanchor": "left", "yanchor": "bottom", "yshift": 3}
    return _note(row, f"<b>{plain(axis.name)}</b>") | place


def _note(row: int, text: str) -> Json:
    return {"y": row, "text": text, "showarrow": False, "font": {"size": 11}}


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
    """Numbers, more of them than have room as names, or fractions such as a goodput."""
    known = set(axis.values)
    has_room = len(known) <= MAX_TICKS and all(len(shown(each)) <= MAX_CHARS for each in known)
    return not has_room and all(isinstance(each, int | float) for each in known)


def _ticks(row: int, axis: Axis) -> Iterator[Json]:
    if not axis.values:
        return
    if _is_scale(axis):
        numbers = [_number(each) for each in axis.values]
        marked = {shown(min(numbers)): 0.0, shown(max(numbers)): 1.0}
    else:
        marked = {shown(each): at for each, at in _categories(axis).items()}
    for text, at in marked.items():
        anchor = "left" if at < EDGE else "right" if at > 1 - EDGE else "center"
        place = {"x": at, "xanchor": anchor, "yanchor": "top", "yshift": -2}
        yield _note(row, plain(text)) | place


def _number(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0


def _key(cell: Cell) -> tuple[bool, float, str]:
    return isinstance(cell, str), _number(cell), str(cell)


def _shade(part: float) -> str:
    pairs = zip(FAINT, STRONG, strict=True)
    red, green, blue = (round(low + part * (high - low)) for low, high in pairs)
    return f"rgb({red},{green},{blue})"
