import itertools
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from easerve.workload.arrivals import (
    KINDS,
    Arrivals,
    parse,
    parse_steps,
    poisson_steps,
    read_trace,
)

POISSON = Arrivals("poisson", rate_per_s=4)
BURSTY = Arrivals("gamma", rate_per_s=4, cv=2)
EVEN = Arrivals("gamma", rate_per_s=4, cv=0.5)
CONSTANT = Arrivals("constant", rate_per_s=4)
RAMP = Arrivals("ramp", rate_per_s=2, end_rate_per_s=8)
STEPS = Arrivals("steps", steps=((50.0, 2.0), (0.0, 1.0), (200.0, 1.0)))
DRAWN = (POISSON, BURSTY, EVEN)
SEEDS = range(20)


def gaps(arrivals: Arrivals, seed: int, num_requests: int = 2000) -> list[float]:
    times = arrivals.times(num_requests, random.Random(seed))
    return [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]


@pytest.mark.parametrize("arrivals", DRAWN)
def test_the_same_seed_gives_the_same_times_bit_for_bit(arrivals: Arrivals) -> None:
    times = [arrivals.times(100, random.Random(seed)) for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


@pytest.mark.parametrize("arrivals", [*DRAWN, CONSTANT])
def test_times_do_not_decrease_and_the_first_comes_after_a_gap(arrivals: Arrivals) -> None:
    for seed in SEEDS:
        times = arrivals.times(200, random.Random(seed))
        assert len(times) == 200
        assert times == sorted(times)
        assert times[0] > 0


@pytest.mark.parametrize("arrivals", [*DRAWN, CONSTANT])
def test_a_run_that_is_cut_short_has_the_same_arrivals(arrivals: Arrivals) -> None:
    long, short = (arrivals.times(num, random.Random(3)) for num in (50, 20))
    assert short == long[:20]
    assert arrivals.times(0, random.Random(3)) == []


@pytest.mark.parametrize(("arrivals", "cv"), [(POISSON, 1), (BURSTY, 2), (EVEN, 0.5)])
def test_gaps_have_the_mean_and_the_variation_that_was_asked(arrivals: Arrivals, cv: float) -> None:
    found = [gap for seed in SEEDS for gap in gaps(arrivals, seed)]
    mean_s = statistics.fmean(found)
    # Four standard errors of the mean; the deviation's own error is larger when cv is.
    assert mean_s == pytest.approx(0.25, rel=4 * cv / math.sqrt(len(found)))
    assert statistics.pstdev(found) / mean_s == pytest.approx(cv, rel=0.03)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gamma_has_vllms_shape(cv: float) -> None:
    """vLLM: shape = burstiness = 1 / cv², scale = 1 / (rate * burstiness)."""
    burstiness = 1 / cv**2
    rng = random.Random(5)
    first = rng.gammavariate(burstiness, 1 / (4 * burstiness))
    assert Arrivals("gamma", rate_per_s=4, cv=cv).times(1, random.Random(5)) == [first]


def test_poisson_gaps_are_exponential() -> None:
    found = [gap for seed in SEEDS for gap in gaps(POISSON, seed)]
    for limit_s in (0.05, 0.25, 1.0):
        share = sum(gap > limit_s for gap in found) / len(found)
        assert share == pytest.approx(math.exp(-4 * limit_s), abs=0.01)


def test_gamma_of_cv_1_is_poisson() -> None:
    gamma = Arrivals("gamma", rate_per_s=4, cv=1)
    assert gamma.times(100, random.Random(1)) == POISSON.times(100, random.Random(1))


@pytest.mark.parametrize("cv", [0.001, 1000])
def test_the_extreme_variations_can_be_drawn(cv: float) -> None:
    times = Arrivals("gamma", rate_per_s=4, cv=cv).times(1000, random.Random(1))
    assert all(map(math.isfinite, times))
    assert times == sorted(times)


def test_constant_arrivals_come_at_multiples_of_the_gap_and_draw_nothing() -> None:
    rng = random.Random(1)
    state = rng.getstate()
    assert Arrivals("constant", rate_per_s=10).times(4, rng) == [0.1, 0.2, 0.3, 0.4]
    assert rng.getstate() == state


@pytest.mark.parametrize("rate_per_s", [0, -1, math.inf, math.nan])
@pytest.mark.parametrize("kind", ["poisson", "gamma", "constant"])
def test_a_rate_that_cannot_be_is_refused(kind: str, rate_per_s: float) -> None:
    with pytest.raises(ValueError, match="rate_per_s must be more than 0 and finite"):
        Arrivals(kind, rate_per_s, cv=1 if kind == "gamma" else None)


@pytest.mark.parametrize("cv", [0, -1, 1e-200, 1e200, math.inf, math.nan])
def test_a_variation_that_cannot_be_is_refused(cv: float) -> None:
    with pytest.raises(ValueError, match=r"cv must be 0\.001 to 1000"):
        Arrivals("gamma", rate_per_s=1, cv=cv)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="trace, ramp, steps, immediate, not 'uniform'"):
        Arrivals("uniform", rate_per_s=1)
    assert KINDS == ("poisson", "gamma", "constant", "trace", "ramp", "steps", "immediate")


def test_a_kind_needs_its_parameters_and_takes_no_others() -> None:
    with pytest.raises(ValueError, match="poisson arrivals need rate_per_s"):
        Arrivals("poisson")
    with pytest.raises(ValueError, match="gamma arrivals need cv"):
        Arrivals("gamma", rate_per_s=1)
    with pytest.raises(ValueError, match="trace arrivals need path"):
        Arrivals("trace")
    with pytest.raises(ValueError, match="poisson arrivals take no cv"):
        Arrivals("poisson", rate_per_s=1, cv=2)
    with pytest.raises(ValueError, match="trace arrivals take no rate_per_s"):
        Arrivals("trace", rate_per_s=1, path=Path("a"))


def test_a_negative_number_of_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="negative, but is -1"):
        CONSTANT.times(-1, random.Random(1))


def trace(folder: Path, content: str) -> Path:
    path = folder / "trace.txt"
    path.write_text(content)
    return path


def test_a_trace_is_taken_as_it_is_written(tmp_path: Path) -> None:
    path = trace(tmp_path, "# seconds\n0\n\n0.5\n  # again\n 0.5 \n1e1\n")
    assert read_trace(path) == [0, 0.5, 0.5, 10]
    assert Arrivals("trace", path=path).times(3, random.Random(1)) == [0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("soon", "'soon' is not a number of seconds"),
        ("1.0 2.0", "'1.0 2.0' is not a number of seconds"),
        ("-0.1", "-0.1 is negative or not finite"),
        ("inf", "inf is negative or not finite"),
        ("nan", "nan is negative or not finite"),
        ("0.9", "0.9 is before the arrival at 1.0"),
    ],
)
def test_an_error_in_a_trace_names_file_and_line(tmp_path: Path, line: str, wrong: str) -> None:
    path = trace(tmp_path, f"# a comment\n\n1.0\n{line}\n")
    with pytest.raises(ValueError, match="line 4") as error:
        Arrivals("trace", path=path).times(1, random.Random(1))
    assert str(error.value) == f"{path}, line 4: {wrong}"


def test_a_trace_that_is_not_text_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.bin"
    path.write_bytes(b"1.0\n\xff\xfe\x00\n")
    with pytest.raises(ValueError, match=r"line 2: .* is not a number"):
        read_trace(path)


def test_a_trace_that_is_too_short_says_so(tmp_path: Path) -> None:
    path = trace(tmp_path, "1\n2\n")
    with pytest.raises(ValueError, match="has 2 arrivals, but 3 requests are asked"):
        Arrivals("trace", path=path).times(3, random.Random(1))


def test_a_trace_that_is_not_there_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.txt"):
        Arrivals("trace", path=tmp_path / "gone.txt").times(1, random.Random(1))


def test_steps_have_their_own_rates() -> None:
    steps = [(50.0, 20.0), (0.0, 10.0), (200.0, 5.0)]
    counts = [0, 0, 0]
    for seed in SEEDS:
        times = poisson_steps(steps, random.Random(seed))
        assert times == sorted(times)
        assert times == poisson_steps(steps, random.Random(seed))
        assert times[0] > 0
        counts[0] += sum(time < 20 for time in times)
        counts[1] += sum(20 <= time < 30 for time in times)
        counts[2] += sum(30 <= time < 35 for time in times)
        assert times[-1] < 35
    assert counts[1] == 0
    for count in (counts[0], counts[2]):  # 1000 are expected per seed
        mean = 1000 * len(SEEDS)
        assert count == pytest.approx(mean, abs=4 * math.sqrt(mean))


@pytest.mark.parametrize(
    "step", [(-1, 1), (math.inf, 1), (math.nan, 1), (1, 0), (1, -1), (1, math.inf), (1, math.nan)]
)
def test_a_step_that_cannot_be_is_refused(step: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="a step cannot have a rate of"):
        poisson_steps([(1, 1), step], random.Random(1))


def test_no_steps_are_no_arrivals() -> None:
    assert poisson_steps([], random.Random(1)) == []


@pytest.mark.parametrize("kind", ["poisson", "gamma"])
def test_rescaled_arrivals_end_at_the_number_of_requests_over_the_rate(kind: str) -> None:
    """vLLM's bench: delays times (requests / rate) / last delay."""
    cv = 2 if kind == "gamma" else None
    for seed in SEEDS:
        plain = Arrivals(kind, 4, cv).times(100, random.Random(seed))
        times = Arrivals(kind, 4, cv, rescaled=True).times(100, random.Random(seed))
        assert times[-1] == 25
        assert times == pytest.approx([time_s * 25 / plain[-1] for time_s in plain])
    assert Arrivals(kind, 4, cv, rescaled=True).times(0, random.Random(1)) == []


def test_what_is_not_drawn_is_not_rescaled() -> None:
    with pytest.raises(ValueError, match="constant arrivals are not drawn and take no rescaled"):
        Arrivals("constant", 4, rescaled=True)
    with pytest.raises(ValueError, match="trace arrivals are not drawn and take no rescaled"):
        Arrivals("trace", path=Path("a"), rescaled=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thousand_poisson_gaps_vary_as_they_should(seed: int) -> None:
    found = gaps(Arrivals("poisson", rate_per_s=50), seed, 1000)
    assert 0.9 <= statistics.pstdev(found) / statistics.fmean(found) <= 1.1


@pytest.mark.parametrize("arrivals", [RAMP, Arrivals("ramp", 8, end_rate_per_s=2)])
def test_a_ramp_has_the_expected_number_by_any_time(arrivals: Arrivals) -> None:
    """Of n requests, start·t + (end - start)·t² / 2T by t, where T = 2n / (start + end)."""
    start, end = arrivals.rate_per_s, arrivals.end_rate_per_s
    assert start is not None
    assert end is not None
    num, whole_s = 1000, 2 * 1000 / (start + end)
    counts = dict.fromkeys((0.25, 0.5, 0.75, 0.95), 0)
    for seed in SEEDS:
        times = arrivals.times(num, random.Random(seed))
        assert times == sorted(times)
        assert times[0] > 0
        for share in counts:
            counts[share] += sum(time <= share * whole_s for time in times)
    for share, count in counts.items():
        time_s = share * whole_s
        mean = (start * time_s + (end - start) * time_s**2 / (2 * whole_s)) * len(SEEDS)
        assert count == pytest.approx(mean, abs=4 * math.sqrt(mean))


def test_a_ramp_goes_on_at_its_last_rate() -> None:
    ends = [RAMP.times(20, random.Random(seed))[-1] for seed in range(200)]
    assert max(ends) > 2 * 20 / 10  # some end after the ramp has
    assert statistics.fmean(ends) == pytest.approx(4, rel=0.1)


def test_a_ramp_between_equal_rates_is_poisson() -> None:
    flat = Arrivals("ramp", 4, end_rate_per_s=4).times(200, random.Random(3))
    assert flat == pytest.approx(POISSON.times(200, random.Random(3)))


def test_a_ramp_is_the_same_bit_for_bit() -> None:
    assert RAMP.times(50, random.Random(3)) == RAMP.times(50, random.Random(3))
    assert RAMP.times(0, random.Random(3)) == []


def test_steps_come_again_until_there_are_enough() -> None:
    once = poisson_steps(STEPS.steps or (), random.Random(4))
    times = STEPS.times(1000, random.Random(4))
    assert times[: len(once)] == once == STEPS.whole(random.Random(4))
    assert times == sorted(times)
    assert STEPS.times(300, random.Random(4)) == times[:300]
    phases = [time_s % 4 for time_s in times if time_s < times[-1] // 4 * 4]
    assert not [phase for phase in phases if 2 <= phase < 3]
    assert sum(phase < 2 for phase in phases) == pytest.approx(len(phases) / 3, rel=0.2)


def test_immediate_arrivals_are_all_at_the_start_and_draw_nothing() -> None:
    rng = random.Random(1)
    state = rng.getstate()
    assert Arrivals("immediate").times(3, rng) == [0, 0, 0]
    assert rng.getstate() == state


def test_only_what_has_an_end_has_a_whole(tmp_path: Path) -> None:
    assert POISSON.whole(random.Random(1)) is None
    assert Arrivals("trace", path=trace(tmp_path, "1\n2\n")).whole(random.Random(1)) == [1, 2]


@pytest.mark.parametrize("rate", [0, -1, math.inf, math.nan])
def test_an_end_rate_that_cannot_be_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="end_rate_per_s must be more than 0 and finite"):
        Arrivals("ramp", 1, end_rate_per_s=rate)


def test_steps_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="a step cannot have a rate of -1"):
        Arrivals("steps", steps=((1, 1), (-1, 1)))
    for nothing in ((), ((0.0, 5.0),)):
        with pytest.raises(ValueError, match="one of the steps must have a rate"):
            Arrivals("steps", steps=nothing)
    with pytest.raises(ValueError, match="steps arrivals take no rate_per_s"):
        Arrivals("steps", 1, steps=((1, 1),))
    with pytest.raises(ValueError, match="immediate arrivals take no rate_per_s"):
        Arrivals("immediate", 1)


@pytest.mark.parametrize(
    ("words", "arrivals"),
    [
        ({"rate": "4"}, POISSON),
        ({"rate": "4", "kind": "constant"}, CONSTANT),
        ({"rate": "4", "cv": 2}, BURSTY),
        ({"rate": "4", "cv": 2, "kind": "gamma"}, BURSTY),
        ({"rate": "2", "end_rate": "8"}, RAMP),
        ({"steps": "50x2, 0x1,200×1"}, STEPS),
        ({"rate": "inf"}, Arrivals("immediate")),
        ({"rate": " Inf", "kind": "poisson"}, Arrivals("immediate")),
        ({"kind": "immediate"}, Arrivals("immediate")),
        ({"kind": "immediate", "rate": "inf"}, Arrivals("immediate")),
        ({"path": Path("a")}, Arrivals("trace", path=Path("a"))),
    ],
)
def test_words_of_a_command_line(words: dict[str, Any], arrivals: Arrivals) -> None:
    assert parse(**words) == arrivals


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ({}, "poisson arrivals need rate_per_s"),
        ({"rate": "fast"}, "a rate is a number of requests per second, not 'fast'"),
        ({"rate": "nan"}, "more than 0 and finite, not nan"),
        ({"rate": "0"}, "more than 0 and finite, not 0"),
        ({"rate": "-inf"}, "more than 0 and finite, not -inf"),
        ({"rate": "4", "kind": "immediate"}, "immediate arrivals take no rate_per_s"),
        ({"rate": "inf", "cv": 2}, "immediate arrivals take no cv"),
        ({"rate": "inf", "end_rate": "2"}, "rate_per_s must be more than 0 and finite"),
        ({"rate": "4", "path": Path("a")}, "trace arrivals take no rate_per_s"),
        ({"rate": "4", "kind": "gamma"}, "gamma arrivals need cv"),
        ({"steps": "5x60,x"}, "'x' is not like 5x60"),
        ({"steps": "5"}, "'5' is not like 5x60"),
        ({"steps": "5x-1"}, "a step cannot have a rate of 5.0 for -1.0 seconds"),
    ],
)
def test_words_that_cannot_be_are_refused(words: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        parse(**words)


def test_steps_as_words() -> None:
    assert parse_steps("5x60,20x30") == ((5, 60), (20, 30))
