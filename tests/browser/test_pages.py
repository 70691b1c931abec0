"""Reports in a browser: drawn, quiet, and as wide as the window, on a phone and on a desk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from easerve.bench.drawings.results import of_bench, of_goodput, of_simulate
from easerve.bench.drawings.runs import sections
from easerve.bench.report import Chart, Limit, Section, Series, Spans, Table, html
from easerve.cli.search import shown
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


ALLOCATIONS = ("e2-p2x2-d2", "e1-p1x3-d2x2", "e4-p1x2-d1x2")
RULES = ("slack", "gap", "greedy")
NUM_TRIALS = 12
BEST = 7
"""The trial that wins."""


def trial(number: int) -> dict[str, Any]:
    """Goodput rises up to the best; the one after it is the last that is complete."""
    rule = RULES[number % 3]
    knobs = {"policy.remote_share": number / 20, "policy.when": rule, "decode.max_num_seqs": 64}
    return {
        "trial": number,
        "allocation": ALLOCATIONS[number % len(ALLOCATIONS)],
        "knobs": knobs | ({} if rule == "greedy" else {"policy.gap_k": 0.5}),
        "goodput_per_s": 2 - abs(number - BEST) / 10,
        "confidence_per_s": 0.1,
        "attainment": 0.95,
        "rate_per_s": 2.5,
        "state": "complete" if number <= BEST + 1 else "pruned",
        "why": "" if number <= BEST + 1 else "5 % behind the best after 1 of 2 seeds",
        "cached": False,
    }


@pytest.fixture(scope="module")
def searched(folder: Path) -> Path:
    """What ``easerve search --html`` writes, with a reason in every column that has one."""
    trials = [trial(number) for number in range(NUM_TRIALS)]
    allocations = [
        {
            "name": name,
            "num_configurations": 480,
            "kept": name != ALLOCATIONS[-1],
            "capacity_per_s": 3.4,
            "stages_per_s": {"encode": 9.0, "prefill": 4.0, "decode": 3.4},
            "why": "" if name != ALLOCATIONS[-1] else "decode 2.54/s is the bottleneck",
            "remote_only": "",
        }
        for name in ALLOCATIONS
    ]
    result = {
        "title": "pictures, 8 GPUs",
        "source": "scenarios/pictures.yaml",
        "allocations": allocations,
        "impossible": [{"name": "e1-p1-d1", "why": "leaves 5 devices idle"}],
        "knobs": {
            "policy.remote_share": [number / 20 for number in range(1, 21)],
            "policy.when": list(RULES),
            "policy.gap_k": [0.5, 1.0],
            "decode.max_num_seqs": [64, 128],
        },
        "num_configurations": 1440,
        "num_candidates": 2,
        "capacities": "modelled",
        "trials": trials,
        "best": trials[BEST],
        "runner_up": trials[BEST + 1],
        "closest": None,
        "num_trials": NUM_TRIALS,
        "num_pruned": NUM_TRIALS - BEST - 2,
        "num_failed": 0,
        "num_cached": 0,
        "method": "has",
        "seed": 0,
        "wall_s": 12.0,
        "objective": "simulated",
        "tier": "S3",
        "rates_per_s": [0.5, 1.0, 2.5],
        "required": 0.9,
        "seeds": [1, 2],
        "load": "60 requests, poisson arrivals",
        "importance": {"policy.remote_share": 0.7, "allocation": 0.2, "policy.when": 0.1},
        "confirmation": {
            "rounds": [
                {
                    "seed": seed,
                    "before": {"goodput_per_s": 1.5, "attainment": 0.95, "rate_per_s": 2.5},
                    "winner": {"goodput_per_s": 1.9, "attainment": 0.95, "rate_per_s": 2.5},
                }
                for seed in (3, 4)
            ],
            "ratio": 1.27,
            "ratio_confidence": 0.1,
        },
    }
    return write(folder / "searched.html", shown.sections(result))


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", ["one", "compared", "kinds", "searched"])
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


def chart_of(heading: str) -> str:
    """JavaScript that has the chart under a heading."""
    return (
        "const chart = [...document.querySelectorAll('section')]"
        f".find((each) => each.querySelector('h2').textContent === '{heading}')"
        ".querySelector('.plotly-graph-div');"
    )


def test_best_so_far_rises_to_the_winner_and_stays(chromium: Browser, searched: Path) -> None:
    chromium.open(searched, DESK)
    best, each = chromium.run(
        chart_of("Best so far") + "return chart._fullData.map((line) => [...line.y])"
    )
    assert best == sorted(best)
    assert best[BEST:] == [pytest.approx(2.0)] * (NUM_TRIALS - BEST)
    assert len(each) == NUM_TRIALS


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_parallel_axes_have_a_line_for_each_trial_and_a_name_for_each_axis(
    chromium: Browser, searched: Path, width: int
) -> None:
    chromium.open(searched, width)
    num_lines, names = chromium.run(
        chart_of("Configurations")
        + "return [chart.querySelectorAll('.scatterlayer path.js-line').length,"
        " [...chart.querySelectorAll('.annotation text')].map((each) => each.textContent)]"
    )
    assert num_lines == NUM_TRIALS
    knobs = ["remote_share", "when", "gap_k", "max_num_seqs"]
    assert {"allocation", *knobs, "goodput, req/s"} <= set(names)


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_values_at_parallel_axes_are_not_cut_off(
    chromium: Browser, searched: Path, width: int
) -> None:
    chromium.open(searched, width)
    cut = chromium.run(
        chart_of("Configurations") + "const room = chart.getBoundingClientRect();"
        "return [...chart.querySelectorAll('.annotation text')].filter((each) => {"
        " const box = each.getBoundingClientRect();"
        " return box.left < room.left - 1 || box.right > room.right + 1;"
        "}).map((each) => each.textContent)"
    )
    assert cut == []


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
