from easerve.search.objective import Score
from easerve.search.space import Configuration
from easerve.search.stopping import hopeless
from easerve.search.trials import Trial


def scores(*goodputs: float, attainment: float = 0.95) -> tuple[Score, ...]:
    return tuple(Score(each, attainment, 4.0) for each in goodputs)


INCUMBENT = Trial(
    3, Configuration("e1-p1-d1", ()), 0.9, scores(3.0, 1.0, 2.0), (None,) * 3, "complete"
)


def test_it_is_compared_over_the_seeds_that_both_have() -> None:
    """2.5 is more than the mean of the incumbent, and less than it had with that seed."""
    why = hopeless(scores(2.5), 3, 0.9, INCUMBENT)
    assert why == "goodput 2.5/s, trial 3 has 3/s over the same"
    assert not hopeless(scores(2.6), 3, 0.9, INCUMBENT)


def test_the_margin_is_less_after_a_second_seed() -> None:
    assert not hopeless(scores(2.7, 1.12), 3, 0.9, INCUMBENT)
    assert hopeless(scores(2.7, 1.08), 3, 0.9, INCUMBENT)


def test_what_cannot_keep_the_promise_any_more_is_given_up_at_once() -> None:
    """0.69 and twice all of them are 0.897."""
    assert "out of reach" in hopeless(scores(9.0, attainment=0.69), 3, 0.9, None)
    assert not hopeless(scores(9.0, attainment=0.71), 3, 0.9, None)


def test_what_is_far_from_the_promise_is_given_up_once_something_keeps_it() -> None:
    assert hopeless(scores(9.0, attainment=0.74), 3, 0.9, INCUMBENT)
    assert not hopeless(scores(9.0, attainment=0.76), 3, 0.9, INCUMBENT)
    assert hopeless(scores(9.0, 9.0, attainment=0.84), 3, 0.9, INCUMBENT)
