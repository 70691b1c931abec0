"""A report as one HTML page that needs nothing else: tables, charts, plotly.js inside.

The page says itself that it may not use the network. All texts are escaped, in charts as well,
where plotly would take some of HTML for formatting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

Cell = str | int | float | None
CHART_HEIGHT_PX = 380
CONFIG = {"responsive": True, "displayModeBar": False}
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
STYLE = """
html { -webkit-text-size-adjust: 100%; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; line-height: 1.5; color: #222;
  background: #fff; font-family: system-ui, sans-serif; overflow-wrap: break-word; }
h1, h2 { line-height: 1.2; }
h2 { margin-top: 2.5rem; }
figure { margin: 1.5rem 0; }
figcaption { font-weight: 600; margin-bottom: 0.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; overflow-wrap: normal; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left; }
th { border-bottom-color: #888; }
td:not(.number) { min-width: 7rem; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A cell that is None is shown as a dash. ValueError unless all rows are as long as columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} cells for {len(self.columns)} columns")


@dataclass(frozen=True, slots=True)
class Series:
    """A named line, or the bars of one colour. ``x`` are numbers, or texts; y of None is a gap."""

    name: str
    x: Sequence[str] | Sequence[float]
    y: Sequence[float | None]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} x and {len(self.y)} y of {self.name!r}")


@dataclass(frozen=True, slots=True)
class Chart:
    """Units belong into the axes' titles. A value may be marked by ``limit``, a line across."""

    title: str
    x_title: str
    y_title: str
    series: Sequence[Series]
    kind: Literal["line", "bar"] = "line"
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """Empty lines part the paragraphs of ``text``."""

    title: str
    text: str = ""
    parts: Sequence[Table | Chart] = ()


def html(title: str, sections: Sequence[Section]) -> str:
    """The page, a few megabytes when there is a chart."""
    charts = sum(isinstance(part, Chart) for section in sections for part in section.parts)
    return "\n".join([*_head(title, bool(charts)), *_body(title, sections), "</html>\n"])


def _head(title: str, has_charts: bool) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>\n<style>{STYLE}</style>"
    if has_charts:
        from plotly.offline import get_plotlyjs

        yield f"<script>{get_plotlyjs()}</script>"
    yield "</head>"


def _body(title: str, sections: Sequence[Section]) -> Iterator[str]:
    yield f"<body>\n<h1>{escape(title)}</h1>"
    num_charts = 0
    for section in sections:
        yield f"<section>\n<h2>{escape(section.title)}</h2>"
        yield from (f"<p>{escape(each)}</p>" for each in section.text.split("\n\n") if each.strip())
        for part in section.parts:
            yield f"<figure>\n<figcaption>{escape(part.title)}</figcaption>"
            if isinstance(part, Table):
                yield from _table(part)
            else:
                num_charts += 1
                yield _chart(part, f"chart-{num_charts}")
            yield "</figure>"
        yield "</section>"
    yield "</body>"


def _table(table: Table) -> Iterator[str]:
    """A column is set as numbers when it has no texts."""
    texts = {at for row in table.rows for at, cell in enumerate(row) if isinstance(cell, str)}
    marks = ["" if at in texts else ' class="number"' for at in range(len(table.columns))]
    yield '<div class="scroll" tabindex="0"><table>'
    names = zip(marks, table.columns, strict=True)
    cells = "".join(f'<th scope="col"{mark}>{escape(name)}</th>' for mark, name in names)
    yield f"<thead><tr>{cells}</tr></thead>\n<tbody>"
    for row in table.rows:
        values = zip(marks, row, strict=True)
        cells = "".join(f"<td{mark}>{escape(shown(cell))}</td>" for mark, cell in values)
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"


def shown(cell: Cell) -> str:
    """Fractions have four digits that count, or none behind the point."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return str(cell)


def _chart(chart: Chart, div_id: str) -> str:
    from plotly.io import to_html

    figure = {"data": [_trace(chart, series) for series in chart.series], "layout": _layout(chart)}
    page: str = to_html(
        figure, config=CONFIG, include_plotlyjs=False, full_html=False, div_id=div_id
    )
    return page


def _trace(chart: Chart, series: Series) -> dict[str, Any]:
    x = [_plain(each) if isinstance(each, str) else each for each in series.x]
    trace = {"name": _plain(series.name), "x": x, "y": list(series.y)}
    if chart.kind == "bar":
        return {**trace, "type": "bar"}
    return {**trace, "type": "scatter", "mode": "lines+markers"}


def _layout(chart: Chart) -> dict[str, Any]:
    """Made for a narrow screen: legend above, and a finger on the chart scrolls the page."""
    is_text = any(isinstance(each, str) for series in chart.series for each in series.x)
    layout = {
        "template": "plotly_white",
        "height": CHART_HEIGHT_PX,
        "margin": {"l": 10, "r": 10, "t": 40, "b": 10},
        "xaxis": {
            "title": {"text": _plain(chart.x_title)},
            "automargin": True,
            "type": "category" if is_text else "linear",
        },
        "yaxis": {
            "title": {"text": _plain(chart.y_title)},
            "automargin": True,
            "rangemode": "tozero",
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "showlegend": len(chart.series) > 1,
        "dragmode": False,
    }
    if chart.limit is None:
        return layout
    line = {"color": "#888", "dash": "dash"}
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": line}
    return {**layout, "shapes": [{**across, "y0": chart.limit, "y1": chart.limit}]}


def _plain(text: str) -> str:
    """plotly.js reads tags and entities in its texts."""
    return escape(text, quote=False)
