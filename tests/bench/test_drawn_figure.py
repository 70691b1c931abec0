"""What plotly.js is given for each kind of chart."""

import math
from typing import Any

import pytest

from easerve.bench.drawings.axes import GREY
from easerve.bench.drawings.figure import COLOURS, colours, figure, height_px
from easerve.bench.drawings.parts import Axis, Chart, Kind, Limit, Series, Spans
from easerve.bench.drawings.words import summary

ONE = Series("one", [1, 2], [3, 4])
TWO = Series("two", [1, 2], [4, None])
SPANS = [
    Spans("encode", ["E0", "E1", "E0"], [0, 1, 2], [0.5, 3, 2.5]),
    Spans("prefill", ["P0"], [0.25], [1.25]),
]


def drawn(kind: Kind, *series: Series, **over: Any) -> tuple[list[Any], dict[str, Any]]:
    made = figure(Chart("t", "x", "y", series, kind, **over))
    return made["data"], made["layout"]


def test_lines_have_markers_until_there_are_too_many() -> None:
    many = list(range(100))
    (few, long), layout = drawn("line", ONE, Series("long", many, many))
    assert (few["mode"], long["mode"]) == ("lines+markers", "lines")
    assert (few["x"], few["y"]) == ([1, 2], [3, 4])
    assert layout["xaxis"]["type"] == "linear"
    assert layout["showlegend"]
    assert not drawn("line", ONE)[1]["showlegend"]


def test_lines_are_told_apart_by_more_than_colour() -> None:
    many = list(range(100))
    lines, _ = drawn("step", *(Series(str(number), many, many) for number in range(6)))
    assert len({line["line"]["dash"] for line in lines}) == 6
    points, _ = drawn("line", *(Series(str(number), [1], [1]) for number in range(8)))
    assert len({point["marker"]["symbol"] for point in points}) == 8


def test_a_colour_is_kept_whatever_the_place() -> None:
    system = Series("one", [1, 2], [3, 4], colour=2)
    (first, second), _ = drawn("line", TWO, system)
    assert first["line"]["color"] == COLOURS[0]
    assert second["line"]["color"] == COLOURS[2]
    assert drawn("bar", system)[0][0]["marker"]["color"] == COLOURS[2]
    assert colours(["a", "b", "a", "c"]) == {"a": 0, "b": 1, "c": 2}


def test_what_was_not_measured_looks_otherwise() -> None:
    (dashed, muted), _ = drawn(
        "line", Series("s", [1], [1], dashed=True), Series("m", [1], [1], muted=True)
    )
    assert (dashed["line"]["dash"], muted["line"]["dash"]) == ("dash", "dot")
    assert muted["line"]["color"] == GREY
    ((bar,), _) = drawn("bar", Series("s", ["a"], [1], dashed=True))
    assert bar["marker"]["pattern"]["shape"] == "/"


def test_steps_hold_their_value() -> None:
    ((step,), _) = drawn("step", ONE)
    assert (step["mode"], step["line"]["shape"]) == ("lines", "hv")


def test_areas_are_stacked() -> None:
    areas, _ = drawn("area", ONE, TWO)
    assert [area["stackgroup"] for area in areas] == ["one", "one"]


def test_a_band_goes_up_and_back_and_leaves_gaps_out() -> None:
    banded = Series("b", [1, 2, 3], [5, 6, 7], [4, None, 6], [6, 7, 8])
    (band, line), _ = drawn("line", banded)
    assert band["x"] == [1, 3, 3, 1]
    assert band["y"] == [4, 6, 8, 6]
    assert band["fillcolor"].startswith(line["line"]["color"])
    assert not band["showlegend"]


def test_bars_have_whiskers_and_categories() -> None:
    ((bar,), layout) = drawn("bar", Series("b", ["1", "2024-01-01"], [3, 4], [2, None], [5, 4.5]))
    assert bar["error_y"]["array"] == [2, 0.5]
    assert bar["error_y"]["arrayminus"] == [1, None]
    assert layout["xaxis"]["type"] == "category"
    assert "shapes" not in layout


def test_spans_lie_in_their_rows_from_the_top() -> None:
    made = figure(Chart("t", "time, s", "", SPANS, "spans"))
    encode, prefill = made["data"]
    assert (encode["y"], encode["base"], encode["x"]) == (
        ["E0", "E1", "E0"],
        [0, 1, 2],
        [0.5, 2, 0.5],
    )
    assert (prefill["base"], prefill["x"], prefill["customdata"]) == ([0.25], [1.0], [1.25])
    axis = made["layout"]["yaxis"]
    assert axis["categoryarray"] == ["E0", "E1", "P0"]
    assert axis["autorange"] == "reversed"
    assert made["layout"]["barmode"] == "overlay"
    assert made["layout"]["showlegend"]


def test_rows_that_are_named_like_their_spans_need_no_legend() -> None:
    named = [Spans("encode", ["encode"], [0], [1]), Spans("prefill", ["prefill"], [0], [1])]
    assert not figure(Chart("t", "x", "", named, "spans"))["layout"]["showlegend"]


def test_more_rows_and_longer_legends_make_a_chart_higher() -> None:
    def spans(num: int) -> Chart:
        rows = [f"engine {number}" for number in range(num)]
        return Chart("t", "x", "", [Spans("all", rows, [0.0] * num, [1.0] * num)], "spans")

    assert height_px(spans(1)) < height_px(spans(3)) < height_px(spans(9))
    few = Chart("t", "x", "y", [ONE, TWO])
    many = Chart("t", "x", "y", [Series(f"a long name {n}", [1], [1]) for n in range(9)])
    assert height_px(few) < height_px(many)


def test_limits_are_lines_with_names() -> None:
    limits = [Limit(2.5, "S1", "x"), Limit(3, "wanted"), Limit(4)]
    _, layout = drawn("line", ONE, limits=limits, limit=5)
    across = [(each.get("x0"), each.get("y0")) for each in layout["shapes"]]
    assert across == [(2.5, 0), (0, 3), (0, 4), (0, 5)]
    assert [each["text"] for each in layout["annotations"]] == ["S1", "wanted"]


def test_a_logarithmic_axis_has_its_limits_where_they_belong() -> None:
    limits = [Limit(100, "S1", "x")]
    times = Series("t", [0.02, 3.0], [50, 100])
    _, layout = drawn("step", times, limits=limits, x_log=True, x_range=(0.01, 1000))
    assert layout["xaxis"]["type"] == "log"
    assert layout["xaxis"]["range"] == pytest.approx([-2, 3])
    assert layout["annotations"][0]["x"] == pytest.approx(2)
    assert layout["shapes"][0]["x0"] == 100
    ticks = layout["xaxis"]["tickvals"]
    assert [round(math.log10(tick), 9) for tick in ticks] == [-2, -1, 0, 1, 2, 3]
    _, short = drawn("step", times, x_log=True)
    assert short["xaxis"]["ticktext"][:4] == ["0.01", "0.02", "0.05", "0.1"]


def test_aligned_charts_have_one_margin() -> None:
    for made in (drawn("line", ONE, aligned=True), drawn("area", ONE, aligned=True)):
        assert made[1]["margin"]["l"] == 64
        assert not made[1]["yaxis"]["automargin"]
    rows = [Spans("all", ["prefill, remote"], [0], [1])]
    layout = figure(Chart("t", "x", "", rows, "spans", aligned=True))["layout"]
    assert layout["yaxis"]["ticktext"] == ["prefill,<br>remote"]


def test_a_chart_of_nothing_says_so() -> None:
    for chart in (
        Chart("t", "x", "y", []),
        Chart("t", "x", "y", [Series("one", [1], [None])]),
        Chart("t", "x", "y", [Spans("one", [], [], [])], "spans"),
    ):
        (note,) = figure(chart)["layout"]["annotations"]
        assert note["text"] == "nothing was recorded"


def test_texts_are_escaped_for_plotly() -> None:
    evil = "<b>&amp;</b>"
    text = "&lt;b&gt;&amp;amp;&lt;/b&gt;"
    chart = Chart(evil, evil, evil, [Series(evil, [evil], [1])], limits=[Limit(1, evil)])
    made = figure(chart)
    assert made["data"][0]["name"] == text
    assert made["data"][0]["x"] == [text]
    assert made["layout"]["annotations"][0]["text"] == text
    assert {made["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis")} == {text}
    spans = figure(Chart(evil, "x", "", [Spans(evil, [evil], [0], [1])], "spans", aligned=True))
    assert spans["data"][0]["y"] == [text] == spans["layout"]["yaxis"]["categoryarray"]


def test_a_summary_tells_extents_and_limits() -> None:
    series = [Series("a", [1, 2, 3], [5, 1, 3]), TWO, Series("flat", ["x", "y"], [2, 2])]
    series += [Series(f"more {number}", [], []) for number in range(7)]
    told = summary(Chart("Goodput", "rate", "per s", series, limits=[Limit(90, "90 %")]))
    assert told.startswith("Lines: Goodput; per s by rate. ")
    assert "a: 5 at 1 to 3 at 3, lowest 1 at 2, highest 5 at 1." in told
    assert "two: 4 at 1." in told
    assert "flat: 2 at x to 2 at y, all alike." in told
    assert "more 0: nothing." in told
    assert "And 2 more." in told
    assert told.endswith("Marked: 90 % 90.")
    told = summary(Chart("Overlap", "time, s", "", SPANS, "spans"))
    assert told == (
        "Intervals: Overlap; time, s. encode: 3 intervals, 3 in all. prefill: 1 interval, 1 in all."
    )


def test_sizes_must_fit() -> None:
    with pytest.raises(ValueError, match="1 x and 2 y of 's'"):
        Series("s", [1], [1, 2])
    with pytest.raises(ValueError, match="'s' has one of low and high"):
        Series("s", [1], [1], low=[1])
    with pytest.raises(ValueError, match="1 x and 2 edges of 's'"):
        Series("s", [1], [1], [1], [1, 2])
    with pytest.raises(ValueError, match="1 rows, 2 begins and 1 ends of 's'"):
        Spans("s", ["a"], [1, 2], [1])
    with pytest.raises(ValueError, match="'s' ends before it begins"):
        Spans("s", ["a"], [2], [1])
    with pytest.raises(ValueError, match="kind spans is made of Spans"):
        Chart("t", "x", "y", [ONE], "spans")
    with pytest.raises(ValueError, match="kind line is made of Series"):
        Chart("t", "x", "y", SPANS)


def test_parallel_axes_have_a_line_for_each_trial_the_best_one_last() -> None:
    axes = [
        Axis("share", [0.5, 1.0, 0.5]),
        Axis("rule", ["gap", None, "slack"]),
        Axis("goodput", [2.0, 1.0, 3.0]),
    ]
    made = figure(Chart("t", "", "", axes, "parallel"))
    assert [line["name"] for line in made["data"]] == ["1", "2", "3"]
    assert made["data"][-1]["line"]["width"] > made["data"][0]["line"]["width"]
    places = {line["name"]: line["x"] for line in made["data"]}
    assert places["1"][1] > places["2"][1], "no rule comes last"
    assert all(0 <= x <= 1 for line in made["data"] for x in line["x"])
    notes = [note["text"] for note in made["layout"]["annotations"] if note["y"] == 1]
    assert notes == ["<b>rule</b>", "gap", "slack", "–"]
    assert not made["layout"]["showlegend"]
    assert "rule: gap, –, slack" in summary(Chart("t", "", "", axes, "parallel"))


def test_an_axis_of_many_numbers_is_a_scale() -> None:
    values = [number / 20 for number in range(1, 21)]
    axes = [Axis("share", values), Axis("goodput", values)]
    made = figure(Chart("t", "", "", axes, "parallel"))
    assert [line["x"][0] for line in made["data"]] == pytest.approx(
        [number / 19 for number in range(20)]
    )
    texts = [note["text"] for note in made["layout"]["annotations"]]
    assert texts == ["<b>share</b>", "0.05", "1", "<b>goodput</b>", "0.05", "1"]


def test_parallel_axes_without_trials_say_so() -> None:
    made = figure(Chart("t", "", "", [Axis("share", []), Axis("goodput", [])], "parallel"))
    assert made["layout"]["annotations"][0]["text"] == "nothing was recorded"
