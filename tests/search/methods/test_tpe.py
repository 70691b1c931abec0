from statistics import fmean

from easerve.search.methods.tpe import Tpe, suggest
from easerve.search.objective import Score
from easerve.search.space import SHARE
from easerve.search.trials import Trial
from tests.search.landscapes import BATCH, GAP, WHEN, ridge, ruled, space
from tests.search.test_methods import history


def test_after_its_startup_it_goes_where_it_is_good() -> None:
    """What it tries then is on average worth more than what it drew, by a lot."""
    searches = [history(Tpe(space(), seed), ridge, 25) for seed in range(3)]
    drawn = [ridge(each.configuration) for found in searches for each in found[:10]]
    asked = [ridge(each.configuration) for found in searches for each in found[10:]]
    assert fmean(asked) > 1.3 * fmean(drawn)


def test_a_knob_is_proposed_where_it_is_at_work() -> None:
    for each in history(Tpe(ruled(), 1), lambda configuration: 1.0, 20):
        values = dict(each.configuration.values)
        assert (GAP in values) == (values[WHEN] == "gap")


def test_it_keeps_away_from_what_breaks_the_promise() -> None:
    """The higher goodput is that of trials which keep no promise."""
    one = space().restricted(["e2-p2x2-d2"])
    trials = [
        Trial(
            number,
            one.configuration("e2-p2x2-d2", {SHARE: share, BATCH: 8}),
            0.9,
            (Score(5.0 if share < 0.5 else 1.0, 0.3 if share < 0.5 else 0.95, 4.0),),
            (None,),
            "complete",
        )
        for number, share in enumerate((0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0))
    ]
    found = [suggest(one, trials, f"{seed}", 0) for seed in range(6)]
    assert sum(each is not None and float(str(each[SHARE])) >= 0.5 for each in found) >= 5
