"""From the best configuration that is known to the most promising one near it."""

from collections.abc import Iterator, Mapping, Sequence

from easerve.search.methods.points import at, nearest_untried
from easerve.search.space import Configuration, Knob, Space, Value

STRIDES = (1, 2, 4)
"""How many values a step goes on a knob with numbers."""
OTHER = 0.5
"""Between two names, and between a value and none; all the values of a knob with numbers are 1."""
Known = Mapping[Configuration, float]
"""What trials are worth."""


def nearby(space: Space, known: Known) -> Configuration | None:
    """One step from the best, along the knob that was tried least from there, to where what is
    known about the surroundings promises most; None if nothing is left. ``space``: of one
    allocation; ``known``: not empty.
    """
    best = max(known, key=lambda each: known[each])
    moves = [
        [each for each in moves if each not in known]
        for moves in sorted(_moves(space, best), key=lambda moves: _num_in(moves, known))
    ]
    left = next(filter(None, moves), None)
    if left is None:
        return nearest_untried(space, best, known)
    return max(left, key=lambda each: estimate(space, each, known))


def _num_in(moves: Sequence[Configuration], known: Known) -> int:
    return sum(each in known for each in moves)


def _moves(space: Space, start: Configuration) -> Iterator[list[Configuration]]:
    """By knob, with that one changed."""
    own = dict(start.values)
    for knob in space.knobs_of(start.allocation):
        if knob.path in own:
            values = _strides(knob, own[knob.path])
            yield [at(space, start.allocation, {**own, knob.path: value}) for value in values]


def _strides(knob: Knob, value: Value) -> list[Value]:
    if not knob.is_ordered:
        return [each for each in knob.values if each != value]
    index, indices = knob.values.index(value), range(len(knob.values))
    reached = [index + sign * stride for stride in STRIDES for sign in (-1, 1)]
    return [knob.values[each] for each in reached if each in indices]


def estimate(space: Space, configuration: Configuration, known: Known) -> float:
    """The mean of what is known, weighted by the inverse square of the distance (Shepard 1968)."""
    knobs = space.knobs_of(configuration.allocation)
    weights = {each: 1 / _square(knobs, configuration, each) for each in known}
    return sum(weights[each] * known[each] for each in known) / sum(weights.values())


def _square(knobs: list[Knob], one: Configuration, other: Configuration) -> float:
    """Of the distance between two different ones."""
    ours, theirs = dict(one.values), dict(other.values)
    return sum(
        _apart(knob, ours, theirs) ** 2
        for knob in knobs
        if (knob.path in ours, ours.get(knob.path)) != (knob.path in theirs, theirs.get(knob.path))
    )


def _apart(knob: Knob, ours: Mapping[str, Value], theirs: Mapping[str, Value]) -> float:
    if not knob.is_ordered or knob.path not in ours or knob.path not in theirs:
        return OTHER
    indices = [knob.values.index(each[knob.path]) for each in (ours, theirs)]
    return (indices[0] - indices[1]) / (len(knob.values) - 1)
