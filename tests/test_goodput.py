import json
import math
import random
from statistics import fmean
from typing import Any

import pytest

from easerve.goodput import (
    OUTCOMES,
    TIERS,
    Outcome,
    Record,
    Slo,
    Spread,
    is_small_sample,
    parse_slo,
    percentile,
    spread,
    summarise,
    tier,
)


def record(
    ttft_s: float | None = 1.0,
    tpot_s: float = 0.25,
    num_output_tokens: int = 5,
    outcome: Outcome = "completed",
    lateness_s: float = 0.0,
) -> Record:
    """Sent at 10 s; of binary fractions, the times that come out are exactly those put in."""
    first_token_s = None if ttft_s is None else 10 + ttft_s
    end_s = (first_token_s or 10) + tpot_s * max(0, num_output_tokens - 1)
    return Record(10 - lateness_s, 10, first_token_s, end_s, num_output_tokens, outcome)


def test_times_are_vllms_and_count_from_when_the_request_was_sent() -> None:
    one = Record(1.0, 1.5, 3.5, 5.5, 5, "completed")
    assert one.lateness_s == 0.5
    assert one.ttft_s == 2.0
    assert one.latency_s == 4.0
    assert one.tpot_s == (4.0 - 2.0) / (5 - 1)


def test_what_did_not_come_has_no_time() -> None:
    one = Record(0, 0, None, None, 0, "timed_out")
    assert one.ttft_s is one.latency_s is one.tpot_s is None
    assert Record(0, 0, 1, None, 7, "failed").tpot_s is None
    assert Record(0, 0, None, 1, 7, "completed").tpot_s is None


@pytest.mark.parametrize(("num_tokens", "tpot_s"), [(0, None), (1, None), (2, 3.0)])
def test_fewer_than_two_tokens_have_no_tpot(num_tokens: int, tpot_s: float | None) -> None:
    assert Record(0, 0, 1, 4, num_tokens, "completed").tpot_s == tpot_s


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ((0, 0, 1, 2, 3, "lost"), "completed, failed, .* not 'lost'"),
        ((0, 0, 1, None, 3, "completed"), "a completed request has an end"),
        ((0, 0, 1, 2, -1, "completed"), "-1 output tokens"),
        ((0, 0, 2, 1, 3, "completed"), "in this order"),
        ((0, 3, 2, 4, 3, "completed"), "in this order"),
        ((0, 3, None, 2, 0, "failed"), "in this order"),
        ((0, 0, math.nan, 2, 3, "completed"), "in this order"),
        ((math.nan, 0, 1, 2, 3, "completed"), "in this order"),
        ((0, 0, 1, math.inf, 3, "completed"), "in this order"),
        ((0, 0, 1, 2, 3, "completed", -1.0), "a wait of -1.0 seconds"),
        ((0, 0, 1, 2, 3, "completed", math.nan), "a wait of nan seconds"),
    ],
)
def test_a_record_that_cannot_be_is_refused(values: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Record(*values)


def test_an_objective_is_met_up_to_its_limits() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.25)
    assert slo.met(record(1.0, 0.25))
    assert not slo.met(record(1.125, 0.25))
    assert not slo.met(record(1.0, 0.375))


def test_either_limit_may_be_missing() -> None:
    slow_start, slow_pace = record(8.0, 0.25), record(1.0, 8.0)
    assert Slo(ttft_s=1.0).met(slow_pace)
    assert not Slo(ttft_s=1.0).met(slow_start)
    assert Slo(tpot_s=0.25).met(slow_start)
    assert not Slo(tpot_s=0.25).met(slow_pace)
    assert Slo().met(record(100.0, 100.0))


def test_a_limit_on_the_latency() -> None:
    slo = Slo(latency_s=2.0)
    assert slo.met(record(1.0, 0.25))
    assert not slo.met(record(1.0, 0.375))
    assert not Slo(latency_s=2.0).met(Record(0, 0, None, 2.5, 1, "completed"))


def test_a_wait_for_a_place_is_in_the_times_but_is_not_lateness() -> None:
    one = Record(1.0, 3.5, 4.5, 6.5, 5, "completed", slot_wait_s=2.0)
    assert one.lateness_s == 0.5
    assert one.ttft_s == 3.0
    assert one.latency_s == 5.0
    assert one.tpot_s == 0.5


def test_a_single_token_is_judged_by_its_ttft_alone() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.001)
    assert slo.met(record(1.0, num_output_tokens=1))
    assert not slo.met(record(1.125, num_output_tokens=1))
    assert Slo(tpot_s=0.001).met(record(100.0, num_output_tokens=1))


def test_a_time_that_was_not_seen_meets_no_limit() -> None:
    unseen = record(None)
    assert not Slo(ttft_s=1000.0).met(unseen)
    assert not Slo(tpot_s=1000.0).met(unseen)
    assert Slo().met(unseen)


@pytest.mark.parametrize("outcome", ["failed", "rejected", "timed_out", "cancelled"])
def test_only_a_completed_request_meets_an_objective(outcome: Outcome) -> None:
    assert not Slo(ttft_s=1000.0, tpot_s=1000.0).met(record(outcome=outcome))
    assert not Slo().met(record(outcome=outcome))


@pytest.mark.parametrize("limit_s", [0, -1, math.inf, math.nan])
def test_a_limit_that_cannot_be_is_refused(limit_s: float) -> None:
    with pytest.raises(ValueError, match="ttft_s must be more than 0"):
        Slo(ttft_s=limit_s)
    with pytest.raises(ValueError, match="tpot_s must be more than 0"):
        Slo(tpot_s=limit_s)
    with pytest.raises(ValueError, match="latency_s must be more than 0"):
        Slo(latency_s=limit_s)


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=2s,tpot=80ms", Slo(2.0, 0.08)),
        ("tpot=0.08s, ttft=2000ms", Slo(2.0, 0.08)),
        (" ttft=1.5s ", Slo(1.5, None)),
        ("tpot=80ms", Slo(None, 0.08)),
        ("ttft:2000 tpot:80", Slo(2.0, 0.08)),
        ("tpot:62.5", Slo(None, 0.0625)),
        ("ttft=2s tpot:80", Slo(2.0, 0.08)),
        ("ttft=2s,tpot=80ms,latency=10s", Slo(2.0, 0.08, 10.0)),
        ("ttft:2000 tpot:80 e2el:10000", Slo(2.0, 0.08, 10.0)),
        ("time_to_first_token:2000 inter_token_latency:80 request_latency:9500", Slo(2, 0.08, 9.5)),
        ("e2el=3s", Slo(latency_s=3.0)),
    ],
)
def test_an_objective_can_be_written_as_in_three_tools(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "'' is not like"),
        ("ttft=2s,", "'' is not like"),
        ("ttft=2s,tpot=80", "'tpot=80' is not like"),
        ("ttft:2s", "'ttft:2s' is not like"),
        ("ttft=2s,itl=3s", "'itl=3s' is not like"),
        ("e2el=2s,request_latency:1", "'request_latency:1' says latency a second time"),
        ("ttft=2m", "'ttft=2m' is not like"),
        ("ttft=-2s", "'ttft=-2s' is not like"),
        ("ttft=s", "'ttft=s' is not like"),
        ("ttft=nans", "'ttft=nans' is not like"),
        ("S3", "'S3' is not like"),
        ("ttft=1.2.3s", "'ttft=1.2.3s' has no number"),
        ("tpot:.", "'tpot:.' has no number"),
        ("ttft=2s,tpot=0ms", "'tpot=0ms' must be more than 0"),
        (f"ttft:{'9' * 400}", "must be more than 0 and finite"),
        ("ttft=2s,ttft=3s", "'ttft=3s' says ttft a second time"),
    ],
)
def test_an_error_in_an_objective_names_the_part(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        parse_slo(text)


def test_tiers_are_multiples_of_what_an_idle_system_does() -> None:
    assert {name: tuple(multiples) for name, multiples in TIERS.items()} == {
        "S1": (3, 1.25),
        "S2": (6, 1.5),
        "S3": (12, 1.85),
        "S4": (20, 2.5),
        "S5": (40, 4),
    }
    assert tier("S3", 1.0, 0.052) == Slo(12.0, 1.85 * 0.052)
    assert tier("S1", 0.5, 0.04) == Slo(1.5, 0.05)


def test_a_looser_tier_is_met_by_all_that_meets_a_stricter_one() -> None:
    slos = [tier(name, 1.0, 0.05) for name in TIERS]
    rng = random.Random(1)
    for _ in range(200):
        one = record(rng.uniform(0, 50), rng.uniform(0, 0.25))
        met = [slo.met(one) for slo in slos]
        assert met == sorted(met)


def test_a_tier_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="S1, S2, S3, S4, S5, not 's3'"):
        tier("s3", 1.0, 0.05)
    with pytest.raises(ValueError, match="must be more than 0"):
        tier("S3", 0.0, 0.05)


def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed() -> None:
    rng = random.Random(2)
    for size in [*range(1, 12), 99, 100, 101, 250]:
        values = [rng.choice((rng.random(), 0.5)) for _ in range(size)]
        for percent in (1, 29, 50, 90, 99, 100):
            enough = [v for v in values if sum(w <= v for w in values) * 100 >= percent * size]
            assert percentile(values, percent) == min(enough)


def test_percentiles_of_well_known_lists() -> None:
    assert percentile([15, 20, 35, 40, 50], 30) == 20
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 102), 99) == 100
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


@pytest.mark.parametrize("percent", [0, -1, 101])
def test_a_percentile_that_cannot_be_is_refused(percent: int) -> None:
    with pytest.raises(ValueError, match="1 to 100"):
        percentile([1.0], percent)


def test_a_percentile_needs_enough_values() -> None:
    assert is_small_sample(99, 99)
    assert not is_small_sample(100, 99)
    assert is_small_sample(1, 50)
    assert not is_small_sample(2, 50)


def test_a_spread_has_the_mean_and_three_percentiles() -> None:
    assert spread([4.0, 1.0, 2.0, 1.0]) == Spread(mean=2.0, p50=1.0, p90=4.0, p99=4.0)
    assert spread([1, 2, 3, 4, 100]).p99 == 100
    assert spread([]) == Spread(None, None, None, None)
    values = [random.Random(3).random() for _ in range(137)]
    assert spread(values) == Spread(fmean(values), *(percentile(values, p) for p in (50, 90, 99)))


RUN = [
    record(1.0, 0.25),
    record(3.0, 0.5, lateness_s=0.125),
    record(2.0, num_output_tokens=1),
    record(9.0, 0.25),
    record(outcome="failed"),
    record(outcome="rejected", lateness_s=0.5),
    record(outcome="rejected"),
    record(outcome="timed_out"),
    record(outcome="cancelled"),
    record(outcome="cancelled"),
]
SLOS = {"strict": Slo(2.0, 0.25), "loose": Slo(100.0, None)}


def test_each_request_is_counted_under_its_outcome() -> None:
    summary = summarise(RUN, 5.0, SLOS)
    assert summary.num_requests == 10
    assert summary.completed == 4
    assert summary.failed == 1
    assert summary.rejected == 2
    assert summary.timed_out == 1
    assert summary.cancelled == 2
    assert sum(getattr(summary, outcome) for outcome in OUTCOMES) == 10


def test_goodput_is_over_the_time_and_attainment_over_everything_sent() -> None:
    summary = summarise(RUN, 5.0, SLOS)
    assert summary.throughput_per_s == 4 / 5
    assert summary.goodput_per_s == {"strict": 2 / 5, "loose": 4 / 5}
    assert summary.attainment == {"strict": 2 / 10, "loose": 4 / 10}


def test_times_are_of_completed_requests_and_lateness_is_of_all() -> None:
    summary = summarise(RUN, 5.0, SLOS)
    assert summary.ttft_s == Spread(mean=3.75, p50=2.0, p90=9.0, p99=9.0)
    assert summary.tpot_s == Spread(mean=1 / 3, p50=0.25, p90=0.5, p99=0.5)
    assert summary.latency_s == Spread(mean=4.75, p50=2.0, p90=10.0, p99=10.0)
    assert summary.output_tokens_per_s == 16 / 5
    assert summary.lateness_p99_s == 0.5


def test_a_small_sample_is_named() -> None:
    assert summarise(RUN, 5.0, {}).small_sample == (
        *("ttft_s.p90", "ttft_s.p99", "tpot_s.p90", "tpot_s.p99", "latency_s.p90", "latency_s.p99"),
        "lateness_p99_s",
    )
    ones = [record(num_output_tokens=1)] * 99
    few = summarise([*ones, record()], 5.0, {})
    assert few.small_sample == ("tpot_s.p50", "tpot_s.p90", "tpot_s.p99")
    assert summarise([record()] * 100, 5.0, {}).small_sample == ()


def test_a_summary_goes_into_json_with_the_keys_that_scripts_rely_on() -> None:
    row = summarise(RUN, 5.0, SLOS).as_dict()
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert set(row) == {
        *("num_requests", "completed", "failed", "rejected", "timed_out", "cancelled"),
        *("duration_s", "throughput_per_s", "output_tokens_per_s", "goodput_per_s", "attainment"),
        *("ttft_s", "tpot_s", "latency_s", "lateness_p99_s", "small_sample"),
    }
    assert row["ttft_s"] == {"mean": 3.75, "p50": 2.0, "p90": 9.0, "p99": 9.0}
    assert row["attainment"] == {"strict": 0.2, "loose": 0.4}


@pytest.mark.parametrize("duration_s", [0.0, 10.0])
def test_a_run_without_requests_has_no_values(duration_s: float) -> None:
    summary = summarise([], duration_s, SLOS)
    rate = 0.0 if duration_s else None
    assert summary.num_requests == 0
    assert summary.throughput_per_s == rate
    assert summary.goodput_per_s == {"strict": rate, "loose": rate}
    assert summary.attainment == {"strict": None, "loose": None}
    assert summary.ttft_s == summary.tpot_s == Spread()
    assert summary.lateness_p99_s is None
    assert summary.small_sample == ()
    json.dumps(summary.as_dict(), allow_nan=False)


def test_a_run_in_which_nothing_completed_has_no_times() -> None:
    summary = summarise([Record(0, 1, None, None, 0, "timed_out")], 2.0, SLOS)
    assert summary.ttft_s == summary.tpot_s == Spread()
    assert summary.attainment == {"strict": 0.0, "loose": 0.0}
    assert summary.lateness_p99_s == 1


@pytest.mark.parametrize("duration_s", [-1, math.inf, math.nan])
def test_a_duration_that_cannot_be_is_refused(duration_s: float) -> None:
    with pytest.raises(ValueError, match="seconds cannot be"):
        summarise([], duration_s, {})
