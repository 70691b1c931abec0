"""Reports in a browser: drawn, quiet, and as wide as the window, on a phone and on a desk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from easerve.bench.drawings.results import of_bench, of_goodput, of_simulate
from easerve.bench.drawings.runs import sections
from easerve.bench.report import Chart, Limit, Section, Series, Spans, Table, html
from tests.bench.drawn_results import FAST, SLOW, bench, goodput, simulated
from tests.browser.chromium import CHROMIUM, DRIVER, Browser, browser

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium with chromedriver"),
]
PHONE, DESK = 360, 1280
LONG = "a very long name of a system that nobody would want to read in a legend"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


def write(path: Path, parts: list[Section]) -> Path:
    path.write_text(html(path.stem, parts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    return write(folder / "one.html", sections([of_bench(bench(SLOW, 12.0))]))


@pytest.fixture(scope="module")
def compared(folder: Path) -> Path:
    """Everything that is drawn of runs."""
    bad = bench(SLOW, 24.0, valid=False, invalid_because=["the client was late"])
    runs = [of_bench(each) for each in (bench(FAST, 8.0), bench(SLOW, 8.0), bad)]
    found = []
    for server in (FAST, SLOW):
        capacity, probes = of_goodput(goodput(server))
        found.append(capacity)
        runs += probes
    return write(folder / "compared.html", sections([*runs, *of_simulate(simulated())], found))


@pytest.fixture(scope="module")
def kinds(folder: Path) -> Path:
    """Every kind of chart, and texts that are too long for a phone."""
    x = [0.1 * number for number in range(1, 60)]
    rows = ["encode", "prefill, local", "prefill, remote"]
    spans = [Spans(row, [row] * 59, x, [each + 0.05 for each in x]) for row in rows]
    lines = [Series(f"{LONG} {number}", x, x) for number in range(5)]
    whiskers = Series("b", ["one", LONG], [1, 2], [0.5, 1.5], [1.5, 2.5], dashed=True)
    band = Series("c", [1, 2, 3], [1, 2, 3], [0, 1, 2], [2, 3, 4])
    parts: list[Table | Chart] = [
        Table(LONG, [f"column {number}" for number in range(20)], [[LONG, *range(19)]] * 3),
        Chart("lines", "x", "y", lines, limits=[Limit(2, "promise"), Limit(3, "S1", "x")]),
        Chart("steps", "x", "y", lines[:2], "step", x_log=True, limits=[Limit(30, "S5", "x")]),
        Chart("areas", "x", "y", lines[:2], "area", x_range=(0, 7), aligned=True),
        Chart("overlap", "time, s", "", spans, "spans", x_range=(0, 7), aligned=True),
        Chart("overlap alone", "time, s", "", spans[:1], "spans"),
        Chart("scatter", "x", "y", lines[:1], "scatter"),
        Chart("bars", "x", "y", [whiskers], "bar", limit=1),
        Chart("band", "x", "y", [band, Series("gap", [1, 2], [None, 2], muted=True)]),
        Chart("nothing", "x", "y", []),
    ]
    return write(folder / "kinds.html", [Section(LONG, "w" * 200, parts, alert=LONG * 3)])


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", ["one", "compared", "kinds"])
def test_pages_are_drawn_quiet_and_as_wide_as_the_window(
    chromium: Browser, request: pytest.FixtureRequest, name: str, width: int
) -> None:
    page: Path = request.getfixturevalue(name)
    chromium.open(page, width)
    charts = chromium.drawn()
    assert len(charts) == page.read_text().count('class="plotly-graph-div"') > 0
    for chart in charts:
        assert chart.width > 200, chart
        assert chart.height > 80, chart
        assert chart.width <= chart.room + 1, chart
        assert chart.num_marks > 0, chart
    assert chromium.width() <= width
    assert chromium.complaints() == []
    assert chromium.requests() == []


def test_charts_that_stand_under_each_other_have_one_axis(chromium: Browser, one: Path) -> None:
    chromium.open(one, DESK)
    plots = chromium.run(
        "return [...document.querySelectorAll('section')]"
        ".filter((each) => each.querySelector('h2').textContent.startsWith('Over time'))"
        ".flatMap((each) => [...each.querySelectorAll('.plotly-graph-div')])"
        ".map((each) => [each._fullLayout._size.l, each._fullLayout._size.w,"
        " ...each._fullLayout.xaxis.range].join())"
    )
    assert len(plots) == 6
    assert len(set(plots)) == 1


def test_texts_in_charts_can_be_read_in_the_dark(chromium: Browser, kinds: Path) -> None:
    script = (
        "const text = document.querySelector('.xtick text');"
        "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(text).fill];"
    )
    seen = []
    for is_dark in (False, True):
        chromium.open(kinds, DESK, is_dark)
        seen.append(chromium.run(script))
    assert seen[0] == ["rgb(255, 255, 255)", "rgb(34, 34, 34)"]
    assert seen[1] == ["rgb(24, 24, 24)", "rgb(221, 221, 221)"]


def test_the_policy_keeps_a_page_from_the_network(chromium: Browser, one: Path) -> None:
    """The test above would see it: here it is tried, and the console complains."""
    chromium.open(one, DESK)
    chromium.run("new Image().src = 'http://127.0.0.1:9/x.png'; fetch('http://127.0.0.1:9/')")
    assert any("Content Security Policy" in each for each in chromium.complaints())


def test_a_page_can_be_printed(chromium: Browser, compared: Path) -> None:
    chromium.open(compared, DESK)
    assert chromium.pdf().startswith(b"%PDF")
    chromium.complaints()
