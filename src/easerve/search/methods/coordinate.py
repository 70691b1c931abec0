"""Coordinate descent: from a random point, one knob after the other, the allocation among them,
until none helps; then anew from another.

For every proposal the walk is done again from its beginning, with the history in place of the runs:
the first configuration on its way that the history does not have is the proposal.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from easerve.search.methods.points import at, draw_untried, rng
from easerve.search.space import Configuration, Space, Value
from easerve.search.trials import Trial, worths

ALLOCATION = "allocation"
Point = Mapping[str, Value]
"""A value for the allocation and for every knob, also for those that are not at work: a value that
an allocation has no use for is not lost to the next one."""
Known = Mapping[Configuration, float]


@dataclass(frozen=True)
class Coordinate:
    space: Space
    seed: int = 0
    name: str = "coordinate"
    is_blind: bool = False

    def propose(self, trials: Sequence[Trial]) -> Configuration | None:
        values = zip(trials, worths(trials), strict=True)
        known = {trial.configuration: worth for trial, worth in values}
        return next((each for each in self._walk(known) if each not in known), None)

    def _walk(self, known: Known) -> Iterator[Configuration]:
        """What it visits, some of it more than once. What was handed out is looked up when the
        next is asked for.
        """
        seen: set[Configuration] = set()
        for number in count():
            start = draw_untried(self.space, seen, rng(self.seed, number))
            if start is None:
                return
            for configuration in self._descent(start, known):
                seen.add(configuration)
                yield configuration

    def _descent(self, start: Configuration, known: Known) -> Iterator[Configuration]:
        point: Point = {ALLOCATION: start.allocation, **dict(start.values)}
        yield self._configuration(point)
        moved = True
        while moved:
            before = point
            for coordinate in [ALLOCATION, *(knob.path for knob in self.space.knobs)]:
                point = yield from self._along(coordinate, point, known)
            moved = point != before

    def _along(
        self, coordinate: str, point: Point, known: Known
    ) -> Generator[Configuration, None, Point]:
        """To the best point on one axis: up and down as long as it helps, or over all names."""
        values, is_ordered = self._axis(coordinate)
        here = values.index(point[coordinate]) if point.get(coordinate) in values else 0
        up, down = values[here + 1 :], values[:here][::-1]
        for side in (up, down):
            for value in side:
                there = {**point, coordinate: value}
                yield self._configuration(there)
                if self._worth(there, known) > self._worth(point, known):
                    point = there
                elif is_ordered:
                    break
        return point

    def _axis(self, coordinate: str) -> tuple[Sequence[Value], bool]:
        """Its values, and whether neighbours are alike."""
        if coordinate == ALLOCATION:
            return [each.name for each in self.space.allocations], False
        (knob,) = (each for each in self.space.knobs if each.path == coordinate)
        return knob.values, knob.is_ordered

    def _configuration(self, point: Point) -> Configuration:
        return at(self.space, str(point[ALLOCATION]), point)

    def _worth(self, point: Point, known: Known) -> float:
        return known[self._configuration(point)]
