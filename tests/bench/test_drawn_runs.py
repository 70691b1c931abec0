"""What a report shows of runs, alone and beside each other."""

from collections.abc import Sequence
from typing import Any

import pytest

from easerve.bench.drawings.labels import labels, unit_of
from easerve.bench.drawings.results import Run, of_bench, of_goodput, of_simulate
from easerve.bench.drawings.runs import sections
from easerve.bench.drawings.times import MAX_POINTS
from easerve.bench.report import Chart, Section, Table, html
from easerve.goodput import Slo
from tests.bench.drawn_results import FAST, SLOW, bench, goodput, simulated


def runs_of(*results: dict[str, Any]) -> list[Run]:
    return [of_bench(result) for result in results]


def charts(found: Sequence[Section], word: str = "") -> list[Chart]:
    parts = [part for section in found for part in section.parts]
    return [part for part in parts if isinstance(part, Chart) and word in part.title]


def table(found: Sequence[Section], word: str) -> Table:
    parts = [part for section in found for part in section.parts]
    return next(part for part in parts if isinstance(part, Table) and word in part.title)


SEVERAL = runs_of(bench(FAST, 4.0), bench(FAST, 12.0), bench(SLOW, 4.0), bench(SLOW, 12.0))


def test_one_run_has_a_row_per_tier_and_per_metric() -> None:
    result = bench(SLOW, 8.0)
    found = sections(runs_of(result))
    assert [section.title for section in found] == [
        "Goodput",
        "Times",
        "Over time",
        "Requests",
        "What was run",
    ]
    tiers = table(found, "Goodput: requests")
    assert [row[0] for row in tiers.rows] == ["S1", "S2", "S3", "S4", "S5"]
    assert tiers.rows[2][2] == round(100 * result["attainment"]["S3"], 1)
    metrics = [row[0] for row in table(found, "Times").rows]
    assert [str(name).split(",")[0] for name in metrics] == ["TTFT", "TPOT", "ITL", "Latency"]
    assert {chart.kind for chart in charts(found, "by tier")} == {"bar"}
    (causes,) = table(found, "Causes").rows
    assert causes[1] == "HTTP 500: engine died while it was <busy> [/red] & more"
    facts = [tuple(row) for row in table(found, "What was run").rows]
    assert {("arrivals", "8/s"), ("seed", "0"), ("model", "tiny-llava")} <= set(facts)


def test_attainment_is_drawn_with_the_share_that_counts() -> None:
    for found in (sections(SEVERAL[:1]), sections(SEVERAL)):
        for chart in charts(found, "Attainment"):
            assert [limit.value for limit in chart.limits] == [90]
            assert chart.y_range == (0, 103)


def test_systems_are_compared_tier_by_tier_against_the_rate() -> None:
    found = sections(SEVERAL)
    drawn = charts(found, "Goodput")
    assert len(drawn) == 5
    for chart in drawn:
        easerve, vllm, every = chart.lines
        assert (easerve.name, vllm.name) == ("easerve", "vllm")
        assert easerve.x == vllm.x == [4, 12]
        assert every.muted
        assert every.y == every.x == [0, 12]
    assert {chart.title for chart in charts(found, "by offered rate")} >= {
        "TTFT P50 by offered rate",
        "TTFT P99 by offered rate",
        "TPOT P99 by offered rate",
    }


def test_one_system_has_all_tiers_in_one_chart() -> None:
    (chart,) = charts(sections(SEVERAL[:2]), "Goodput by offered rate")
    assert [line.name for line in chart.lines] == ["S1", "S2", "S3", "S4", "S5", "every request"]


def test_a_system_has_one_colour_in_every_chart() -> None:
    found = sections(SEVERAL, [of_goodput(goodput(SLOW))[0], of_goodput(goodput(FAST))[0]])
    seen: dict[str, set[int | None]] = {}
    for chart in charts(found):
        for line in chart.lines:
            seen.setdefault(line.name, set()).add(line.colour)
    assert seen["easerve"] == {0}
    assert seen["vllm"] == {1}


def test_distributions_say_what_share_of_all_requests_came_in_time() -> None:
    result = bench(SLOW, 12.0)
    (chart,) = charts(sections(runs_of(result)), "TTFT: share")
    (line,) = chart.lines
    times = [t for t, how in zip(*columns(result), strict=True) if how == "completed"]
    assert line.y[-1] == pytest.approx(100 * len(times) / 300)
    assert max(times) == pytest.approx(line.x[-1])
    limits = {limit.name: limit.value for limit in chart.limits}
    assert limits["S1"] == result["slo"]["S1"]["ttft_s"]
    assert all(limit.axis == "x" for limit in chart.limits)
    assert chart.x_log
    at_limit = max(y for x, y in zip(line.x, line.y, strict=True) if x <= limits["S4"])  # type: ignore[operator,type-var]
    met = sum(time <= limits["S4"] for time in times)
    assert at_limit == pytest.approx(100 * met / 300, abs=0.5)


def columns(result: dict[str, Any]) -> tuple[list[float], list[str]]:
    return result["requests"]["ttft_s"], result["requests"]["outcome"]


def test_loads_have_distributions_of_their_own_where_systems_are_compared() -> None:
    found = sections(SEVERAL)
    for load in ("4/s", "12/s"):
        (chart,) = charts(found, f"TTFT, {load}")
        assert [line.name for line in chart.lines] == ["easerve", "vllm"]
    (alone,) = charts(sections(SEVERAL[:2]), "TTFT: share")
    assert [line.name for line in alone.lines] == ["easerve, 4/s", "easerve, 12/s"]


def test_large_runs_are_thinned_and_keep_their_ends() -> None:
    result = bench(FAST, 8.0, num_requests=3000, timeline=None)
    found = sections(runs_of(result))
    (chart,) = charts(found, "TTFT: share")
    (line,) = chart.lines
    times = sorted(t for t, how in zip(*columns(result), strict=True) if how == "completed")
    scale = line.x[-1] / times[-1]  # type: ignore[operator]
    assert len(line.x) <= MAX_POINTS
    assert line.x[0] == pytest.approx(scale * times[0])
    assert all(len(each.x) <= 1001 for chart in charts(found) for each in chart.lines)
    (scatter,) = charts(found, "TTFT by when")
    assert "th request" in scatter.title


def test_charts_over_time_share_their_axis() -> None:
    (over_time,) = [each for each in sections(SEVERAL[:1]) if each.title == "Over time"]
    titles = [part.title for part in over_time.parts]
    assert titles[:2] == ["TTFT by when a request was to be sent", "Requests in flight"]
    assert titles[2:] == ["Queue lengths", "Encode batch size", "Remote share", "Open requests"]
    drawn = charts([over_time])
    assert len({chart.x_range for chart in drawn}) == 1
    assert all(chart.aligned for chart in drawn)


def test_requests_in_flight_are_counted_from_when_they_were_sent() -> None:
    requests = {
        "scheduled_s": [0.0, 0.0, 1.0],
        "sent_s": [0.0, 1.0, 1.0],
        "ttft_s": [0.5, 1.5, None],
        "tpot_s": [None, None, None],
        "latency_s": [1.5, 3.0, 0.5],
        "outcome": ["completed", "completed", "failed"],
        "slot_wait_s": [0.0, 1.0, 0.0],
    }
    found = sections(runs_of(bench(requests=requests, timeline=None)))
    (chart,) = charts(found, "in flight")
    (line,) = chart.lines
    points = list(zip(line.x, line.y, strict=True))
    assert points == [(0, 1), (1, 2), (1, 3), (1.5, 2), (1.5, 1), (3, 0)]
    (scatter,) = charts(found, "TTFT by when")
    assert [(each.name, list(each.x)) for each in scatter.lines] == [
        ("completed", [0, 0]),
        ("not completed", [1]),
    ]


def test_a_run_of_nothing_can_be_drawn() -> None:
    empty: dict[str, list[Any]] = {key: [] for key in bench()["requests"]}
    nothing = {"mean": None, "p50": None, "p90": None, "p99": None}
    spreads: dict[str, Any] = dict.fromkeys(
        ("ttft_s", "tpot_s", "itl_s", "latency_s", "slot_wait_s"), nothing
    )
    found = sections(runs_of(bench(requests=empty, timeline=None, causes={}, **spreads)))
    assert "Over time" not in [section.title for section in found]
    assert html("t", found)


def test_invalid_runs_are_said_first_and_are_in_no_line() -> None:
    bad = bench(SLOW, 20.0, valid=False, invalid_because=["the client was late"])
    found = sections([*SEVERAL, of_bench(bad)])
    assert found[0].alert == "INVALID: vllm, 20/s: the client was late"
    assert all(20 not in line.x for chart in charts(found, "Goodput") for line in chart.lines)
    assert "vllm, 20/s, INVALID" in [row[0] for row in table(found, "Goodput: ").rows]
    assert not sections(SEVERAL)[0].alert


def test_comparisons_that_are_none_are_said() -> None:
    other = bench(SLOW, 4.0, model="another", slo={"S1": {"ttft_s": 9.0}})
    alert = sections([SEVERAL[0], of_bench(other)])[0].alert
    assert "Not the same model: easerve tiny-llava; vllm another" in alert
    assert "Not the same limits of S1" in alert
    assert "workload" not in alert


def test_one_system_under_two_workloads_is_drawn_as_two() -> None:
    one, four = bench(FAST, 4.0), bench(FAST, 4.0)
    one["workload"] = {**one["workload"], "num_items": 1}
    found = sections(runs_of(one, four))
    names = [row[0] for row in table(found, "Goodput: ").rows]
    assert names == ["easerve (num_items 1)", "easerve (num_items 4)"]
    assert not found[0].alert


def test_small_samples_are_said() -> None:
    found = sections(runs_of(bench(num_requests=50)))
    assert any("Too few requests to trust, easerve: ttft_s.p99" in each.text for each in found)


def test_seeds_are_one_row_and_a_band() -> None:
    _, probes = of_goodput(goodput(FAST))
    found = sections(probes)
    assert len(table(found, "Goodput: ").rows) == 4
    (chart,) = charts(found, "Goodput by offered rate")
    line = chart.lines[0]
    assert line.low is not None
    assert all(low <= y for low, y in zip(line.low, line.y, strict=True))  # type: ignore[operator]
    assert "are means over the seeds" in found[0].text


def test_highest_rates_are_told_with_their_brackets_and_ratios() -> None:
    fast, slow = of_goodput(goodput(FAST)), of_goodput(goodput(SLOW))
    found = sections([*fast[1], *slow[1]], [fast[0], slow[0]])
    assert found[0].title == "Highest rates"
    rates = table(found, "Highest rate at which 90 %")
    assert [row[0] for row in rates.rows] == ["easerve", "vllm", "easerve / vllm"]
    assert list(rates.rows[0])[1:3] == ["< 4", "4 (< 8)"]
    assert "times" in str(rates.rows[2][3])
    (chart,) = charts(found, "Highest")
    easerve = chart.lines[0]
    assert (easerve.y[1], easerve.low, easerve.high) == (
        4,
        [None, 4, 8, 8, 8],
        [4, 8, 16, 16, 16],
    )
    assert "8.08 at 8" in table(found, "Most goodput").rows[0]


def test_a_search_that_ended_early_says_so_even_without_a_run() -> None:
    result = goodput(FAST) | {"valid": False, "invalid_because": ["stopped"], "probes": []}
    result |= {"notes": ["runs are short"]}
    capacity, probes = of_goodput(result)
    found = sections(probes, [capacity])
    assert found[0].alert == "INCOMPLETE: the search of easerve: stopped"
    assert "easerve: runs are short." in found[0].text


def test_simulated_and_measured_are_told_apart() -> None:
    found = sections([*SEVERAL, *of_simulate(simulated(FAST, (4, 12)))])
    names = [row[0] for row in table(found, "Goodput: ").rows]
    assert "easerve (measured), 4/s" in names
    assert "easerve (simulated), 4/s" in names
    chart = charts(found, "Goodput, tier S3")[0]
    measured, _, simulation, _ = chart.lines
    assert (measured.name, simulation.name) == ("easerve (measured)", "easerve (simulated)")
    assert (measured.dashed, simulation.dashed) == (False, True)
    assert measured.colour == simulation.colour == 0
    assert "simulated, all others measured" in found[0].text


def test_what_is_only_simulated_says_so() -> None:
    found = sections(of_simulate(simulated(FAST, (4, 12))))
    assert "nothing was measured" in found[0].text
    assert not any(line.dashed for chart in charts(found) for line in chart.lines)
    assert "simulated" not in sections(SEVERAL)[0].text


def test_limits_with_long_names_are_told_by_their_value() -> None:
    slo = {"ttft=300ms,tpot=20ms": Slo(0.3, 0.02)}
    (chart,) = charts(sections(runs_of(bench(FAST, 4.0, slos=slo))), "TTFT: share")
    assert [(limit.name, limit.value) for limit in chart.limits] == [("300 ms", 300)]


def test_many_invalid_runs_are_counted() -> None:
    bad = [of_bench(bench(seed=seed, num_requests=20, valid=False)) for seed in range(8)]
    lines = sections(bad)[0].alert.split("\n")
    assert len(lines) == 6
    assert lines[-1] == "INVALID: 3 more runs"


def test_names_are_short_and_none_comes_twice() -> None:
    one = of_bench(bench())
    assert labels([one]) == ["easerve"]
    assert labels([one, of_bench(bench(SLOW))]) == ["easerve", "vllm"]
    assert labels([one, of_bench(bench(seed=1))]) == ["easerve, seed 0", "easerve, seed 1"]
    assert labels([one, one]) == ["easerve, seed 0", "easerve, seed 0 #2"]
    assert labels(SEVERAL)[1] == "easerve, 12/s"


def test_units_suit_the_numbers() -> None:
    assert unit_of([0.5, None]).name == "ms"
    assert unit_of([0.5, 2]).name == "s"
    assert unit_of([]).of(None) is None
    assert unit_of([0.1]).of(0.25) == 250


def test_the_same_runs_make_the_same_page() -> None:
    assert html("t", sections(SEVERAL)) == html("t", sections(SEVERAL))
