from hypothesis import given
from hypothesis import strategies as st

from easerve.search.methods.nearby import estimate, nearby
from easerve.search.space import SHARE, Configuration
from tests.search.landscapes import BATCH, GAP, WHEN, ruled, space

ONE = space().restricted(["e2-p2x2-d2"])


def place(share: float, batch: int) -> Configuration:
    return ONE.configuration("e2-p2x2-d2", {SHARE: share, BATCH: batch})


def test_the_knob_that_was_tried_least_from_the_best_is_next() -> None:
    found = nearby(ONE, {place(0.5, 8): 1.0, place(0.55, 8): 2.0, place(0.6, 8): 1.0})
    assert found is not None
    assert found[SHARE] == 0.55
    assert found[BATCH] != 8


def test_it_goes_on_where_the_last_steps_went_up() -> None:
    known = {place(0.5, 8): 1.0, place(0.55, 8): 2.0, place(0.55, 4): 0.5, place(0.55, 16): 1.0}
    found = nearby(ONE, known)
    assert found is not None
    assert found[BATCH] == 8
    assert found[SHARE] in (0.6, 0.65, 0.75)


def test_where_all_steps_were_taken_it_goes_to_the_nearest() -> None:
    tiny = ruled().restricted(["e2-p1-d1"])
    everything = list(tiny)
    known = dict.fromkeys(everything[:-1], 1.0)
    assert nearby(tiny, known) == everything[-1]
    assert nearby(tiny, dict.fromkeys(everything, 1.0)) is None


def test_an_estimate_is_between_what_is_known_and_nearest_to_the_nearest() -> None:
    known = {place(0.2, 8): 1.0, place(0.8, 8): 3.0}
    assert estimate(ONE, place(0.5, 8), known) == 2.0
    assert 2.9 < estimate(ONE, place(0.75, 8), known) < 3.0


@given(st.sets(st.sampled_from(list(ruled())), min_size=1))
def test_it_proposes_what_is_not_known(tried: set[Configuration]) -> None:
    for name in ("e1-p1-d1", "e2-p1-d1"):
        one = ruled().restricted([name])
        known = {each: float(len(repr(each)) % 5) for each in tried if each.allocation == name}
        if known:
            found = nearby(one, known)
            assert (found is None) == (set(known) == set(one))
            assert found not in known


def test_a_knob_at_rest_is_as_far_as_another_name() -> None:
    values = {BATCH: 1, SHARE: 0.5, GAP: 0.25}
    resting = ruled().configuration("e1-p1-d1", {**values, WHEN: "fixed"})
    known = {resting: 1.0}
    assert estimate(ruled(), ruled().configuration("e1-p1-d1", {**values, WHEN: "gap"}), known) == 1
