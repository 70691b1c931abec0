"""When a trial is hopeless. Every configuration meets the same loads, seed by seed, so that two are
compared over the seeds that both have met, and little is left of the loads' own luck.
"""

from collections.abc import Sequence
from statistics import fmean

from easerve.search.objective import Score
from easerve.search.trials import Trial, mean_over

MARGINS = (0.15, 0.05)
"""After the first seed, and after any later one: of goodput relative, of attainment as it is."""


def hopeless(
    scores: Sequence[Score], num_seeds: int, required: float, incumbent: Trial | None
) -> str:
    """Why a trial with these scores, of the first of its seeds, is given up; empty: it goes on.

    Without an incumbent, which is the best feasible trial before it, only what cannot keep the
    promise any more is given up.
    """
    attained = fmean(each.attainment for each in scores)
    lacking = num_seeds - len(scores)
    if len(scores) * attained + lacking < required * num_seeds:
        return f"attainment {attained:.3f} after {len(scores)} of {num_seeds} seeds: out of reach"
    if incumbent is None:
        return ""
    margin = MARGINS[min(len(scores), len(MARGINS)) - 1]
    if attained < required - margin:
        return f"attainment {attained:.3f} after {len(scores)} of {num_seeds} seeds"
    goodput, best = fmean(each.goodput_per_s for each in scores), mean_over(incumbent, len(scores))
    if goodput < (1 - margin) * best:
        return f"goodput {goodput:.3g}/s, trial {incumbent.number} has {best:.3g}/s over the same"
    return ""
