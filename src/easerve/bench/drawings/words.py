"""What a chart shows in a few sentences, for those who cannot see it."""

from collections.abc import Iterator, Sequence

from easerve.bench.drawings.parts import Axis, Chart, Series, Spans, shown

Point = tuple[float, str | float]
MAX_NAMED = 8
KINDS = {
    "line": "Lines",
    "step": "Steps",
    "area": "Stacked areas",
    "scatter": "Points",
    "bar": "Bars",
    "spans": "Intervals",
    "parallel": "Parallel axes",
}


def summary(chart: Chart) -> str:
    """Of every series (the first eight) its extent, and the limits."""
    return " ".join(_sentences(chart))


def _sentences(chart: Chart) -> Iterator[str]:
    axes = chart.x_title if chart.kind == "spans" else f"{chart.y_title} by {chart.x_title}"
    yield f"{KINDS[chart.kind]}: {chart.title}; {axes}."
    for each in chart.series[:MAX_NAMED]:
        yield _of(each)
    if len(chart.series) > MAX_NAMED:
        yield f"And {len(chart.series) - MAX_NAMED} more."
    if chart.marked:
        marks = (f"{mark.name} {shown(float(mark.value))}".strip() for mark in chart.marked)
        yield f"Marked: {', '.join(marks)}."


def _of(each: Series | Spans | Axis) -> str:
    match each:
        case Spans():
            return _of_spans(each)
        case Axis():
            return f"{each.name}: {', '.join(map(shown, dict.fromkeys(each.values)))}."
        case _:
            return _of_series(each)


def _of_spans(spans: Spans) -> str:
    total = sum(end - begin for begin, end in zip(spans.begin, spans.end, strict=True))
    number = f"{len(spans.rows)} interval{'' if len(spans.rows) == 1 else 's'}"
    return f"{spans.name}: {number}, {shown(float(total))} in all."


def _of_series(series: Series) -> str:
    xs: Sequence[str | float] = series.x
    points = [(y, x) for x, y in zip(xs, series.y, strict=True) if y is not None]
    if not points:
        return f"{series.name}: nothing."
    if len(points) == 1:
        return f"{series.name}: {_point(points[0])}."
    low, high = min(points, key=_height), max(points, key=_height)
    return f"{series.name}: {_point(points[0])} to {_point(points[-1])}, {_extent(low, high)}."


def _height(point: Point) -> float:
    return point[0]


def _point(point: Point) -> str:
    y, x = point
    return f"{shown(float(y))} at {x if isinstance(x, str) else shown(float(x))}"


def _extent(low: Point, high: Point) -> str:
    if low[0] == high[0]:
        return "all alike"
    return f"lowest {_point(low)}, highest {_point(high)}"
