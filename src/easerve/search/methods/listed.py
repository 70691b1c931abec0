"""Methods that read no results: all in order, or any that was not tried."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from easerve.search.methods.points import draw_untried, rng
from easerve.search.space import Configuration, Space
from easerve.search.trials import Trial


@dataclass(frozen=True)
class Grid:
    """Everything, in the order of the space."""

    space: Space
    seed: int = 0
    name: str = "grid"
    is_blind: bool = True

    def propose(self, trials: Sequence[Trial]) -> Configuration | None:
        tried = {each.configuration for each in trials}
        return next((each for each in self._first(len(tried) + 1) if each not in tried), None)

    def _first(self, num: int) -> list[Configuration]:
        """Of the space; what was listed once is kept."""
        known, rest = self._listed
        known.extend(islice(rest, max(0, num - len(known))))
        return known[:num]

    @cached_property
    def _listed(self) -> tuple[list[Configuration], Iterator[Configuration]]:
        return [], iter(self.space)


@dataclass(frozen=True)
class Drawn:
    """Any that was not tried, all as likely."""

    space: Space
    seed: int = 0
    name: str = "random"
    is_blind: bool = True

    def propose(self, trials: Sequence[Trial]) -> Configuration | None:
        tried = {each.configuration for each in trials}
        return draw_untried(self.space, tried, rng(self.seed, len(trials)))
