from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from easerve.search.bandit import FIRST, Arm, choose


def played(rewards: Sequence[Callable[[int], float]], num_trials: int) -> list[list[int]]:
    """The turns of each arm. ``rewards``: what an arm's trial comes to, by its number there."""
    turns: list[list[int]] = [[] for _ in rewards]
    for turn in range(num_trials):
        arms = [
            Arm(len(own), max((reward(k) for k in range(len(own))), default=None))
            for own, reward in zip(turns, rewards, strict=True)
        ]
        index = choose(arms)
        assert index is not None
        turns[index].append(turn)
    return turns


def test_each_has_its_first_trials_before_any_is_compared() -> None:
    turns = played([lambda k: 3.0, lambda k: 0.0, lambda k: -1.0], 3 * FIRST)
    assert [len(own) for own in turns] == [FIRST] * 3


def test_a_losing_candidate_soon_stops_eating_budget() -> None:
    turns = played([lambda k: 3.0, lambda k: 2.1, lambda k: 1.5], 60)
    assert len(turns[0]) >= 50
    assert len(turns[2]) <= 4


def test_a_close_candidate_keeps_a_part_of_it() -> None:
    turns = played([lambda k: 3.0, lambda k: 2.9], 40)
    assert 8 <= len(turns[1]) < len(turns[0])


def test_a_candidate_that_gets_better_gets_it_back() -> None:
    """The second is behind by a tenth until its fifth trial, then ahead by a tenth."""
    turns = played([lambda k: 3.0, lambda k: 2.7 if k < 4 else 3.3], 80)
    turned = turns[1][4]
    after = [turn for turn in turns[1] if turn > turned]
    assert len(after) > 0.7 * (80 - turned)


def test_as_long_as_none_keeps_the_promise_the_nearest_to_it_leads() -> None:
    turns = played([lambda k: -0.4, lambda k: -0.05, lambda k: -1.0], 30)
    assert len(turns[1]) > len(turns[0]) >= len(turns[2])


def test_a_candidate_that_only_fails_is_left_alone() -> None:
    turns = played([lambda k: 1.0, lambda k: -1.0], 40)
    assert len(turns[1]) == FIRST


def test_nothing_is_left_if_all_are_exhausted() -> None:
    assert choose([]) is None
    assert choose([Arm(3, 1.0, True)]) is None


@given(
    st.lists(
        st.builds(Arm, st.integers(0, 5), st.none() | st.floats(-1, 5), st.booleans()),
        max_size=5,
    )
)
def test_it_never_names_an_exhausted_one(arms: list[Arm]) -> None:
    index = choose(arms)
    assert (index is None) == all(arm.is_exhausted for arm in arms)
    assert index is None or not arms[index].is_exhausted
