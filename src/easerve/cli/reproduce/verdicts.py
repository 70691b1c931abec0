"""Published figures beside simulated ones, and what is to be said of each pair.

``within 25 %``: the simulated figure is within 25 % of the published one; of a ratio it is the
change, the ratio less one, that is judged, or else a small change could not be missed; a hundredth
is forgiven. ``direction only``: not that near, but the difference to every rival has the published
sign and, in logarithms, at least a third of the published size. Rivals are the other systems and
variants with an anchor of the same metric and rate in the same scenario; a ratio is its own
difference. ``not reproduced``: the rest.

A baseline's verdict may hang on the engines that it was given: ``elsewhere`` is what its anchor
comes to with the topology that is best for that very figure, untuned, with one seed, while its
rivals stay as they are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any, NamedTuple

from easerve.cli.reproduce.book import Book
from easerve.cli.reproduce.plan import (
    KNOB_SETS,
    UNTUNED,
    Point,
    Side,
    Study,
    effective,
    rates,
    sides,
)
from easerve.cli.reproduce.runner import Figures
from easerve.sim.scenario import Anchor

NEAR = 0.25
LEAST_SHARE = 1 / 3
FORGIVEN = 0.01
TIMES = ("ttft_s", "tpot_s")
"""Metrics of which less is better."""


class Verdict(StrEnum):
    WITHIN = "within 25 %"
    DIRECTION = "direction only"
    NOT = "not reproduced"


def is_within(anchor: Anchor, simulated: float) -> bool:
    if anchor.over is None:
        return abs(simulated - anchor.published) <= NEAR * abs(anchor.published)
    change = anchor.published - 1
    return abs(simulated - anchor.published) <= max(NEAR * abs(change), FORGIVEN)


def has_direction(published_ratio: float, simulated_ratio: float) -> bool:
    """Whether the ratio to a rival is on the published side of one, and by enough."""
    if published_ratio == 1:
        return False
    share = math.log(simulated_ratio) / math.log(published_ratio)
    return share >= LEAST_SHARE


def is_rival(anchor: Anchor, other: Anchor) -> bool:
    same = (other.metric, other.rate_per_s) == (anchor.metric, anchor.rate_per_s)
    whose = (other.system, other.variant) != (anchor.system, anchor.variant)
    return same and whose and other.over is None


def verdict(
    anchor: Anchor, simulated: float | None, rivals: Sequence[tuple[Anchor, float | None]]
) -> Verdict:
    """``rivals``: with their simulated figures. A figure that does not exist, or is 0, is not
    reproduced, nor is one whose rival has none.
    """
    if not simulated or simulated < 0:
        return Verdict.NOT
    if is_within(anchor, simulated):
        return Verdict.WITHIN
    if anchor.over is not None:
        right = has_direction(anchor.published, simulated)
        return Verdict.DIRECTION if right else Verdict.NOT
    right = bool(rivals) and all(
        theirs is not None
        and theirs > 0
        and has_direction(anchor.published / rival.published, simulated / theirs)
        for rival, theirs in rivals
    )
    return Verdict.DIRECTION if right else Verdict.NOT


class Best(NamedTuple):
    """A figure at its best topology and rate; ``topology`` "": the scenario as it is."""

    value: float
    topology: str
    rate_per_s: float


class Elsewhere(NamedTuple):
    """An anchor of a baseline at that one's best topology."""

    topology: str
    simulated: float
    verdict: Verdict


class Compared(NamedTuple):
    """An anchor. ``simulated`` and ``verdicts``: by the set of knobs. ``elsewhere``: None if the
    anchor is of no baseline, or if that is at its best as it is.
    """

    study: Study
    anchor: Anchor
    simulated: Mapping[str, float | None]
    verdicts: Mapping[str, Verdict]
    elsewhere: Elsewhere | None

    @property
    def depends(self) -> bool:
        """Whether the verdict is another one at the baseline's best topology."""
        return self.elsewhere is not None and self.elsewhere.verdict is not self.verdicts[UNTUNED]

    def as_dict(self) -> dict[str, Any]:
        anchor = self.anchor.model_dump(mode="json")
        return {
            "scenario": self.study.name,
            **anchor,
            "simulated": dict(self.simulated),
            "verdict": dict(self.verdicts),
            "best_topology": self.elsewhere and self.elsewhere._asdict(),
        }


@dataclass(frozen=True, slots=True)
class Results:
    """Figures of a book: the median over the seeds that are there."""

    book: Book

    def figures(self, study: Study, knobs: str, side: Side, rate_per_s: float) -> Sequence[Figures]:
        """A seed each, those that are there."""
        head = (study.name, knobs, effective(study, side), side.system, rate_per_s)
        points = [Point(*head, seed) for seed in study.seeds]
        return [self.book.runs[point] for point in points if point in self.book.runs]

    def value(
        self, study: Study, knobs: str, side: Side, rate_per_s: float, metric: str
    ) -> float | None:
        """None if the metric has no value in a run, or there is no run."""
        found = [each.get(metric) for each in self.figures(study, knobs, side, rate_per_s)]
        there = [each for each in found if each is not None]
        return median(there) if there and len(there) == len(found) else None

    def best(
        self, study: Study, knobs: str, side: Side, rates_per_s: Sequence[float], metric: str
    ) -> float | None:
        """The largest of several rates."""
        values = [self.value(study, knobs, side, rate, metric) for rate in rates_per_s]
        return max((each for each in values if each is not None), default=None)

    def at(self, study: Study, system: str, topology: str, rate_per_s: float) -> Figures:
        """Of a system at a topology, untuned, with the first seed; empty if there is no run."""
        where = effective(study, Side(system, topology))
        head = (study.name, UNTUNED, where, system, rate_per_s)
        return self.book.runs.get(Point(*head, study.seeds[0]), {})

    def best_topology(
        self, study: Study, system: str, rates_per_s: Sequence[float], metric: str
    ) -> Best | None:
        """The largest figure, or the least of times; of equal ones the first. None if none is."""
        found = []
        for topology in topologies(study, system):
            for rate_per_s in rates_per_s:
                value = self.at(study, system, topology, rate_per_s).get(metric)
                if value is not None:
                    found.append(Best(value, topology, rate_per_s))
        choose = min if metric.startswith(TIMES) else max
        return choose(found, key=lambda best: best.value, default=None)

    def simulated(self, study: Study, knobs: str, anchor: Anchor) -> float | None:
        rates_per_s = rates(study, anchor)
        values = [
            self.best(study, knobs, side, rates_per_s, anchor.metric) for side in sides(anchor)
        ]
        own = values[0]
        if anchor.over is None or own is None:
            return own
        return own / values[1] if values[1] else None


def topologies(study: Study, system: str) -> list[str]:
    """Of a system; the scenario as it is comes first."""
    return ["", *(name for name in study.topologies if system in study.systems(name))]


def baseline(study: Study, anchor: Anchor) -> str | None:
    """The system other than ours that an anchor is of, or that it is divided by."""
    others = [side.system for side in sides(anchor) if side.system != study.scenario.system]
    return others[0] if others else None


def _elsewhere(
    results: Results, study: Study, anchor: Anchor, rivals: Sequence[tuple[Anchor, float | None]]
) -> Elsewhere | None:
    system = baseline(study, anchor)
    if system is None or any(
        side.system == system and effective(study, side) for side in sides(anchor)
    ):
        return None  # no topology of a variant is run
    best = results.best_topology(study, system, rates(study, anchor), anchor.metric)
    if best is None or not best.topology:
        return None
    simulated = best.value
    if anchor.over is not None:
        own, other = sides(anchor)
        still = other if own.system == system else own
        figure = results.best(study, UNTUNED, still, rates(study, anchor), anchor.metric)
        above, below = (best.value, figure) if still is other else (figure, best.value)
        if above is None or not below:
            return None
        simulated = above / below
    return Elsewhere(best.topology, simulated, verdict(anchor, simulated, rivals))


def compared(results: Results, study: Study) -> Iterator[Compared]:
    """The anchors of a study, in its order."""
    anchors = study.scenario.anchors
    values = {
        knobs: [results.simulated(study, knobs, anchor) for anchor in anchors]
        for knobs in KNOB_SETS
    }
    for number, anchor in enumerate(anchors):
        rivals = {
            knobs: [
                (other, theirs)
                for other, theirs in zip(anchors, values[knobs], strict=True)
                if is_rival(anchor, other)
            ]
            for knobs in KNOB_SETS
        }
        simulated = {knobs: values[knobs][number] for knobs in KNOB_SETS}
        verdicts = {knobs: verdict(anchor, simulated[knobs], rivals[knobs]) for knobs in KNOB_SETS}
        elsewhere = _elsewhere(results, study, anchor, rivals[UNTUNED])
        yield Compared(study, anchor, simulated, verdicts, elsewhere)


class Consistency(NamedTuple):
    """Published throughput and P99 TTFT of one run, against each other.

    With N requests at rate L through a bottleneck of rate m, first come first served, the run takes
    N / m and the 99th percentile waits 0.99 N (1 / m - 1 / L). ``ttft_p99_s``: what this gives for
    the published throughput; ``rate_per_s``: the rate with which both published figures fit.
    """

    anchor: Anchor
    published_ttft_s: float
    ttft_p99_s: float
    rate_per_s: float | None


def consistencies(study: Study) -> Iterator[Consistency]:
    num = study.scenario.workload.num_requests
    plain = [anchor for anchor in study.scenario.anchors if anchor.over is None]
    for anchor in plain:
        if anchor.metric != "throughput_per_s" or anchor.rate_per_s is None:
            continue
        for other in plain:
            whose = (other.system, other.variant, other.rate_per_s)
            if other.metric == "ttft_s.p99" and whose == (
                anchor.system,
                anchor.variant,
                anchor.rate_per_s,
            ):
                gap_s = 1 / anchor.published - 1 / anchor.rate_per_s
                left_s = 1 / anchor.published - other.published / (0.99 * num)
                fitting = 1 / left_s if left_s > 0 else None
                yield Consistency(anchor, other.published, max(0.0, 0.99 * num * gap_s), fitting)
