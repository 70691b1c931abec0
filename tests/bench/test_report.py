import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from easerve.bench.report import Chart, Section, Series, Table, html, shown

EVIL = "<b>bold</b> & </script><script>alert(1)</script> \"q\" 'a'"
VOID = {"meta"}


class Page(HTMLParser):
    """What a browser would see: elements in order, texts, and that all of it is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1:] not in (["script"], ["style"]):
            self.texts.append(data.strip())

    def count(self, tag: str) -> int:
        return sum(each == tag for each, _ in self.elements)


def charts_of(text: str) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """The data and the layout of every chart, as plotly.js gets them."""
    decoder, charts = json.JSONDecoder(), []
    for found in re.finditer(r'Plotly\.newPlot\(\s*"chart-\d+",\s*', text):
        data, end = decoder.raw_decode(text, found.end())
        layout, _ = decoder.raw_decode(text, text.index("{", end))
        charts.append((data, layout))
    return charts


LINES = Chart(
    "lines", "rate (1/s)", "goodput (1/s)", [Series("one", [1, 2.5], [0.5, None])], limit=2.0
)
BARS = Chart("bars", "process", "CPU seconds", [Series("s", ["1", "2024-01-01"], [3, 4])], "bar")


@pytest.fixture(scope="module")
def page() -> str:
    """A page whose every text is hostile."""
    table = Table(EVIL, [EVIL, "n"], [[EVIL, 1], ["x", None]])
    chart = Chart(EVIL, EVIL, EVIL, [Series(EVIL, [EVIL], [1]), Series("two", ["x"], [2])])
    return html(EVIL, [Section(EVIL, f"{EVIL}\n\n \n\nsecond", [table, chart, LINES, BARS])])


def test_texts_are_escaped(page: str) -> None:
    seen = Page(page)
    assert seen.texts.count(EVIL) == 8  # title, h1, h2, a paragraph, 2 captions, a column, a cell
    assert not {"b", "alert"} & {tag for tag, _ in seen.elements}
    assert seen.count("script") == 1 + 3  # plotly.js and a chart each


def test_texts_in_charts_are_escaped_for_plotly(page: str) -> None:
    data, layout = charts_of(page)[0]
    text = EVIL.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert data[0]["name"] == text
    assert data[0]["x"] == [text]
    assert {str(layout[axis]["title"]["text"]) for axis in ("xaxis", "yaxis")} == {text}


def test_a_page_needs_nothing_else(page: str) -> None:
    seen = Page(page)
    assert not {"link", "img", "iframe"} & {tag for tag, _ in seen.elements}
    assert not any({"src", "href"} & attributes.keys() for _, attributes in seen.elements)
    policy = next(
        attributes["content"]
        for _, attributes in seen.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert page.count("plotly.js v") == 1


def test_a_page_fits_a_phone(page: str) -> None:
    seen = Page(page)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in (
        seen.elements
    )
    assert "max-width" in page
    before = {later[0]: earlier for earlier, later in pairwise(seen.elements)}
    assert before["table"] == ("div", {"class": "scroll", "tabindex": "0"})
    assert page.count('"responsive": true') == 3


def test_a_page_is_the_same_every_time() -> None:
    sections = [Section("s", parts=[LINES, BARS])]
    assert html("t", sections) == html("t", sections)


def test_a_table_is_a_table() -> None:
    text = html("t", [Section("s", parts=[Table("c", ["name", "n"], [["a", 1], ["b", 2.5]])])])
    seen = Page(text)
    assert [seen.count(tag) for tag in ("table", "tr", "th", "td", "script")] == [1, 3, 2, 4, 0]
    assert seen.texts == ["t", "t", "s", "c", "name", "n", "a", "1", "b", "2.5"]
    assert '<th scope="col" class="number">n</th>' in text
    assert '<td>a</td><td class="number">1</td>' in text


def test_lines() -> None:
    text = html("t", [Section("s", parts=[LINES])])
    (((trace,), layout),) = charts_of(text)
    assert (trace["type"], trace["x"], trace["y"]) == ("scatter", [1, 2.5], [0.5, None])
    assert layout["xaxis"]["type"] == "linear"
    assert not layout["showlegend"]
    (limit,) = layout["shapes"]
    assert (limit["y0"], limit["y1"]) == (2, 2)


def test_bars_by_names_that_look_like_numbers_and_dates() -> None:
    text = html("t", [Section("s", parts=[BARS])])
    (((trace,), layout),) = charts_of(text)
    assert (trace["type"], trace["x"], trace["y"]) == ("bar", ["1", "2024-01-01"], [3, 4])
    assert layout["xaxis"]["type"] == "category"
    assert "shapes" not in layout


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, "–"),
        ("x", "x"),
        (123456, "123456"),
        (1.0, "1"),
        (0.123456, "0.1235"),
        (999.96, "1000"),
        (12345.6, "12,346"),
        (-1234.5, "-1,234"),
        (float("nan"), "nan"),
    ],
)
def test_cells(cell: str | float | None, text: str) -> None:
    assert shown(cell) == text


def test_sizes_must_fit() -> None:
    with pytest.raises(ValueError, match="3 cells for 2 columns"):
        Table("t", ["a", "b"], [[1, 2], [1, 2, 3]])
    with pytest.raises(ValueError, match="1 x and 2 y of 's'"):
        Series("s", [1], [1, 2])
