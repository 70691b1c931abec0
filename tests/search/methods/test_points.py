from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easerve.search.methods.points import (
    at,
    draw,
    draw_untried,
    nearest_untried,
    nearest_value,
    neighbours,
    rng,
    steps,
)
from easerve.search.space import SHARE, Configuration, Knob, Value
from tests.search.landscapes import BATCH, GAP, WHEN, ruled, space


def test_each_configuration_is_drawn_as_often() -> None:
    """Also those where a knob is at rest, and those of an allocation that has fewer."""
    random, everything = rng(1), list(ruled())
    seen = Counter(draw(ruled(), random) for _ in range(100 * len(everything)))
    assert set(seen) == set(everything)
    assert min(seen.values()) > 60
    assert max(seen.values()) < 145


@given(st.sets(st.sampled_from(list(ruled()))), st.integers(0, 9))
def test_what_is_drawn_was_not_tried(tried: set[Configuration], seed: int) -> None:
    found = draw_untried(ruled(), tried, rng(seed))
    assert (found is None) == (tried == set(ruled()))
    assert found not in tried


def distance(one: Configuration, other: Configuration) -> int:
    """The fewest steps between two, by walking everything."""
    at, num = {one}, 0
    while other not in at:
        at |= {near for each in at for near in neighbours(ruled(), each)}
        num += 1
    return num


@given(st.sampled_from(list(ruled())), st.sets(st.sampled_from(list(ruled())), min_size=1))
def test_the_nearest_is_nearest(start: Configuration, left: set[Configuration]) -> None:
    tried = set(ruled()) - left
    found = nearest_untried(ruled(), start, tried)
    assert found in left
    assert distance(start, found) == min(distance(start, each) for each in left)


def test_nothing_is_near_if_all_was_tried() -> None:
    assert nearest_untried(ruled(), next(iter(ruled())), set(ruled())) is None


def test_values_that_an_allocation_does_not_have_are_the_nearest_it_has() -> None:
    assert at(space(), "e2-p2x2-d2", {SHARE: 0.66, BATCH: 7})[SHARE] == 0.65
    assert at(space(), "e2-p2x2-d2", {SHARE: 0.66, BATCH: 7})[BATCH] == 8
    assert at(space(), "e2-p2-d4", {SHARE: 0.3})[SHARE] == 1.0
    assert GAP not in dict(at(ruled(), "e1-p1-d1", {WHEN: "fixed", GAP: 0.5}).values)


@pytest.mark.parametrize(
    ("values", "value", "found"),
    [
        ((1, 2, 4), 1, [2]),
        ((1, 2, 4), 2, [1, 4]),
        ((1, 2, 4), 4, [2]),
        (("gap", "fixed", None), "fixed", ["gap", None]),
    ],
)
def test_steps(values: Sequence[Value], value: Value, found: list[Value]) -> None:
    assert steps(Knob("k", tuple(values)), value) == found


def test_a_wish_that_is_no_name_of_a_knob_is_its_first() -> None:
    assert nearest_value(Knob("k", ("a", "b")), "c") == "a"
    assert nearest_value(Knob("k", (1, 2)), None) == 1
