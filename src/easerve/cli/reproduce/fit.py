"""Named knobs, and the search that chooses their values.

``fitted.yaml`` names scenarios, and for each knob its choices, why it is one and which is chosen.
A choice is a set of changes to a scenario; the first is always none at all. The search goes from
knob to knob and keeps the choice with the least error while the others stay, until a round changes
nothing; then every knob without which the error is less than 5 % larger is left alone.

The error is the mean of the squared logarithm of simulated over published, over the anchors of the
named scenarios alone that are no ratios, with one seed. A figure that is off by more than a factor
of two counts as if by two: what no knob can mend must not pull at the others.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, model_validator

from easerve.cli.reproduce.book import Book
from easerve.cli.reproduce.plan import FITTED, UNTUNED, Knobs, Study, quick_points
from easerve.cli.reproduce.runner import Outcome, run
from easerve.cli.reproduce.verdicts import Results
from easerve.config import Section, read_section

MAX_ROUNDS = 5
LEAST_GAIN = 0.05
WORST_LOG = math.log(2)
"""The most that a figure can count, and one that a simulation does not have."""
HEAD = """\
# Knobs that are fitted, on the scenarios named here and no other. easerve reproduce --fit chooses
# and writes this file: each choice is a set of changes, the first is none.
"""


class Knob(Section):
    """``chosen``: the place of the choice that is in force."""

    why: Annotated[str, Field(min_length=1)]
    choices: Annotated[tuple[Mapping[str, Any], ...], Field(min_length=1)]
    chosen: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if self.choices[0]:
            raise ValueError("choices: the first one must be {}, which changes nothing")
        if self.chosen >= len(self.choices):
            raise ValueError(f"chosen {self.chosen}: there are {len(self.choices)} choices, from 0")
        return self


class Fit(Section):
    """``scenarios``: names of files, without ending, whose anchors are fitted."""

    scenarios: Annotated[tuple[str, ...], Field(min_length=1)]
    knobs: Mapping[str, Knob] = {}

    @property
    def chosen(self) -> tuple[int, ...]:
        return tuple(knob.chosen for knob in self.knobs.values())

    def changes(self, chosen: Sequence[int]) -> Knobs:
        """Of all knobs together; of two that change the same key, the later one counts."""
        made: dict[str, Any] = {}
        for knob, place in zip(self.knobs.values(), chosen, strict=True):
            made.update(knob.choices[place])
        return made

    def with_chosen(self, chosen: Sequence[int]) -> Self:
        pairs = zip(self.knobs.items(), chosen, strict=True)
        knobs = {name: knob.model_copy(update={"chosen": place}) for (name, knob), place in pairs}
        return self.model_copy(update={"knobs": knobs})


def read(path: Path) -> Fit:
    """Raises ConfigError."""
    return read_section(path, Fit)


def write(fit: Fit, path: Path) -> None:
    """Raises OSError."""
    text = yaml.safe_dump(fit.model_dump(mode="json"), sort_keys=False, width=88)
    path.write_text(HEAD + text)


def search(
    sizes: Sequence[int], start: Sequence[int], error: Callable[[tuple[int, ...]], float]
) -> tuple[tuple[int, ...], float]:
    """The places with the least error that the search comes to, and that error.

    ``sizes``: the number of choices of each knob. Of equal errors the earlier choice is kept.
    """
    best = tuple(start)
    least = error(best)
    for _ in range(MAX_ROUNDS):
        before = best
        for at, size in enumerate(sizes):
            for place in range(size):
                tried = (*best[:at], place, *best[at + 1 :])
                if tried != best and (found := error(tried)) < least:
                    best, least = tried, found
        if best == before:
            break
    return best, least


def pruned(
    chosen: tuple[int, ...], least: float, error: Callable[[tuple[int, ...]], float]
) -> tuple[tuple[int, ...], float]:
    """Without the knobs that bring too little, the least useful first; and the error then."""
    while True:
        without = [
            (error(tried), tried)
            for at, place in enumerate(chosen)
            if place
            for tried in [(*chosen[:at], 0, *chosen[at + 1 :])]
        ]
        found, tried = min(without, default=(math.inf, chosen))
        if found > least * (1 + LEAST_GAIN):
            return chosen, least
        chosen, least = tried, found


def fitted(
    fit: Fit, studies: Sequence[Study], jobs: int, tick: Callable[[str], None]
) -> tuple[Fit, float, float]:
    """With the best choices, and the errors without any and with them.

    The search starts at no change at all. Raises ConfigError.
    """
    known: dict[str, Outcome] = {}

    def error(chosen: tuple[int, ...]) -> float:
        changes = fit.changes(chosen)
        found = error_of(changes, studies, jobs, known)
        tick(f"error {found:.4f} with {changes or 'nothing'}")
        return found

    start = (0,) * len(fit.knobs)
    sizes = [len(knob.choices) for knob in fit.knobs.values()]
    chosen, least = pruned(*search(sizes, start, error), error)
    return fit.with_chosen(chosen), error(start), least


def error_of(
    changes: Knobs, studies: Sequence[Study], jobs: int, known: dict[str, Outcome]
) -> float:
    changed = [replace(study, knobs={UNTUNED: {}, FITTED: changes}) for study in studies]
    points = [point for study in changed for point in quick_points(study, [FITTED])]
    outcomes = run(changed, points, jobs, known=known)
    book = Book(changes, {}, {point: outcome.figures for point, outcome in outcomes.items()})
    return squared_log_error(Results(book), changed, FITTED)


def squared_log_error(results: Results, studies: Sequence[Study], knobs: str) -> float:
    """Mean over the anchors that are no ratios."""
    errors = []
    for study in studies:
        for anchor in study.scenario.anchors:
            if anchor.over is None:
                simulated = results.simulated(study, knobs, anchor)
                off = abs(math.log(simulated / anchor.published)) if simulated else WORST_LOG
                errors.append(min(off, WORST_LOG) ** 2)
    return fmean(errors) if errors else 0.0
