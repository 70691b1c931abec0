"""HAS: a TPE of its own for each allocation that pruning kept, begun at its starting points, and a
bandit that says whose turn it is.

Every other turn of a candidate is a step from its best configuration: with as few trials as a
candidate gets, the TPE's model stays wide, and the last few per cent are found step by step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from easerve.search.bandit import Arm, choose
from easerve.search.methods.method import Candidate
from easerve.search.methods.nearby import Known, nearby
from easerve.search.space import Configuration, Space
from easerve.search.trials import Trial, worths


@dataclass(frozen=True)
class Has:
    """Proposes configurations of the candidates alone. A candidate's starts come before what its
    TPE proposes, in their order.
    """

    space: Space
    candidates: tuple[Candidate, ...]
    seed: int = 0
    name: str = "has"
    is_blind: bool = False

    def propose(self, trials: Sequence[Trial]) -> Configuration | None:
        worth = worths(trials)
        own = [self._own(each, trials, worth) for each in self.candidates]
        arms = [self._arm(*each) for each in zip(self.candidates, own, strict=True)]
        index = choose(arms)
        return None if index is None else self._of(self.candidates[index], trials, own[index])

    def _own(self, candidate: Candidate, trials: Sequence[Trial], worth: Sequence[float]) -> Known:
        return {
            trial.configuration: value
            for trial, value in zip(trials, worth, strict=True)
            if trial.configuration.allocation == candidate.allocation
        }

    def _arm(self, candidate: Candidate, own: Known) -> Arm:
        is_exhausted = all(each in own for each in self.space.of(candidate.allocation))
        return Arm(len(own), max(own.values(), default=None), is_exhausted)

    def _of(
        self, candidate: Candidate, trials: Sequence[Trial], own: Known
    ) -> Configuration | None:
        """The next of a candidate, from its own trials alone."""
        for start in candidate.starts:
            if start not in own:
                return start
        name, num_after = candidate.allocation, len(own) - len(candidate.starts)
        space = self.space.restricted([name])
        if own and num_after % 2 == 0:
            return nearby(space, own)
        from easerve.search.methods.tpe import suggest

        told = [each for each in trials if each.configuration in own]
        return suggest(space, told, f"{self.seed}:{name}", num_startup=0)
