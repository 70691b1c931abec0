"""The client in virtual time: every time exact, every request counted."""

import random
from typing import Any

import pytest

from easerve.goodput import Slo, Spread, percentile, spread, summarise

from .stand_in import DONE, chunk, event, usage
from .virtual import Content, Response, Step, sample_of, served

TTFT_S, TPOT_S, NUM = 0.2, 0.02, 11
ROLE = (0.0, chunk("", role="assistant"))
FIRST = (TTFT_S, chunk("a"))
END = (0.0, chunk("", "length"))
OTHERS = [(TPOT_S, chunk("a"))] * (NUM - 1)
LAST = [(0.0, usage(NUM)), (0.0, DONE)]
STEPS: dict[str, Step] = {
    "ok": [ROLE, FIRST, *OTHERS, END, *LAST],
    "slow": [ROLE, (10 * TTFT_S, chunk("a")), *OTHERS, END, *LAST],
    "one": [ROLE, FIRST, END, (0.0, usage(1)), (0.0, DONE)],
    "bundle": [ROLE, FIRST, (TPOT_S * (NUM - 1), chunk("a" * (NUM - 1))), END, *LAST],
    "late": [ROLE, FIRST, *OTHERS, END, (0.5, usage(NUM)), (0.0, DONE)],
    "nousage": [ROLE, FIRST, *OTHERS, END, (0.0, DONE)],
    "badusage": [ROLE, FIRST, *OTHERS, END, (0.0, usage(NUM + 7)), (0.0, DONE)],
    "sse_error": [(TTFT_S, event({"error": {"message": "as scripted"}})), (0.0, DONE)],
    "cut": [ROLE, FIRST, *OTHERS[:2]],
    "empty": [(0.0, DONE)],
}


def answer(step: str) -> Response:
    if step.startswith("err"):
        return Response(Content([(0.005, b'{"error": {"message": "no"}}')]), int(step[3:]))
    return Response(Content(STEPS[step]))


def exactly(time_s: float | None) -> Any:
    return None if time_s is None else pytest.approx(time_s, abs=1e-8)


# Of each kind of answer ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "tpot_s", "latency_s", "num_tokens", "num_chunks"),
    [
        ("ok", TPOT_S, 0.4, NUM, NUM),
        ("one", None, 0.2, 1, 1),
        ("bundle", TPOT_S, 0.4, NUM, 2),
        ("late", TPOT_S, 0.4, NUM, NUM),
        ("nousage", TPOT_S, 0.4, NUM, NUM),
        ("badusage", 0.2 / (NUM + 6), 0.4, NUM + 7, NUM),
    ],
)
def test_the_first_token_is_no_role_and_the_last_is_no_usage(
    step: str, tpot_s: float | None, latency_s: float, num_tokens: int, num_chunks: int
) -> None:
    sample = sample_of(answer(step))
    record = sample.record
    assert record.outcome == "completed"
    assert record.ttft_s == exactly(TTFT_S)
    assert record.tpot_s == exactly(tpot_s)
    assert record.latency_s == exactly(latency_s)
    assert record.lateness_s == exactly(0)
    assert (record.num_output_tokens, sample.num_chunks) == (num_tokens, num_chunks)
    assert sample.num_usage_tokens == (None if step == "nousage" else num_tokens)
    assert sample.done_s == exactly(1 + latency_s + 0.5 * (step == "late"))


@pytest.mark.parametrize(
    ("step", "outcome", "cause", "end_s"),
    [
        ("err500", "failed", "HTTP 500: no", 0.005),
        ("err429", "rejected", "HTTP 429: no", 0.005),
        ("err503", "rejected", "HTTP 503: no", 0.005),
        ("sse_error", "failed", "error in the answer: as scripted", 0.2),
        ("cut", "failed", "the stream ended before [DONE]", 0.24),
        ("empty", "failed", "the answer has no token", 0.0),
    ],
)
def test_what_is_not_completed(step: str, outcome: str, cause: str, end_s: float) -> None:
    sample = sample_of(answer(step))
    assert (sample.record.outcome, sample.cause) == (outcome, cause)
    assert sample.record.end_s == exactly(1 + end_s)


def test_a_timeout_is_of_the_whole_request() -> None:
    sample = sample_of(answer("ok"), timeout_s=0.31)
    assert (sample.record.outcome, sample.record.num_output_tokens) == ("timed_out", 6)
    assert sample.record.end_s == exactly(1.31)
    assert sample.record.ttft_s == exactly(0.2)


def test_times_between_chunks() -> None:
    assert sample_of(answer("ok")).itls_s == [exactly(TPOT_S)] * (NUM - 1)
    assert sample_of(answer("bundle")).itls_s == [exactly(TPOT_S * (NUM - 1))]
    assert sample_of(answer("one")).itls_s == []


# BEN-01 -------------------------------------------------------------------------------------------


def test_failures_are_in_no_time_but_in_attainment_and_goodput() -> None:
    steps = ["ok"] * 6 + ["slow"] * 2 + ["err500", "sse_error"]
    seen, _ = served([answer(step) for step in steps], [0.1 * n for n in range(10)])
    assert seen.wall_s == exactly(0.7 + 2.0 + 0.2)
    summary = summarise([each.record for each in seen.samples], seen.wall_s, {"x": Slo(1.0, 0.05)})
    assert (summary.num_requests, summary.completed, summary.failed) == (10, 8, 2)
    assert summary.attainment == {"x": 0.6}
    assert summary.goodput_per_s == {"x": exactly(6 / 2.9)}
    assert summary.output_tokens_per_s == pytest.approx(88 / 2.9)
    assert (summary.ttft_s.p50, summary.ttft_s.p99) == (exactly(0.2), exactly(2.0))
    assert summary.latency_s.p50 == exactly(0.4)
    assert summary.tpot_s == Spread(*[exactly(TPOT_S)] * 4)


@pytest.mark.parametrize("steps", [["err500"] * 4, ["cut", "empty", "err429"]])
def test_a_run_in_which_all_fail(steps: list[str]) -> None:
    seen, _ = served([answer(step) for step in steps], [0.1] * len(steps))
    summary = summarise([each.record for each in seen.samples], seen.wall_s, {"x": Slo()})
    assert (summary.completed, summary.num_requests) == (0, len(steps))
    assert summary.failed == len([step for step in steps if step != "err429"])
    assert summary.goodput_per_s == {"x": 0}
    assert summary.ttft_s == summary.latency_s == summary.tpot_s == Spread()


# BEN-02 -------------------------------------------------------------------------------------------


def test_few_samples_are_named_and_one_token_is_no_tpot_of_0() -> None:
    steps = ["ok", "one", "bundle", "late", "nousage", "badusage"]
    seen, _ = served([answer(step) for step in steps], [0.0] * 6)
    summary = summarise([each.record for each in seen.samples], 1.0, {"x": Slo(tpot_s=0.021)})
    assert summary.attainment == {"x": 1.0}
    assert summary.tpot_s.p99 == exactly(TPOT_S)
    assert {"ttft_s.p99", "tpot_s.p99", "tpot_s.p90"} <= {*summary.small_sample}
    assert [spread(values).p99 for values in ([1, 2, 3, 4, 100], [5], [])] == [100, 5, None]


# BEN-03 -------------------------------------------------------------------------------------------


def test_a_slow_server_changes_no_arrival() -> None:
    rng = random.Random(7)
    times_s = sorted(rng.uniform(0, 20) for _ in range(1000))
    slow = Response(Content([(2.0, chunk("a", "stop")), (0.0, DONE)]))
    quick = Response(Content([(0.0, chunk("a", "stop")), (0.0, DONE)]))
    runs = [served([each] * 1000, times_s) for each in (slow, quick)]
    for seen, session in runs:
        assert len(session.at_s) == 1000
        assert [each.record.scheduled_s for each in seen.samples] == times_s
        lateness_s = percentile([each.record.lateness_s for each in seen.samples], 100)
        assert lateness_s == exactly(0)
        assert session.at_s == [exactly(time_s) for time_s in times_s]


def test_a_wait_for_a_place_is_said_and_is_in_the_times() -> None:
    """Four at once for 0.4 s each: the queue grows, and with it what a request takes."""
    times_s = [0.05 * n for n in range(40)]
    seen, session = served([answer("ok")] * 40, times_s, max_in_flight=4)
    assert session.most_open == 4
    records = [each.record for each in seen.samples]
    for number, record in enumerate(records):
        wait_s = number // 4 * (0.4 - 4 * 0.05)
        assert record.slot_wait_s == exactly(wait_s)
        assert record.ttft_s == exactly(wait_s + TTFT_S)
        assert record.latency_s == exactly(wait_s + 0.4)
        assert record.tpot_s == exactly(TPOT_S)
        assert record.lateness_s == exactly(0)
        assert record.sent_s == exactly(times_s[number] + wait_s)


def test_all_at_once() -> None:
    seen, session = served([answer("ok")] * 50, [0.0] * 50)
    assert session.at_s == [0.0] * 50
    assert all(each.record.ttft_s == exactly(TTFT_S) for each in seen.samples)


def test_a_closed_loop_is_never_late() -> None:
    seen, session = served([answer("ok")] * 8, [9.0] * 8, concurrency=2)
    assert session.most_open == 2
    assert session.at_s == [exactly(0.4 * (n // 2)) for n in range(8)]
    assert all(each.record.lateness_s == 0 for each in seen.samples)
    assert all(each.record.slot_wait_s == 0 for each in seen.samples)


# Around a run -------------------------------------------------------------------------------------


def test_the_clock_starts_behind_the_warm_ups() -> None:
    seen, session = served([answer("ok")] * 7, [0.1, 0.2], warmup=5)
    assert session.at_s == [*[0.0] * 4, exactly(0.4), exactly(0.9), exactly(1.0)]
    assert [len(seen.warmup), len(seen.samples)] == [5, 2]
    assert seen.start_s == exactly(0.8)
    assert seen.samples[0].record.sent_s == exactly(0.1)
    assert seen.wall_s == exactly(0.6)


def test_nothing_follows_warm_ups_of_which_none_is_completed() -> None:
    seen, session = served([answer("err500")] * 3, [0.1], warmup=3)
    assert len(session.at_s) == 3
    assert seen.samples == []
    mixed, _ = served([answer("err500"), answer("ok"), answer("ok")], [0.1], warmup=2)
    assert len(mixed.samples) == 1


@pytest.mark.parametrize("how", [{}, {"max_in_flight": 1}, {"concurrency": 1}])
def test_what_was_sent_before_a_stop_counts(how: dict[str, Any]) -> None:
    seen, session = served([answer("ok")] * 9, [0.0, 0.3, 0.4, 5.0], stop_at_s=0.5, **how)
    assert seen.stopped
    assert seen.wall_s == exactly(0.5)
    assert session.num_open == 0
    outcomes = [each.record.outcome for each in seen.samples]
    assert outcomes == ["completed", "cancelled"] + ["cancelled"] * (not how)
    assert seen.samples[1].record.end_s == exactly(0.5)


def test_a_stop_during_warm_ups() -> None:
    seen, _ = served([answer("ok")] * 9, [0.0], stop_at_s=0.1, warmup=1)
    assert (seen.stopped, seen.samples) == (True, [])
    assert [each.record.outcome for each in seen.warmup] == ["cancelled"]
