from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.costs.linear import LinearCosts
from easerve.policy.estimates import GAIN, Line, Mean, Times

from .scenario import picture

COSTS = LinearCosts(
    encode_base_s=0.2, encode_token_s=0.001, prefill_base_s=0.1, prefill_token_s=0.0001
)

AMOUNTS = st.floats(0, 1e6, allow_subnormal=False)
SIZES = st.floats(1, 1e6)


def line_through(
    points: Sequence[tuple[float, float]], base: float = 1.0, slope: float = 1.0
) -> Line:
    line = Line(base, slope)
    for x, y in points:
        line.observe(x, y)
    return line


def test_a_mean_is_its_guess_until_something_is_observed() -> None:
    mean = Mean(7.0)
    assert mean.value == 7.0
    mean.observe(3.0)
    assert mean.value == 3.0


def test_the_first_samples_of_a_mean_weigh_the_same() -> None:
    mean = Mean(0.0)
    for sample in (1, 2, 6):
        mean.observe(sample)
    assert mean.value == pytest.approx(3)


def test_a_mean_forgets() -> None:
    mean = Mean(0.0)
    for _ in range(100):
        mean.observe(1.0)
    mean.observe(2.0)
    assert mean.value == pytest.approx(1 + GAIN)


def test_a_line_is_its_guess_until_something_is_observed() -> None:
    line = Line(3.0, 2.0)
    assert line.line() == (3.0, 2.0)
    assert [line.at(x) for x in (0, 1, 10)] == [0.0, 5.0, 23.0]


@pytest.mark.parametrize(("base", "slope"), [(0.3, 0.03), (0.06, 0.022), (0.5, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize(("guessed_base", "guessed_slope"), [(1.0, 1.0), (5.0, 0.0), (0.0, 0.001)])
def test_base_and_slope_are_found_from_samples_that_are_spread(
    base: float, slope: float, guessed_base: float, guessed_slope: float
) -> None:
    random = Random(1)
    sizes = [random.randint(1, 16) for _ in range(200)]
    points = [(x, (base + slope * x) * random.uniform(0.97, 1.03)) for x in sizes]
    line = line_through(points, guessed_base, guessed_slope)
    found_base, found_slope = line.line()
    whole = base + slope * 8
    assert found_base == pytest.approx(base, abs=0.15 * whole)
    assert found_slope == pytest.approx(slope, abs=0.15 * whole / 8)
    assert line.at(8) == pytest.approx(whole, rel=0.05)


def test_samples_of_one_size_say_how_fast_things_are_and_the_guess_says_what_is_base() -> None:
    line = line_through([(10, 60)] * 50, base=20, slope=1)
    assert line.line() == pytest.approx((40, 2))


def test_samples_of_almost_one_size_do_not_say_what_is_base() -> None:
    random = Random(1)
    points = [(100 + random.random(), 60 * random.uniform(0.8, 1.2)) for _ in range(200)]
    base, _ = line_through(points, base=20, slope=0.2).line()
    assert base == pytest.approx(30, abs=6)


def test_a_guess_of_nothing_makes_everything_base() -> None:
    assert line_through([(10, 60)] * 5, base=0, slope=0).line() == pytest.approx((60, 0))


def test_a_guess_that_is_far_off_has_little_weight_where_samples_are_spread() -> None:
    points = [(x, 10.0 + x) for x in (1, 16)] * 20
    base, slope = line_through(points, base=0, slope=100).line()
    assert (base, slope) == pytest.approx((10, 1), rel=0.1)


def test_a_line_follows_an_engine_that_became_slower() -> None:
    line = line_through([(x, 1.0 + x) for x in (1, 2, 4, 8)] * 10)
    for x in (1, 2, 4, 8) * 25:
        line.observe(x, 3.0 + 3 * x)
    assert line.line() == pytest.approx((3, 3), rel=0.1)


def test_neither_base_nor_slope_is_negative_where_a_fit_would_be() -> None:
    falling = line_through([(1, 10), (2, 1)] * 20).line()
    assert falling[1] == 0.0
    assert falling[0] > 0
    steep = line_through([(1, 0), (10, 100)] * 20).line()
    assert steep[0] == pytest.approx(0)
    assert steep[1] > 0


@settings(deadline=None)
@given(AMOUNTS, AMOUNTS, st.lists(st.tuples(SIZES, AMOUNTS), max_size=30), SIZES)
def test_what_a_line_says_is_finite_and_never_negative(
    base: float, slope: float, points: list[tuple[float, float]], at: float
) -> None:
    line = line_through(points, base, slope)
    found_base, found_slope = line.line()
    assert 0 <= found_slope < 1e9
    assert -1e-6 <= found_base < 1e9
    assert line.at(0) == 0.0


# Times --------------------------------------------------------------------------------------------


@pytest.fixture
def times() -> Times:
    return Times(COSTS)


def test_times_begin_with_a_guess(times: Times) -> None:
    assert times.encode.line() == pytest.approx((0.2, 0.001))
    assert times.prefill_s == pytest.approx(0.2), "of a prompt of a thousand tokens"
    assert times.prefill_token_s == pytest.approx(0.0002)
    assert (times.observed_prefill_s, times.decode_s) == (0.0, 0.0)


def test_the_first_observation_replaces_the_guess(times: Times) -> None:
    times.prefilled(0.6, 300)
    assert (times.prefill_s, times.observed_prefill_s) == (0.6, 0.6)
    assert times.prefill_token_s == pytest.approx(0.002)
    times.decoded(3.0)
    assert times.decode_s == 3.0


def test_the_work_of_items_is_counted_in_batches(times: Times) -> None:
    assert times.items_s(8, 4) == 0.0, "no item has come yet"
    times.seen(picture("a", 100))
    assert times.items_s(8, 4) == pytest.approx(2 * (0.2 + 0.4))
    assert times.items_s(2, 4) == pytest.approx(0.3), "half a batch counts as half of one"
    assert times.lead_s == pytest.approx(0.3 + 0.2)


def test_of_a_sample_without_a_size_nothing_is_learned() -> None:
    assert line_through([(0.0, 5.0)], base=1.0, slope=2.0).line() == (1.0, 2.0)
