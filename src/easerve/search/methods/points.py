"""Moves in a space: draw a configuration, put one value in place of another, find a neighbour.

A space may have millions of configurations, so that none of these lists it, but where almost all of
it was tried.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from random import Random

from easerve.search.space import Configuration, Knob, Space, Value

MAX_DRAWS = 1000


def rng(*of: object) -> Random:
    """The same for the same values."""
    return Random(":".join(map(str, of)))  # noqa: S311, to draw what to try


def nearest_value(knob: Knob, wish: Value) -> Value:
    """Of the knob's values, the wish or what is closest to it; the first, for names."""
    if wish in knob.values:
        return wish
    if not knob.is_ordered or not isinstance(wish, int | float):
        return knob.values[0]
    return min(knob.values, key=lambda value: abs(float(value or 0) - wish))


def at(space: Space, allocation: str, wishes: Mapping[str, Value]) -> Configuration:
    """The configuration of an allocation with these values, as near as it has them; a knob without
    a wish has its first value.
    """
    knobs = space.knobs_of(allocation)
    values = {each.path: nearest_value(each, wishes.get(each.path)) for each in knobs}
    return space.configuration(allocation, values)


def draw(space: Space, random: Random) -> Configuration:
    """Each configuration is as likely as any other.

    All knobs are drawn, and a draw counts if those that are not at work have their first values:
    else what has knobs at rest would come once for each of their values.
    """
    knobs = {each.name: space.knobs_of(each.name) for each in space.allocations}
    weights = [math.prod(len(knob.values) for knob in own) for own in knobs.values()]
    while True:
        (allocation,) = random.choices(list(knobs), weights)
        values = {knob.path: random.randrange(len(knob.values)) for knob in knobs[allocation]}
        drawn = {knob.path: knob.values[values[knob.path]] for knob in knobs[allocation]}
        configuration = space.configuration(allocation, drawn)
        at_work = {path for path, _ in configuration.values}
        if not any(index for path, index in values.items() if path not in at_work):
            return configuration


def draw_untried(
    space: Space, tried: Collection[Configuration], random: Random
) -> Configuration | None:
    """Each that was not tried is as likely as any other; None if there is none."""
    for _ in range(MAX_DRAWS):
        configuration = draw(space, random)
        if configuration not in tried:
            return configuration
    left = [each for each in space if each not in tried]
    return random.choice(left) if left else None


def neighbours(space: Space, configuration: Configuration) -> Iterator[Configuration]:
    """With one knob a step up or down, or with another name; then of the other allocations."""
    own = dict(configuration.values)
    for knob in space.knobs_of(configuration.allocation):
        if knob.path in own:
            for value in steps(knob, own[knob.path]):
                yield at(space, configuration.allocation, {**own, knob.path: value})
    for each in space.allocations:
        if each.name != configuration.allocation:
            yield at(space, each.name, own)


def steps(knob: Knob, value: Value) -> list[Value]:
    """The next values down and up, or all the other names."""
    index = knob.values.index(value)
    if knob.is_ordered:
        return [*knob.values[max(0, index - 1) : index], *knob.values[index + 1 : index + 2]]
    return [each for each in knob.values if each != value]


def nearest_untried(
    space: Space, start: Configuration, tried: Collection[Configuration]
) -> Configuration | None:
    """By the number of steps, the first of equals; None if everything was tried."""
    seen, waiting = {start}, deque([start])
    while waiting:
        configuration = waiting.popleft()
        if configuration not in tried:
            return configuration
        new = [each for each in neighbours(space, configuration) if each not in seen]
        seen.update(new)
        waiting.extend(new)
    return next((each for each in space if each not in tried), None)
