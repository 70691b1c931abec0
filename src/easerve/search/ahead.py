"""Scores made ahead, in other processes, while a study reads them one by one in its own order."""

from concurrent.futures import Executor, Future

from easerve.search.objective import Objective, Score
from easerve.search.space import Configuration


class Ahead:
    """``objective`` and what it is asked for go to processes: they have to be picklable. ``width``:
    how many scores may wait to be read or made. What was made and not read is lost when a search is
    killed.
    """

    def __init__(self, objective: Objective, executor: Executor, width: int) -> None:
        self._objective = objective
        self._executor = executor
        self._width = width
        self._made: dict[tuple[Configuration, int], Future[Score]] = {}

    @property
    def num_free(self) -> int:
        return self._width - len(self._made)

    def expect(self, configuration: Configuration, seed: int) -> None:
        """It will be asked for soon."""
        asked = (configuration, seed)
        if asked not in self._made and self.num_free > 0:
            self._made[asked] = self._executor.submit(self._objective.score, configuration, seed)

    def score(self, configuration: Configuration, seed: int) -> Score:
        """As the objective's."""
        made = self._made.pop((configuration, seed), None)
        if made is None:
            made = self._executor.submit(self._objective.score, configuration, seed)
        return made.result()

    def forget(self, configuration: Configuration | None = None) -> None:
        """What was expected of it, or all, is not needed. What runs already runs to its end."""
        for asked in [each for each in self._made if configuration in (None, each[0])]:
            self._made.pop(asked).cancel()
