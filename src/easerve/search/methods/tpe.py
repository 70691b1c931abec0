"""Optuna's TPE (Bergstra et al. 2011), asked anew for each proposal from the history alone.

A knob with numbers is an integer to it, the index of the value, so that values are as far from each
other as their places. The values of a knob that is not at work are not told: knobs are modelled in
the groups that they occur in.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning

from easerve.search.methods.points import nearest_untried, nearest_value, rng
from easerve.search.space import Configuration, Knob, Space, Value, is_at_work
from easerve.search.trials import Trial, worths

ALLOCATION = "allocation"
NUM_ASKED = 4
"""Proposals before a neighbour of the last one is taken, if all of them were tried already."""


@dataclass(frozen=True)
class Tpe:
    """Over everything at once, the allocation among it. ``num_startup``: trials before it models
    anything, drawn at random.
    """

    space: Space
    seed: int = 0
    num_startup: int = 10
    name: str = "tpe"
    is_blind: bool = False

    def propose(self, trials: Sequence[Trial]) -> Configuration | None:
        return suggest(self.space, trials, str(self.seed), self.num_startup)


def suggest(
    space: Space, trials: Sequence[Trial], seed: str, num_startup: int
) -> Configuration | None:
    """One that is not in ``trials``, all of which are of this space; None if there is none left."""
    tried = {each.configuration for each in trials}
    study = as_study(space, trials)
    asked = None
    for number in range(NUM_ASKED):
        study.sampler = _sampler(rng(seed, len(trials), number).getrandbits(32), num_startup)
        asked = _ask(study, space)
        if asked not in tried:
            return asked
    assert asked is not None
    return nearest_untried(space, asked, tried)


def _sampler(seed: int, num_startup: int) -> optuna.samplers.TPESampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # of ``group``
        return optuna.samplers.TPESampler(
            n_startup_trials=num_startup,
            seed=seed,
            multivariate=True,
            group=True,
        )


def as_study(space: Space, trials: Sequence[Trial]) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    for trial, worth in zip(trials, worths(trials), strict=True):
        params, distributions = _told(space, trial.configuration)
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=distributions, value=worth)
        )
    return study


def _told(
    space: Space, configuration: Configuration
) -> tuple[dict[str, Value], dict[str, BaseDistribution]]:
    """Parameters of a trial and where they come from, for what there is a choice of."""
    names = [each.name for each in space.allocations]
    params: dict[str, Value] = {}
    distributions: dict[str, BaseDistribution] = {}
    if len(names) > 1:
        params[ALLOCATION] = configuration.allocation
        distributions[ALLOCATION] = CategoricalDistribution(names)
    values = dict(configuration.values)
    for knob in _widest(space):
        if values.get(knob.path) in knob.values and knob.path in values and len(knob.values) > 1:
            index = knob.values.index(values[knob.path])
            params[knob.path] = index if knob.is_ordered else values[knob.path]
            distributions[knob.path] = _distribution(knob)
    return params, distributions


def _widest(space: Space) -> list[Knob]:
    """Each knob as the allocation has it that leaves most to choose. A knob that is told for some
    allocations only would be modelled apart from the others.
    """
    own = [space.knobs_of(each.name) for each in space.allocations]
    return [max(same, key=lambda each: len(each.values)) for same in zip(*own, strict=True)]


def _distribution(knob: Knob) -> BaseDistribution:
    if knob.is_ordered:
        return IntDistribution(0, len(knob.values) - 1)
    return CategoricalDistribution(knob.values)


def _ask(study: optuna.Study, space: Space) -> Configuration:
    trial = study.ask()
    allocation = space.allocations[0].name
    if len(space.allocations) > 1:
        names = [each.name for each in space.allocations]
        allocation = trial.suggest_categorical(ALLOCATION, names)
    chosen: dict[str, Value] = {}
    for knob, widest in zip(space.knobs_of(allocation), _widest(space), strict=True):
        if is_at_work(knob, chosen):
            chosen[knob.path] = nearest_value(knob, _asked(trial, widest))
    return Configuration(allocation, tuple(chosen.items()))


def _asked(trial: optuna.Trial, knob: Knob) -> Value:
    if len(knob.values) == 1:
        return knob.values[0]
    if knob.is_ordered:
        return knob.values[trial.suggest_int(knob.path, 0, len(knob.values) - 1)]
    return trial.suggest_categorical(knob.path, knob.values)
