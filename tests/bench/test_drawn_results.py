"""Results in JSON, read into runs."""

import json
from typing import Any

import pytest

from easerve.bench.drawings.results import load_of, of_bench, of_goodput, of_simulate
from easerve.bench.drawings.seeds import has_seeds, merged
from easerve.bench.drawings.written import ResultError
from easerve.goodput import Slo
from tests.bench.drawn_results import FAST, SLOW, bench, goodput, simulated


def as_written(result: dict[str, Any]) -> dict[str, Any]:
    found = json.loads(json.dumps(result, allow_nan=False))
    assert isinstance(found, dict)
    return found


def test_a_run_of_bench() -> None:
    result = as_written(bench(SLOW, 8.0))
    run = of_bench(result)
    assert (run.system, run.source, run.rate_per_s, run.load) == ("vllm", "measured", 8, "8/s")
    assert run.attainment == result["attainment"]
    assert run.spreads["ttft_s"].p90 == result["ttft_s"]["p90"]
    assert run.slo["S1"].ttft_s == result["slo"]["S1"]["ttft_s"]
    assert run.counts["failed"] == result["failed"] > 0
    assert run.causes == result["causes"]
    assert run.requests is not None
    assert len(run.requests.outcome) == run.num_requests == 300
    assert not run.invalid_because


def test_figures_that_are_withheld() -> None:
    nothing = {"mean": None, "p50": None, "p90": None, "p99": None}
    over: dict[str, Any] = {
        "goodput_per_s": None,
        "attainment": {"S1": None},
        "ttft_s": nothing,
        "tpot_s": None,
    }
    run = of_bench(as_written(bench(valid=False, invalid_because=["late"], **over)))
    assert run.invalid_because == ["late"]
    assert run.goodput_per_s == {}
    assert run.attainment == {"S1": None}
    assert "tpot_s" not in run.spreads
    assert of_bench(bench(valid=False)).invalid_because == ["it does not say why"]


def test_one_simulation_systems_by_name_and_many_runs() -> None:
    result = as_written(simulated(FAST, (4, 8)))
    first, second = of_simulate(result)
    assert (first.source, first.load, second.load) == ("simulated", "4/s", "8/s")
    flat = {"kind": "simulate", **result["runs"][0]}
    (alone,) = of_simulate(flat)
    assert (alone.load, alone.attainment) == ("4/s", first.attainment)
    named = {"kind": "simulate", "systems": {"easerve": result["runs"][0]}}
    assert [run.rate_per_s for run in of_simulate(named)] == [4]
    trace = of_simulate({**flat, "rate_per_s": None})
    assert (trace[0].rate_per_s, trace[0].load) == (None, "trace")


def test_a_search_and_its_probes() -> None:
    result = as_written(goodput(FAST))
    capacity, probes = of_goodput(result)
    assert capacity.max_rate_per_s == result["max_rate_per_s"]
    assert capacity.bracket_per_s["S3"] == tuple(result["bracket_per_s"]["S3"])
    assert capacity.best["S3"][0] == result["best_goodput_per_s"]["S3"]
    assert len(probes) == len(result["probes"]) == 8
    assert {probe.rate_per_s for probe in probes} == {4, 8, 16, 24}
    assert all("probes" not in probe.facts for probe in probes)
    capacity, _ = of_goodput({**result, "valid": False, "bracket_per_s": {"S1": None}})
    assert capacity.bracket_per_s == {"S1": (None, None)}
    assert capacity.invalid_because == ["it does not say why"]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"attainment": "x"}, r"`\$.attainment`"),
        ({"ttft_s": {"mean": 1}}, r"required field `p50` - at `\$.ttft_s`"),
        ({"duration_s": None}, r"`\$.duration_s`"),
        ({"requests": {"scheduled_s": []}}, r"required field `sent_s` - at `\$.requests`"),
        (
            {"timeline": {"times_s": [0], "charts": [{"title": "Q"}]}},
            r"`\$.timeline.charts\[0\]`",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_key(over: dict[str, Any], words: str) -> None:
    with pytest.raises(ResultError, match=words):
        of_bench(bench() | over)


@pytest.mark.parametrize("key", ["system", "arrival", "valid", "completed", "goodput_per_s"])
def test_a_key_that_is_missing_is_named(key: str) -> None:
    result = bench()
    del result[key]
    with pytest.raises(ResultError, match=f"`{key}`"):
        of_bench(result)


def test_columns_and_timelines_must_be_of_one_length() -> None:
    result = bench()
    result["requests"]["ttft_s"].pop()
    with pytest.raises(ResultError, match="not of one length"):
        of_bench(result)
    chart = {"title": "Q", "unit": "n", "series": {"a": [1]}}
    with pytest.raises(ResultError, match="'a' of 'Q' has 1 values for 2 times"):
        of_bench(bench(timeline={"times_s": [0, 1], "charts": [chart]}))


def test_unknown_keys_do_not_matter() -> None:
    assert of_bench(bench(novelty={"a": 1})).system == "easerve"


@pytest.mark.parametrize(
    ("arrival", "words"),
    [
        ({"kind": "poisson", "rate_per_s": 5.0}, "5/s"),
        ({"kind": "gamma", "rate_per_s": 5.0, "cv": 2.0}, "5/s gamma, cv 2.0"),
        ({"kind": "closed", "concurrency": 8}, "8 clients"),
        ({"kind": "immediate", "rate_per_s": "inf"}, "immediate"),
        ({"kind": "poisson", "rate_per_s": 5.0, "max_in_flight": 9}, "5/s, max_in_flight 9"),
        ({"kind": "ramp", "rate_per_s": 1, "end_rate_per_s": 9}, "1/s ramp, end_rate 9"),
        ({}, "unknown arrivals"),
    ],
)
def test_loads_in_words(arrival: dict[str, Any], words: str) -> None:
    assert load_of(arrival) == words


def test_runs_that_differ_in_their_seed_are_one() -> None:
    runs = [of_bench(bench(FAST, 8.0, seed=seed)) for seed in (0, 1)]
    runs.append(of_bench(bench(FAST, 4.0)))
    found = merged(runs)
    assert [run.load for run in found] == ["4/s", "8/s"]
    both = found[1]
    assert both.num_requests == 600
    assert both.seed is None
    assert both.attainment["S1"] == pytest.approx(
        (runs[0].attainment["S1"] or 0) / 2 + (runs[1].attainment["S1"] or 0) / 2
    )
    p90 = [run.spreads["ttft_s"].p90 or 0 for run in runs[:2]]
    assert both.spreads["ttft_s"].p90 == pytest.approx(sum(p90) / 2)
    assert has_seeds(runs)
    assert not has_seeds(runs[1:])


def test_invalid_runs_are_not_merged_with_others() -> None:
    runs = [of_bench(bench(seed=0)), of_bench(bench(seed=1, valid=False))]
    assert len(merged(runs)) == 2


def test_slos_without_latency_can_be_read() -> None:
    """As results of older versions have them."""
    result = bench(slos={"S1": Slo(1.0, 0.1)}, num_requests=20)
    del result["slo"]["S1"]["latency_s"]
    assert of_bench(result).slo["S1"].latency_s is None
