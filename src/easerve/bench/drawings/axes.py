"""The axes of a chart as plotly.js takes them."""

import math
from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import Any

from easerve.bench.drawings.parts import Chart

Json = dict[str, Any]
GREY = "#888888"
GRID = "#dddddd"
NARROW = 9  # letters of a row's name on a line, where the plots of several charts are aligned
MAX_DECADES = 2.5
"""Of a logarithmic axis, on which there is room for more than powers of ten."""


def _axis(title: str) -> Json:
    return {
        "title": {"text": plain(title), "standoff": 8},
        "automargin": True,
        "gridcolor": GRID,
        "linecolor": GREY,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": GRID,
    }


def x_axis(chart: Chart) -> Json:
    is_text = any(isinstance(each, str) for series in chart.lines for each in series.x)
    axis = _axis(chart.x_title)
    axis["type"] = "category" if is_text else "log" if chart.x_log else "linear"
    if chart.kind == "bar":
        axis["showgrid"] = False
    if chart.x_log:
        ticks = _log_ticks(chart)
        axis |= {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    if chart.x_range is not None:
        ends = map(math.log10, chart.x_range) if chart.x_log else chart.x_range
        axis["range"] = list(ends)
    elif chart.kind == "spans":
        axis["rangemode"] = "tozero"
    return axis


def _log_ticks(chart: Chart) -> list[float]:
    """Numbers like 1, 2 and 5 over the whole axis; powers of ten alone if it is long."""
    values = [limit.value for limit in chart.marked if limit.axis == "x"]
    values += [x for each in chart.lines for x in each.x if not isinstance(x, str) and x > 0]
    values += chart.x_range or ()
    if not values:
        return []
    low, high = math.log10(min(values)), math.log10(max(values))
    steps = (1, 2, 5) if high - low <= MAX_DECADES else (1,)
    decades = range(math.floor(low), math.floor(high) + 1)
    return [step * 10.0**decade for decade in decades for step in steps]


def y_axis(chart: Chart) -> Json:
    axis = _axis(chart.y_title)
    if chart.aligned:
        axis["automargin"] = False
    if chart.kind == "spans":
        return axis | _row_axis([plain(row) for row in rows(chart)], chart.aligned)
    axis["rangemode"] = "tozero"
    if chart.y_range is not None:
        axis["range"] = list(chart.y_range)
    return axis


def _row_axis(rows: Sequence[str], is_narrow: bool) -> Json:
    axis: Json = {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": rows,
        "autorange": "reversed",
        "showgrid": False,
    }
    if is_narrow:
        wrapped = ["<br>".join(wrap(row, NARROW, break_long_words=False)) for row in rows]
        axis |= {"tickvals": rows, "ticktext": wrapped}
        axis["tickfont"] = {"size": 11}
    return axis


def rows(chart: Chart) -> list[str]:
    return list(dict.fromkeys(row for spans in chart.spans for row in spans.rows))


def plain(text: str) -> str:
    """plotly.js reads tags and entities in its texts."""
    return escape(text, quote=False)
