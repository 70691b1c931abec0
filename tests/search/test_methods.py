"""What holds for every method; the methods' own tests are beside them in ``methods``."""

from collections.abc import Callable

import pytest

from easerve.search.methods.method import METHODS, Candidate, Method, method
from easerve.search.objective import Score
from easerve.search.space import Configuration, Space
from easerve.search.trials import Trial
from tests.search.landscapes import ridge, ruled, space


def made(name: str, of: Space, seed: int) -> Method:
    first = of.allocations[0].name
    starts = tuple(each for _, each in zip(range(3), of.of(first), strict=False))
    others = [Candidate(each.name) for each in of.allocations[1:]]
    return method(name, of, seed, [Candidate(first, starts), *others])


def history(by: Method, goodput: Callable[[Configuration], float], num_trials: int) -> list[Trial]:
    trials: list[Trial] = []
    while len(trials) < num_trials and (configuration := by.propose(trials)) is not None:
        score = Score(goodput(configuration), 0.95, 4.0)
        trials.append(Trial(len(trials), configuration, 0.9, (score,), (None,), "complete"))
    return trials


def lumpy(configuration: Configuration) -> float:
    """Of ``ruled``: no order that a method could lean on."""
    return len(repr(configuration)) * 7 % 11 / 11


@pytest.mark.parametrize("name", METHODS)
def test_everything_is_tried_once_and_then_nothing_is_left(name: str) -> None:
    everything = list(ruled())
    found = history(made(name, ruled(), 1), lumpy, len(everything) + 1)
    assert len(found) == len(everything)
    assert {each.configuration for each in found} == set(everything)


@pytest.mark.parametrize("name", METHODS)
def test_a_proposal_is_a_function_of_history_and_seed(name: str) -> None:
    """Another object, after the same history, proposes what the first one did."""
    found = history(made(name, space(), 3), ridge, 14)
    for num in (0, 1, 5, 13):
        assert made(name, space(), 3).propose(found[:num]) == found[num].configuration


@pytest.mark.parametrize("name", ["has", "tpe", "random", "coordinate"])
def test_another_seed_is_another_search(name: str) -> None:
    one, other = (history(method(name, space(), seed), ridge, 14) for seed in (1, 2))
    assert [each.configuration for each in one] != [each.configuration for each in other]


@pytest.mark.parametrize("name", METHODS)
def test_every_proposal_is_in_the_space(name: str) -> None:
    known = set(space())
    assert all(each.configuration in known for each in history(made(name, space(), 2), ridge, 12))


@pytest.mark.parametrize("name", METHODS)
def test_blind_methods_and_only_those_do_not_read_results(name: str) -> None:
    by = made(name, space(), 5)
    one, other = (history(by, goodput, 20) for goodput in (ridge, lambda each: 3 - ridge(each)))
    same = [each.configuration for each in one] == [each.configuration for each in other]
    assert same == by.is_blind


@pytest.mark.parametrize("name", METHODS)
def test_failed_and_stopped_trials_are_no_obstacle(name: str) -> None:
    by = made(name, ruled(), 1)
    trials: list[Trial] = []
    for number in range(16):
        configuration = by.propose(trials)
        assert configuration is not None
        trial = Trial(number, configuration, 0.9, state="failed", why="no engine starts")
        if number % 3:
            score = Score(1.0, 0.5 + 0.02 * number, 1.0)
            trial = Trial(number, configuration, 0.9, (score,), (None,), "pruned")
        trials.append(trial)
    assert len({each.configuration for each in trials}) == len(trials)


def test_an_unknown_method_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'anneal' is none of has, tpe, random"):
        method("anneal", space(), 1)
