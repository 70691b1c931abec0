"""How much each knob matters among what was tried, by PED-ANOVA (Watanabe, Bansal and Hutter 2023).

It asks which knobs tell the best tenth of the trials from all of them. Of knobs that are not at
work in every trial nothing is said.
"""

import warnings
from collections.abc import Sequence

from easerve.search.space import Space
from easerve.search.trials import Trial

LEAST = 10
"""Trials, below which nothing can be said."""


def importance(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """By the path of the knob, or ``allocation``; the most important first, 1 in all. Empty where
    there are too few trials, or all are worth the same.
    """
    import optuna
    from optuna.exceptions import ExperimentalWarning
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    from easerve.search.methods.tpe import as_study

    complete = [each for each in trials if each.state == "complete"]
    if len(complete) < LEAST or len({each.goodput_per_s for each in complete}) < 2:
        return {}
    study = as_study(space, complete)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.simplefilter("ignore", UserWarning)  # of few trials; the text says so
        evaluator = PedAnovaImportanceEvaluator()
        try:
            found = get_param_importances(study, evaluator=evaluator)
        except (ValueError, optuna.exceptions.OptunaError):
            return {}  # no knob differs among the best
    return {name: round(share, 4) for name, share in found.items()}
