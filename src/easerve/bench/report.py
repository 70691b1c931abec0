"""A report as one HTML page that needs nothing else: tables, charts, plotly.js inside.

The page says itself that it may not use the network. All texts are escaped. It is made to be read
on a phone and on paper, in light and in dark, and to be listened to.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import count, groupby

from easerve.bench.drawings.figure import figure, height_px
from easerve.bench.drawings.parts import (
    Axis,
    Cell,
    Chart,
    Limit,
    Section,
    Series,
    Spans,
    Table,
    shown,
)
from easerve.bench.drawings.words import summary

__all__ = [
    "Axis",
    "Cell",
    "Chart",
    "Limit",
    "Section",
    "Series",
    "Spans",
    "Table",
    "html",
    "shown",
]

CONFIG = {"responsive": True, "displayModeBar": False}
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
PAPER_PX = 680
WIDE = ("spans", "parallel")
"""Kinds of charts that take the whole width."""
MAX_LISTED = 40
"""Points of a chart that are also given as a table."""
MAX_NARROW = 62
"""Characters of a table's row that may have another table beside it."""
MAX_SHORT = 14
"""Characters of a text that need not be broken."""
# plotly.js writes colours into each element; only !important gets past that.
STYLE = """
:root { color-scheme: light dark; --text: #222; --back: #fff; --line: #ddd; --strong: #888;
  --alert: #b00020; --alert-back: #fdecee; }
/* Charts take their width while the page loads: neither bar nor grid may change it later. */
html { -webkit-text-size-adjust: 100%; overflow-y: scroll; }
body { max-width: 72rem; margin: 0 auto; padding: 1rem; line-height: 1.5; color: var(--text);
  background: var(--back); font-family: system-ui, sans-serif; overflow-wrap: break-word; }
h1, h2 { line-height: 1.2; }
h2 { margin-top: 2.5rem; }
p { max-width: 45rem; }
figure { margin: 1.5rem 0; min-width: 0; }
@media (min-width: 56rem) {
  .beside { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); column-gap: 2rem; }
}
.beside figure { margin: 0.8rem 0; }
figcaption { font-weight: 600; margin-bottom: 0.5rem; }
.alert { border-left: 0.4rem solid var(--alert); background: var(--alert-back);
  padding: 0.5rem 0.8rem; font-weight: 600; white-space: pre-line; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--strong); }
table { border-collapse: collapse; overflow-wrap: normal; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left; }
th { border-bottom-color: var(--strong); vertical-align: bottom; }
.words { min-width: 9rem; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; font-size: 0.9rem; }
@media (max-width: 30rem) {
  table { font-size: 0.85rem; }
  th, td { padding: 0.25rem 0.4rem; }
  .words { min-width: 7rem; }
}
@media screen and (prefers-color-scheme: dark) {
  :root { --text: #ddd; --back: #181818; --line: #444; --alert: #ff6b7d; --alert-back: #3a1a1e; }
  .main-svg :not(.hoverlayer *) > text, .main-svg .legendtext, .main-svg .annotation-text {
    fill: #ddd !important; }
  .main-svg .gridlayer path { stroke: #3a3a3a !important; }
}
@media print {
  body { max-width: none; font-size: 10pt; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .scroll { overflow: visible; }
  .beside { display: block; }
  html { overflow-y: visible; }
  details { display: none; }
}
"""


# What is drawn does not shrink with the paper by itself.
PRINTING = f"""<script>
for (const [when, size] of [["beforeprint", {{width: {PAPER_PX}, autosize: false}}],
    ["afterprint", {{width: null, autosize: true}}]])
  window.addEventListener(when, () => document.querySelectorAll(".plotly-graph-div")
    .forEach((chart) => Plotly.relayout(chart, size)));
</script>"""


def html(title: str, sections: Sequence[Section]) -> str:
    """The page, a few megabytes when there is a chart."""
    has_charts = any(isinstance(part, Chart) for each in sections for part in each.parts)
    body = _body(title, sections, has_charts)
    return "\n".join([*_head(title, has_charts), *body, "</html>\n"])


def _head(title: str, has_charts: bool) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>\n<style>{STYLE}</style>"
    if has_charts:
        from plotly.offline import get_plotlyjs

        yield f"<script>{get_plotlyjs()}</script>"
    yield "</head>"


def _body(title: str, sections: Sequence[Section], has_charts: bool) -> Iterator[str]:
    yield f"<body>\n<main>\n<h1>{escape(title)}</h1>"
    numbers = count(1)
    for section in sections:
        yield f"<section>\n<h2>{escape(section.title)}</h2>"
        if section.alert:
            yield f'<p class="alert" role="alert">{escape(section.alert)}</p>'
        yield from (f"<p>{escape(each)}</p>" for each in section.text.split("\n\n") if each.strip())
        for (_, are_beside), parts in groupby(section.parts, _place):
            figures = [line for part in parts for line in _figure(part, numbers)]
            yield from ('<div class="beside">', *figures, "</div>") if are_beside else figures
        yield "</section>"
    yield f"</main>\n{PRINTING if has_charts else ''}</body>"


def _place(part: Table | Chart) -> tuple[bool, bool]:
    """Whether it is a chart; whether it may stand beside others of its sort where there is room:
    what is narrow may, but wide kinds and charts with one axis take the whole width.
    """
    if isinstance(part, Chart):
        return True, not part.aligned and part.kind not in WIDE
    rows = [part.columns, *part.rows]
    widths = (max(len(shown(row[at])) for row in rows) for at in range(len(part.columns)))
    return False, sum(width + 3 for width in widths) <= MAX_NARROW


def _figure(part: Table | Chart, numbers: Iterator[int]) -> Iterator[str]:
    yield f"<figure>\n<figcaption>{escape(part.title)}</figcaption>"
    if isinstance(part, Table):
        yield from _table(part)
    else:
        yield from _chart(part, f"chart-{next(numbers)}")
    yield "</figure>"


def _table(table: Table) -> Iterator[str]:
    """A column is set as numbers when it has no texts; long texts may be broken."""
    marks = [_mark([row[at] for row in table.rows]) for at in range(len(table.columns))]
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
    names = zip(marks, table.columns, strict=True)
    cells = "".join(f'<th scope="col"{mark}>{escape(name)}</th>' for mark, name in names)
    yield f"<table>\n<thead><tr>{cells}</tr></thead>\n<tbody>"
    for row in table.rows:
        values = zip(marks, row, strict=True)
        cells = "".join(f"<td{mark}>{escape(shown(cell))}</td>" for mark, cell in values)
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"


def _mark(column: Sequence[Cell]) -> str:
    texts = [cell for cell in column if isinstance(cell, str)]
    if not texts:
        return ' class="number"'
    return ' class="words"' if max(map(len, texts)) > MAX_SHORT else ""


def _chart(chart: Chart, div_id: str) -> Iterator[str]:
    """What it shows is said as well, and its points are listed where they are few."""
    from plotly.io import to_html

    drawn: str = to_html(
        figure(chart),
        config=CONFIG,
        include_plotlyjs=False,
        full_html=False,
        div_id=div_id,
        default_height=f"{height_px(chart)}px",
    )
    yield f'<div role="img" aria-label="{escape(summary(chart))}">{drawn}</div>'
    if sum(len(series.x) for series in chart.lines) <= MAX_LISTED and chart.lines:
        yield "<details><summary>In numbers</summary>"
        yield from _table(_listed(chart))
        yield "</details>"


def _listed(chart: Chart) -> Table:
    """A row for each x, a column for each series."""
    columns: list[dict[Cell, Cell]] = [
        dict(zip(series.x, series.y, strict=True)) for series in chart.lines
    ]
    xs = dict.fromkeys(x for column in columns for x in column)
    rows = [[x, *(column.get(x) for column in columns)] for x in xs]
    names = [series.name for series in chart.lines]
    return Table(f"{chart.title}: {chart.y_title}", [chart.x_title, *names], rows)
