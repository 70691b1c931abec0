import itertools
import math
import random
import statistics
from pathlib import Path

import pytest

from easerve.workload.arrivals import KINDS, Arrivals, poisson_steps, read_trace

POISSON = Arrivals("poisson", rate_per_s=4)
BURSTY = Arrivals("gamma", rate_per_s=4, cv=2)
EVEN = Arrivals("gamma", rate_per_s=4, cv=0.5)
CONSTANT = Arrivals("constant", rate_per_s=4)
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
    with pytest.raises(ValueError, match="poisson, gamma, constant, trace, not 'uniform'"):
        Arrivals("uniform", rate_per_s=1)
    assert KINDS == ("poisson", "gamma", "constant", "trace")


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
