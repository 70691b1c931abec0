"""Spaces and objectives that searches are tried on: smooth, with a known best."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from easerve.search.objective import Score, Unworkable
from easerve.search.space import SHARE, Allocation, Configuration, Knob, Space

BATCH = "policy.max_batch_items"
WHEN = "policy.when"
GAP = "policy.gap_k"
OFFLOAD: Mapping[str, object] = {"local_prefill": {}}
PEAKS = {  # by allocation: goodput at the best share and batch, and where that is
    "e2-p2-d4": (2.2, 1.0, 2),
    "e2-p2x2-d2": (3.0, 0.65, 8),
    "e4-p2-d2": (2.7, 0.30, 16),
    "e2-p4-d2": (2.0, 0.80, 4),
}


def allocation(name: str, can_offload: bool = True) -> Allocation:
    return Allocation(name, {"encode.replicas": name}, OFFLOAD if can_offload else None)


def space(num_allocations: int = 4) -> Space:
    """120 configurations of most allocations, 6 of the first, which cannot offload."""
    allocations = [allocation(name, name != "e2-p2-d4") for name in list(PEAKS)[:num_allocations]]
    shares = tuple(round(step / 20, 2) for step in range(1, 21))
    return Space(allocations, [Knob(BATCH, (1, 2, 4, 8, 16, 32)), Knob(SHARE, shares)])


def ruled() -> Space:
    """With names, and a knob that is at work only with one of them."""
    knobs = [
        Knob(BATCH, (1, 2, 4)),
        Knob(WHEN, ("gap", "fixed", None)),
        Knob(GAP, (0.25, 0.5, 1.0), (WHEN, ("gap",))),
        Knob(SHARE, (0.5, 1.0)),
    ]
    return Space([allocation("e1-p1-d1"), allocation("e2-p1-d1", can_offload=False)], knobs)


def ridge(configuration: Configuration) -> float:
    """Goodput, requests per second: falls off on both sides of a peak of each allocation."""
    top, share, batch = PEAKS[configuration.allocation]
    values = dict(configuration.values)
    off = (values[SHARE] - share) / 0.35  # type: ignore[operator]
    far = math.log2(values[BATCH] / batch) / 4  # type: ignore[operator]
    return top * math.exp(-(off**2) - far**2 + 0.5 * off * far)


@dataclass
class Fake:
    """``goodput``: of a configuration. ``luck``: what each seed multiplies it by. ``calls``: what
    it was asked for.
    """

    goodput: Callable[[Configuration], float] = ridge
    luck: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    attainment: Callable[[Configuration], float] = lambda configuration: 0.95
    key: str = "ridge"
    required: float = 0.9
    calls: list[tuple[Configuration, int]] = field(default_factory=list)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.luck)

    def score(self, configuration: Configuration, seed: int) -> Score:
        self.calls.append((configuration, seed))
        goodput = self.goodput(configuration) * self.luck[seed]
        return Score(goodput, self.attainment(configuration), 4.0)


def unworkable(configuration: Configuration) -> float:
    raise Unworkable("no engine starts")
