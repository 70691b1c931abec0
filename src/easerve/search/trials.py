"""A trial and what a history of trials says: the winner, and what each trial is worth to a method.

A history is in order of number and holds finished trials only, wherever a method reads it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Literal

from easerve.search.objective import Score
from easerve.search.space import Configuration

State = Literal["running", "complete", "pruned", "failed"]
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""0.975 quantile of Student's t with 1, 2, ... 10 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration, scored with as many of the objective's seeds as it came to.

    ``scores``: in the order of the seeds, finite numbers only. ``sources``: beside each score, the
    study and trial that it was made in, None for this one. ``state``: ``pruned`` was stopped early,
    ``failed`` could not be scored; ``why`` says it. ``required``: attainment, of the objective.
    """

    number: int
    configuration: Configuration
    required: float
    scores: tuple[Score, ...] = ()
    sources: tuple[str | None, ...] = ()
    state: State = "running"
    why: str = ""

    @property
    def cached(self) -> bool:
        """Nothing was measured for it: an earlier study had every score."""
        return bool(self.sources) and None not in self.sources

    @property
    def goodput_per_s(self) -> float | None:
        """Mean over the seeds so far; None without a score."""
        return fmean(each.goodput_per_s for each in self.scores) if self.scores else None

    @property
    def attainment(self) -> float | None:
        """Mean over the seeds so far; None without a score. Exact where all are alike: a plain mean
        of scores that are just what is required may come out below it, by rounding.
        """
        if not self.scores:
            return None
        least = min(each.attainment for each in self.scores)
        return least + fmean(each.attainment - least for each in self.scores)

    @property
    def confidence_per_s(self) -> float | None:
        """Half the width of the 95 % interval of the mean goodput, by Student's t over the seeds;
        None for fewer than two.
        """
        if len(self.scores) < 2:
            return None
        spread = stdev(each.goodput_per_s for each in self.scores)
        return student_t(len(self.scores) - 1) * spread / math.sqrt(len(self.scores))

    @property
    def is_feasible(self) -> bool:
        """Scored with every seed, and the promise is kept to enough of all requests."""
        attained = self.attainment
        return self.state == "complete" and attained is not None and attained >= self.required


def best(trials: Sequence[Trial]) -> Trial | None:
    """Of the feasible ones that with the highest mean goodput, the first of equals; None if no
    trial keeps the promise.
    """
    feasible = [each for each in trials if each.is_feasible]
    return max(feasible, key=lambda each: each.goodput_per_s or 0.0, default=None)


def worths(trials: Sequence[Trial]) -> list[float]:
    """One number for each trial, by which any two of a history compare; higher is better.

    Mean goodput where the promise is kept, else what is lacking in attainment, as a number below
    zero; -1 for one that failed. Some seeds are easier than others: a trial that was stopped early
    is set against the best complete one over the seeds that both have.
    """
    complete = [each for each in trials if each.state == "complete" and each.scores]
    reference = max(complete, key=lambda each: each.goodput_per_s or 0.0, default=None)
    return [_worth(each, reference) for each in trials]


def _worth(trial: Trial, reference: Trial | None) -> float:
    goodput, attained = trial.goodput_per_s, trial.attainment
    if trial.state == "failed" or goodput is None or attained is None:
        return -1.0
    if attained < trial.required:
        return attained - trial.required
    if trial.state == "complete" or reference is None:
        return goodput
    same = mean_over(reference, len(trial.scores))
    return goodput * (reference.goodput_per_s or 0.0) / same if same else goodput


def mean_over(trial: Trial, num_seeds: int) -> float:
    """Mean goodput over the first seeds."""
    return fmean(each.goodput_per_s for each in trial.scores[:num_seeds])


def student_t(degrees: int) -> float:
    """0.975 quantile, within 0.001: beyond the table, the expansion about the normal one
    (Abramowitz and Stegun 26.7.5).
    """
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(degrees) ** power for power, term in enumerate(terms, start=1))
