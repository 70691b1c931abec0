"""The winner beside the file as it is, under loads that the search has not seen.

The best of many trials has been lucky, too: what it is worth tell loads that did not choose it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from easerve.bench.report import Cell, Section, Table
from easerve.search.objective import Objective, Score
from easerve.search.space import Allocation, Configuration, Space
from easerve.search.trials import student_t

AS_IT_IS = Configuration("as it is", ())
UNCHANGED = Space([Allocation("as it is", {}, {})], [])
"""A file or scenario without any change."""
PERCENT = 100
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Side:
    """``entered``: the objective in ``with``, which ends what it has started."""

    objective: Objective
    configuration: Configuration
    entered: AbstractContextManager[Any]


def confirmed(
    before: Side, winner: Side, seeds: Sequence[int], tick: Callable[[str], None]
) -> dict[str, Any]:
    """A round for each seed: both under its load, one after the other; who begins alternates.

    Raises Unworkable.
    """
    rounds = []
    for number, seed in enumerate(seeds):
        scores: dict[str, Score] = {}
        pair = [("before", before), ("winner", winner)]
        for name, side in pair if number % 2 == 0 else pair[::-1]:
            tick(f"round {number + 1} of {len(seeds)}: {name}")
            with side.entered:
                scores[name] = side.objective.score(side.configuration, seed)
        rounds.append({"seed": seed} | {name: _as_dict(scores[name]) for name, _ in pair})
    return {"rounds": rounds, **_ratio(rounds)}


def _as_dict(score: Score) -> dict[str, float]:
    return {
        "goodput_per_s": score.goodput_per_s,
        "attainment": score.attainment,
        "rate_per_s": score.rate_per_s,
    }


def _ratio(rounds: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Of the means; and half the 95 % interval of the difference, as a part of what it was before,
    None for one round.
    """
    pairs = [(each["before"]["goodput_per_s"], each["winner"]["goodput_per_s"]) for each in rounds]
    before, winner = fmean(a for a, _ in pairs), fmean(b for _, b in pairs)
    if not before:
        return {"ratio": None, "ratio_confidence": None}
    half = None
    if len(pairs) > 1:
        spread = stdev(b - a for a, b in pairs)
        half = student_t(len(pairs) - 1) * spread / len(pairs) ** 0.5 / before
    return {"ratio": winner / before, "ratio_confidence": half}


def in_words(told: dict[str, Any], source: str) -> str:
    """As in ``1.21 ± 0.05 times the goodput of FILE as it is, in 3 rounds under new loads``."""
    ratio, half = told["ratio"], told["ratio_confidence"]
    rounds = f"{len(told['rounds'])} round{'' if len(told['rounds']) == 1 else 's'}"
    if ratio is None:
        winner = fmean(each["winner"]["goodput_per_s"] for each in told["rounds"])
        return (
            f"a goodput of {winner:.3g} req/s in {rounds} under new loads, where {source} as it is "
            "has none"
        )
    more = "" if half is None else f" ± {half:.2f}"
    return f"{ratio:.3f}{more} times the goodput of {source} as it is, in {rounds} under new loads"


def _caveats(told: dict[str, Any], required: float) -> Iterator[str]:
    """What speaks against the winner."""
    ratio, half = told["ratio"], told["ratio_confidence"]
    if ratio is not None and half is not None and ratio + half < 1:
        yield "It is worse than the source as it is."
    elif ratio is not None and ratio - (half or 0.0) <= 1:
        yield "That is within the noise: nothing shows that it is better."
    attained = fmean(each["winner"]["attainment"] for each in told["rounds"])
    if attained < required - ROUNDING:
        yield (
            f"Of its requests {PERCENT * attained:.3g} % keep the promise under these loads, less "
            f"than the {PERCENT * required:g} % that are asked for."
        )


def section(told: dict[str, Any], source: str, required: float) -> Section:
    columns = ["load (seed)", "as it is: goodput, req/s", "attainment, %", "at, req/s"]
    columns += ["winner: goodput, req/s", "attainment, % ", "at, req/s "]
    rows: list[list[Cell]] = [[each["seed"], *_cells(each)] for each in told["rounds"]]
    text = " ".join([f"The winner has {in_words(told, source)}.", *_caveats(told, required)])
    return Section("Confirmation", text, [Table("Side by side", columns, rows)])


def _cells(told: dict[str, Any]) -> Iterator[Cell]:
    for name in ("before", "winner"):
        yield told[name]["goodput_per_s"]
        yield PERCENT * told[name]["attainment"]
        yield told[name]["rate_per_s"]
