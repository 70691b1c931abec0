from random import Random
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.policy.arrivals import QUIET, Arrivals
from easerve.types import NS_PER_S

SEEDS = range(200)


class Stream:
    """Arrivals with gamma gaps, and the estimate that was made of them."""

    def __init__(self, seed: int) -> None:
        self.random, self.arrivals, self.now_ns = Random(seed), Arrivals(), 0

    def run(self, num: int, rate_per_s: float, cv: float = 1.0) -> "Stream":
        shape = 1 / cv**2
        for _ in range(num):
            gap_s = self.random.gammavariate(shape, 1 / (shape * rate_per_s))
            self.now_ns += round(gap_s * NS_PER_S)
            self.arrivals.observe(self.now_ns)
        return self

    @property
    def rate_per_s(self) -> float:
        return self.arrivals.rate_per_s(self.now_ns)


def every(gap_ns: int, num: int) -> Arrivals:
    arrivals = Arrivals()
    for index in range(num):
        arrivals.observe(index * gap_ns)
    return arrivals


@pytest.mark.parametrize("rate_per_s", [0.1, 1, 10, 100, 1000])
def test_a_steady_rate_is_found_within_a_tenth(rate_per_s: float) -> None:
    estimates = [Stream(seed).run(101, rate_per_s).rate_per_s / rate_per_s for seed in SEEDS]
    assert median(estimates) == pytest.approx(1, abs=0.1)
    assert mean(estimates) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("factor", [0.1, 0.2, 0.5, 2, 5, 10])
def test_a_step_is_followed_within_twenty_arrivals(factor: float) -> None:
    estimates = [
        Stream(seed).run(100, 10).run(20, 10 * factor).rate_per_s / (10 * factor) for seed in SEEDS
    ]
    assert median(estimates) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("gap_ns", [1, 1000, NS_PER_S // 7, 10 * NS_PER_S])
def test_constant_gaps_are_found_exactly(gap_ns: int) -> None:
    arrivals = every(gap_ns, 50)
    assert arrivals.gap_s(49 * gap_ns) == pytest.approx(gap_ns / NS_PER_S, rel=1e-9)
    assert arrivals.cv == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("cv", "low", "high"), [(0.5, 0.4, 0.6), (1, 0.8, 1.2), (2, 1.5, 2.5)])
def test_burstiness_is_found_roughly(cv: float, low: float, high: float) -> None:
    estimates = [Stream(seed).run(200, 10, cv).arrivals.cv for seed in SEEDS]
    assert low < median(estimates) < high


def test_the_burstier_the_greater_is_the_estimate() -> None:
    estimates = [
        median(Stream(seed).run(200, 10, cv).arrivals.cv for seed in SEEDS) for cv in (1, 2, 4)
    ]
    assert estimates == sorted(estimates)
    assert estimates[-1] > 2, "ten gaps of sixteen to a burst do not show all of it"


def test_a_step_is_no_burst() -> None:
    estimates = [Stream(seed).run(100, 1).run(12, 20).arrivals.cv for seed in SEEDS]
    assert 0.5 < median(estimates) < 2.5


def test_nothing_is_known_before_the_first_arrival() -> None:
    arrivals = Arrivals()
    assert (arrivals.last_ns, arrivals.gap_s(5), arrivals.rate_per_s(5)) == (None, None, 0.0)
    assert arrivals.cv == 1.0


def test_after_one_arrival_the_gap_is_what_has_passed_since() -> None:
    arrivals = every(1, 1)
    assert (arrivals.gap_s(0), arrivals.rate_per_s(0)) == (None, 0.0)
    assert (arrivals.gap_s(NS_PER_S), arrivals.rate_per_s(NS_PER_S)) == (1.0, 1.0)


def test_two_arrivals_make_a_gap_but_no_burstiness() -> None:
    arrivals = every(NS_PER_S, 2)
    assert (arrivals.gap_s(NS_PER_S), arrivals.cv) == (1.0, 1.0)


def test_the_first_gaps_weigh_the_same() -> None:
    arrivals = Arrivals()
    for at_s in (0, 2, 3, 6):
        arrivals.observe(at_s * NS_PER_S)
    assert arrivals.gap_s(6 * NS_PER_S) == pytest.approx(2)


def test_arrivals_of_one_instant_are_one() -> None:
    arrivals = Arrivals()
    for at_ns in (0, 0, NS_PER_S, NS_PER_S, NS_PER_S, 2 * NS_PER_S):
        arrivals.observe(at_ns)
    assert (arrivals.gap_s(2 * NS_PER_S), arrivals.cv) == (1.0, 0.0)


def test_the_rate_falls_while_nothing_comes() -> None:
    arrivals, last_ns = every(NS_PER_S, 20), 19 * NS_PER_S
    assert arrivals.gap_s(last_ns + int(QUIET * NS_PER_S)) == pytest.approx(1)
    rates = [arrivals.rate_per_s(last_ns + later_s * NS_PER_S) for later_s in (8, 40, 400)]
    assert rates == pytest.approx([1 / 2, 1 / 10, 1 / 100])


def test_a_silence_is_no_gap_and_starts_a_new_sample() -> None:
    arrivals = every(NS_PER_S, 20)
    for at_s in (100, 100.1):
        arrivals.observe(int(at_s * NS_PER_S))
    assert arrivals.gap_s(int(100.1 * NS_PER_S)) == pytest.approx(0.1)


def test_a_gap_like_those_between_bursts_is_no_silence() -> None:
    arrivals, now_ns = Arrivals(), 0
    for _ in range(8):
        for gap_s in (10, 0.5, 0.5, 0.5):
            now_ns += int(gap_s * NS_PER_S)
            arrivals.observe(now_ns)
    now_ns += 70 * NS_PER_S
    arrivals.observe(now_ns)
    assert arrivals.cv > 1
    assert arrivals.gap_s(now_ns) == pytest.approx(9, abs=2), "the long gap is not in the mean"


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**12), max_size=30), st.integers(0, 10**12))
def test_estimates_are_finite_whatever_comes(gaps_ns: list[int], later_ns: int) -> None:
    arrivals, now_ns = Arrivals(), 0
    for gap_ns in gaps_ns:
        now_ns += gap_ns
        arrivals.observe(now_ns)
        assert arrivals.last_ns == now_ns
        assert 0 <= arrivals.rate_per_s(now_ns + later_ns) <= NS_PER_S + 1
        assert 0 <= arrivals.cv < 1e6
        gap_s = arrivals.gap_s(now_ns + later_ns)
        assert gap_s is None or gap_s > 0
