from collections import Counter

import pytest

from easerve.search.methods.has import Has
from easerve.search.methods.method import Candidate
from easerve.search.methods.points import at
from easerve.search.space import SHARE
from tests.search.landscapes import BATCH, ridge, space
from tests.search.test_methods import history

NAMES = ("e4-p2-d2", "e2-p2x2-d2", "e2-p2-d4")
TOP = max(map(ridge, space()))


def candidate(name: str) -> Candidate:
    """Starts that are not far off, as estimates are."""
    places = ((0.5, 4), (0.4, 4), (1.0, 8))
    starts = [at(space(), name, {SHARE: share, BATCH: batch}) for share, batch in places]
    return Candidate(name, tuple(dict.fromkeys(starts)))


CANDIDATES = tuple(candidate(name) for name in NAMES)


def test_each_candidate_has_its_first_two_starts_at_once() -> None:
    found = [each.configuration for each in history(Has(space(), CANDIDATES), ridge, 6)]
    firsts = [[each.starts[turn] for each in CANDIDATES] for turn in (0, 1)]
    assert found == [start for turn in firsts for start in turn]


def test_nothing_but_candidates_is_tried_and_most_trials_go_to_the_best() -> None:
    found = history(Has(space(), CANDIDATES, 2), ridge, 30)
    turns = Counter(each.configuration.allocation for each in found)
    assert set(turns) <= set(NAMES)
    assert turns.most_common(1)[0][0] == "e2-p2x2-d2"


@pytest.mark.parametrize("seed", range(10))
def test_in_thirty_trials_it_is_within_two_per_cent_of_the_best_of_all(seed: int) -> None:
    """There are 366 configurations; only one of them is."""
    found = history(Has(space(), CANDIDATES, seed), ridge, 30)
    assert max(ridge(each.configuration) for each in found) >= 0.98 * TOP


def test_a_random_search_is_not() -> None:
    from easerve.search.methods.listed import Drawn

    searches = [history(Drawn(space(), seed), ridge, 30) for seed in range(10)]
    bests = [max(ridge(each.configuration) for each in found) for found in searches]
    assert sum(best >= 0.98 * TOP for best in bests) <= 3


def test_an_exhausted_candidate_leaves_its_turns_to_the_others() -> None:
    """The one that cannot offload has six configurations, and is the best here."""
    by = Has(space(), CANDIDATES)
    found = history(by, lambda each: 2.0 + (each.allocation == "e2-p2-d4"), 30)
    turns = Counter(each.configuration.allocation for each in found)
    assert turns["e2-p2-d4"] == 6
    assert len(found) == 30
