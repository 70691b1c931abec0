"""A chart as plotly.js takes it, for narrow screens, light and dark, and the colour-blind.

Texts are escaped, for plotly.js would take some of HTML for formatting. A finger on a chart scrolls
the page; colours are told apart by dashes or markers as well.
"""

import math
from collections.abc import Iterator, Sequence

from easerve.bench.drawings import parallel
from easerve.bench.drawings.axes import GREY, Json, plain, rows, x_axis, y_axis
from easerve.bench.drawings.parts import Axis, Chart, Limit, Series, Spans

# Okabe and Ito's colours, which most colour-blind people can tell apart, without black and yellow.
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c564b",
    "#7f7f7f",
)
TEXT = "#222222"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
CHART_HEIGHT_PX = 340
ROW_HEIGHT_PX = 34
NOTHING = {
    "text": "nothing was recorded",
    "showarrow": False,
    "x": 0.5,
    "y": 0.5,
    "xref": "paper",
    "yref": "paper",
}
LEGEND_ROW_PX = 24
LEGEND_CHARS = 34
"""That fit into a row of a legend on a phone."""
ALIGNED_LEFT_PX = 64
ALIGNED_HEIGHT_PX = 250
TITLE_HEIGHT_PX = 36
MAX_MARKERS = 60
"""Beyond so many points markers only hide the line."""


def figure(chart: Chart) -> Json:
    """``data`` and ``layout``."""
    return {"data": list(_traces(chart)), "layout": _layout(chart)}


def _traces(chart: Chart) -> Iterator[Json]:
    if chart.kind == "spans":
        yield from (_spans(each, number) for number, each in enumerate(chart.spans))
        return
    if chart.kind == "parallel":
        yield from parallel.lines(chart.axes)
        return
    for number, series in enumerate(chart.lines):
        if series.low is not None and chart.kind != "bar":
            yield _band(series, number)
        yield _trace(chart, series, number)


def _colour(series: Series | Spans, number: int) -> str:
    if isinstance(series, Series) and series.muted:
        return GREY
    return COLOURS[(number if series.colour is None else series.colour) % len(COLOURS)]


def _trace(chart: Chart, series: Series, number: int) -> Json:
    place = number if series.colour is None else series.colour
    colour = _colour(series, number)
    trace: Json = {"name": plain(series.name), "x": _x(series), "y": list(series.y)}
    if chart.kind == "bar":
        return {**trace, "type": "bar", **_bar(series, colour)}
    trace |= {"type": "scatter", "line": {"color": colour, "width": 2}}
    marker = {"color": colour, "symbol": SYMBOLS[place % len(SYMBOLS)], "size": 7}
    if chart.kind == "scatter":
        return {**trace, "mode": "markers", "marker": {**marker, "size": 5, "opacity": 0.7}}
    if series.muted or series.dashed:
        trace["line"]["dash"] = "dot" if series.muted else "dash"
    elif chart.kind == "step" or len(series.x) > MAX_MARKERS:
        trace["line"]["dash"] = DASHES[place % len(DASHES)]
    if chart.kind == "step":
        return {**trace, "mode": "lines", "line": {**trace["line"], "shape": "hv"}}
    if chart.kind == "area":
        return {**trace, "mode": "lines", "stackgroup": "one", "line": {"color": colour}}
    if series.muted or len(series.x) > MAX_MARKERS:
        return {**trace, "mode": "lines"}
    return {**trace, "mode": "lines+markers", "marker": marker}


def _bar(series: Series, colour: str) -> Json:
    pattern = {"pattern": {"shape": "/", "solidity": 0.4}} if series.dashed else {}
    bar: Json = {"marker": {"color": colour, **pattern}}
    if series.low is None or series.high is None:
        return bar
    above, below = [], []
    for low, middle, high in zip(series.low, series.y, series.high, strict=True):
        above.append(None if high is None or middle is None else high - middle)
        below.append(None if low is None or middle is None else middle - low)
    bar["error_y"] = {
        "type": "data",
        "symmetric": False,
        "array": above,
        "arrayminus": below,
        "color": GREY,
        "thickness": 1.5,
        "width": 5,
    }
    return bar


def _band(series: Series, number: int) -> Json:
    """Around a line: up along its lower edge, back along its upper one; gaps are left out."""
    edges = zip(_x(series), series.low or (), series.high or (), strict=True)
    inside = [(x, low, high) for x, low, high in edges if low is not None and high is not None]
    back = inside[::-1]
    return {
        "type": "scatter",
        "x": [x for x, _, _ in inside] + [x for x, _, _ in back],
        "y": [low for _, low, _ in inside] + [high for _, _, high in back],
        "fill": "toself",
        "mode": "none",
        "fillcolor": _colour(series, number) + "33",
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _spans(spans: Spans, number: int) -> Json:
    """Bars that lie: each begins at its base."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": plain(spans.name),
        "y": [plain(row) for row in spans.rows],
        "base": list(spans.begin),
        "x": [end - begin for begin, end in zip(spans.begin, spans.end, strict=True)],
        "width": 0.7,
        "marker": {"color": _colour(spans, number), "opacity": 0.85, "line": {"width": 0}},
        "customdata": list(spans.end),
        "hovertemplate": "%{base:.4g} – %{customdata:.4g}",
    }


def _x(series: Series) -> list[str | float]:
    return [plain(each) if isinstance(each, str) else each for each in series.x]


def _layout(chart: Chart) -> Json:
    limits = list(chart.marked)
    layout: Json = {
        "font": {"family": FONT, "size": 13, "color": TEXT},
        "template": {},  # else plotly writes its own into the page, for every chart
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "height": height_px(chart),
        "margin": {"l": 10, "r": 12, "t": 26, "b": 10},
        "xaxis": x_axis(chart),
        "yaxis": y_axis(chart),
        # Above: below, it would be in the way of the axis' title.
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.03, "yanchor": "bottom"},
        "showlegend": bool(_legend(chart)),
        "hovermode": "closest",
        "dragmode": False,
        "bargap": 0.25,
    }
    if any(limit.name and limit.axis == "x" for limit in limits):
        layout["legend"]["y"] = 1.09  # names of limits stand at the upper edge
    if chart.aligned:
        layout["margin"]["l"] = ALIGNED_LEFT_PX
    if chart.kind == "spans":
        layout["barmode"] = "overlay"
    if chart.kind == "parallel":
        layout |= parallel.layout(chart.axes)
    if limits:
        layout["shapes"] = [_line(limit) for limit in limits]
    if named := [limit for limit in limits if limit.name]:
        layout["annotations"] = [_name(chart, limit) for limit in named]
    if not any(map(_has_points, chart.series)):
        layout["annotations"] = [NOTHING]
    return layout


def _has_points(series: Series | Spans | Axis) -> bool:
    if isinstance(series, Spans):
        return bool(series.rows)
    if isinstance(series, Axis):
        return bool(series.values)
    return any(y is not None for y in series.y)


def height_px(chart: Chart) -> int:
    """Enough for the legend on a narrow screen, and for every row of spans."""
    if chart.kind == "parallel":
        return parallel.height_px(chart.axes)
    chars = sum(len(name) + 8 for name in _legend(chart))
    legend = math.ceil(chars / LEGEND_CHARS) * LEGEND_ROW_PX
    if chart.kind == "spans":
        return 110 + ROW_HEIGHT_PX * max(1, len(rows(chart))) + legend
    height = ALIGNED_HEIGHT_PX if chart.aligned else CHART_HEIGHT_PX
    return height + max(0, legend - LEGEND_ROW_PX)


def _legend(chart: Chart) -> list[str]:
    """None for a single name, parallel axes, or where each row has the name of its spans."""
    names = [each.name for each in chart.series]
    bare = chart.kind == "parallel" or len(names) == 1 or names == rows(chart)
    return [] if bare else names


def _line(limit: Limit) -> Json:
    other = "x" if limit.axis == "y" else "y"
    return {
        "type": "line",
        f"{other}ref": "paper",
        f"{other}0": 0,
        f"{other}1": 1,
        f"{limit.axis}0": limit.value,
        f"{limit.axis}1": limit.value,
        "line": {"color": GREY, "dash": "dash", "width": 1.5},
    }


def _name(chart: Chart, limit: Limit) -> Json:
    note: Json = {"text": plain(limit.name), "showarrow": False, "font": {"size": 11}}
    if limit.axis == "x":
        at = math.log10(limit.value) if chart.x_log else limit.value
        place = {"x": at, "y": 1, "yref": "paper", "yanchor": "bottom"}
    else:
        place = {"y": limit.value, "x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
    return note | place


def colours(names: Sequence[str]) -> dict[str, int]:
    """A colour for each name, in the order in which the names come first."""
    return {name: number for number, name in enumerate(dict.fromkeys(names))}
