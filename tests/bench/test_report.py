import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from easerve.bench.report import Chart, Section, Series, Spans, Table, html, shown

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
    text = f"{EVIL}\n\n \n\nsecond"
    return html(EVIL, [Section(EVIL, text, [table, chart, LINES, BARS], alert=EVIL)])


def test_texts_are_escaped(page: str) -> None:
    seen = Page(page)
    # title, h1, h2, alert, a paragraph, 2 captions, a column, a cell; of the listed chart as many
    # as it has: two columns and a row
    assert seen.texts.count(EVIL) == 9 + 3
    assert not {"b", "alert"} & {tag for tag, _ in seen.elements}
    assert seen.count("script") == 1 + 3 + 1  # plotly.js, a chart each, printing


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
    for earlier, (tag, _) in pairwise(seen.elements):
        if tag == "table":
            assert earlier[0] == "div"
            assert earlier[1]["class"] == "scroll"
            assert earlier[1]["tabindex"] == "0"
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


def test_long_texts_may_be_broken_and_short_ones_not() -> None:
    table = Table("c", ["name", "cause"], [["a", "a whole sentence of words"]])
    text = html("t", [Section("s", parts=[table])])
    assert '<td>a</td><td class="words">a whole sentence of words</td>' in text


def test_an_alert_is_told_before_anything_else() -> None:
    seen = Page(html("t", [Section("s", "text", [LINES], alert="do not trust this")]))
    at = seen.elements.index(("p", {"class": "alert", "role": "alert"}))
    assert at < seen.elements.index(("p", {}))
    assert ("p", {"class": "alert", "role": "alert"}) not in Page(html("t", [])).elements


def test_a_chart_is_told_in_words_and_its_points_in_a_table() -> None:
    seen = Page(html("t", [Section("s", parts=[LINES])]))
    told = next(each for _, each in seen.elements if each.get("role") == "img")["aria-label"]
    assert told == "Lines: lines; goodput (1/s) by rate (1/s). one: 0.5 at 1. Marked: 2."
    assert seen.texts[-6:] == ["rate (1/s)", "one", "1", "0.5", "2.5", "–"]


def test_many_points_are_not_listed() -> None:
    many = list(range(100))
    chart = Chart("lines", "x", "y", [Series("one", many, many)])
    assert Page(html("t", [Section("s", parts=[chart])])).count("table") == 0


def test_what_is_narrow_stands_side_by_side() -> None:
    aligned = Chart("c", "x", "y", [Series("one", [1], [1])], aligned=True)
    spans = Chart("c", "x", "y", [Spans("one", ["a"], [0], [1])], "spans")
    wide = Table("t", ["x"], [["w" * 80]])
    narrow = Table("t", ["x"], [["w"]])
    parts: list[Table | Chart] = [narrow, narrow, wide, LINES, BARS, aligned, spans]
    seen = Page(html("t", [Section("s", parts=parts)]))
    assert seen.elements.count(("div", {"class": "beside"})) == 2  # two tables, two charts
    assert seen.count("figure") == len(parts)


def test_a_page_without_charts_has_no_script() -> None:
    assert Page(html("t", [Section("s", "text")])).count("script") == 0


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
