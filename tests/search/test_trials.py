import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easerve.search.objective import Score
from easerve.search.space import Configuration
from easerve.search.trials import State, Trial, best, student_t, worths

PLACE = Configuration("e1-p1-d1", ())


def trial(
    number: int, goodputs: list[float], attainment: float = 0.95, state: State = "complete"
) -> Trial:
    scores = tuple(Score(each, attainment, 4.0) for each in goodputs)
    return Trial(number, PLACE, 0.9, scores, (None,) * len(scores), state)


def test_a_trial_is_the_mean_of_its_scores() -> None:
    found = trial(0, [1.0, 2.0, 3.0])
    assert found.goodput_per_s == 2.0
    assert found.attainment == pytest.approx(0.95)
    assert trial(0, []).goodput_per_s is None


@pytest.mark.parametrize("required", [0.95, 0.9, 0.99])
def test_what_is_just_required_of_every_seed_is_kept(required: float) -> None:
    """A plain mean of three times 0.95 is less than 0.95."""
    for num_seeds in range(1, 31):
        scores = (Score(1.0, required, 4.0),) * num_seeds
        assert Trial(0, PLACE, required, scores, state="complete").is_feasible, num_seeds


def test_confidence_is_that_of_a_known_example() -> None:
    """Mean 2, standard deviation 1, three values: 4.3027 / sqrt(3)."""
    assert trial(0, [1.0, 2.0, 3.0]).confidence_per_s == pytest.approx(2.4842, abs=1e-3)
    assert trial(0, [1.0]).confidence_per_s is None


def density(t: float, degrees: int) -> float:
    log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    log -= 0.5 * math.log(degrees * math.pi) + (degrees + 1) / 2 * math.log1p(t * t / degrees)
    return math.exp(log)


@pytest.mark.parametrize("degrees", [1, 2, 5, 10, 11, 15, 40, 200])
def test_student_quantile_leaves_a_fortieth_above(degrees: int) -> None:
    """By numbers: the density's integral from 0 to the quantile is 0.475."""
    steps = 20_000
    width = student_t(degrees) / steps
    area = width * sum(density((step + 0.5) * width, degrees) for step in range(steps))
    assert area == pytest.approx(0.475, abs=2e-5)


def test_the_best_keeps_the_promise_and_has_all_its_scores() -> None:
    history = [
        trial(0, [2.0]),
        trial(1, [9.0], attainment=0.89),
        trial(2, [8.0], state="pruned"),
        trial(3, [7.0], state="failed"),
        trial(4, [3.0]),
        trial(5, [3.0]),
    ]
    found = best(history)
    assert found is not None
    assert found.number == 4
    assert best(history[1:4]) is None


def test_worths_put_promise_before_goodput_and_failures_last() -> None:
    history = [
        trial(0, [1.0]),
        trial(1, [5.0], attainment=0.5),
        trial(2, [], state="failed"),
        trial(3, [0.0]),
    ]
    assert worths(history) == pytest.approx([1.0, -0.4, -1.0, 0.0])


def test_an_easy_first_seed_is_worth_nothing_by_itself() -> None:
    """The pruned one is 0.8 of the complete one where both were, so it is worth 0.8 of it."""
    history = [trial(0, [4.0, 2.0, 3.0]), trial(1, [3.2], state="pruned")]
    assert worths(history) == pytest.approx([3.0, 2.4])


@given(
    st.lists(
        st.builds(
            trial,
            st.just(0),
            st.lists(st.floats(0, 10), min_size=1, max_size=3),
            st.floats(0, 1),
            st.sampled_from(["complete", "pruned", "failed"]),
        ),
        max_size=8,
    )
)
def test_a_complete_trial_is_worth_its_goodput_and_the_best_most(history: list[Trial]) -> None:
    found = best(history)
    values = worths(history)
    assert all(value >= -1 for value in values)
    for each, value in zip(history, values, strict=True):
        if each.is_feasible:
            assert found is not None
            assert value == fmean(score.goodput_per_s for score in each.scores)
            assert value <= (found.goodput_per_s or 0.0)
