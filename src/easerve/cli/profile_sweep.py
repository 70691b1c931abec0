"""The sweep of ``easerve profile``: numbers of compute units by batch sizes.

The numbers of units take turns, in an order that changes from round to round, so that a machine
that slows down or warms up does not favour one. No run after the warm-ups is dropped.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Protocol

from easerve.costs.profile import Runs

NUM_WARM_UPS = 3
MIN_RUNS = 20
MAX_LEVELS = 16
Tick = Callable[[str], None]


class Sample(NamedTuple):
    """A call to the encoder: seconds of its forward, and of the whole call.

    ``late``: prefill still held some of the units when it began.
    """

    forward_s: float
    wall_s: float
    late: bool


class Bench(Protocol):
    """An encoder and a local prefill engine on a device of ``total`` units."""

    total: int

    async def encode(self, units: int, batch: int) -> Sample:
        """One call of new items, whose forward is on so many units."""
        ...

    def prefilling(self) -> AbstractAsyncContextManager[object]:
        """Prefill has always something to do in the body, on the units that encode leaves it."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """``levels``: numbers of units beside prefill; all units are measured besides, alone."""

    batches: Sequence[int]
    levels: Sequence[int]
    num_runs: int

    @property
    def num_rounds(self) -> int:
        """For a progress bar."""
        conditions = 2 if self.levels else 1
        return len(self.batches) * conditions * (NUM_WARM_UPS + self.num_runs)


def levels(parts: Sequence[int], max_levels: int = MAX_LEVELS) -> list[int]:
    """Not more than ``max_levels`` of the parts that an encoder can get, evenly spread."""
    few = min(len(parts), max_levels)
    return [parts[ceil(len(parts) * number / few) - 1] for number in range(1, few + 1)]


async def sweep(bench: Bench, plan: Plan, tick: Tick) -> list[Runs]:
    """By batch: alone on every level and on all units, then beside a busy prefill on every level.

    ``tick`` hears of each round.
    """
    found = []
    for batch in plan.batches:
        alone = [*plan.levels, bench.total]
        found += await _measured(bench, plan, batch, alone, False, tick)
        if plan.levels:
            async with bench.prefilling():
                found += await _measured(bench, plan, batch, plan.levels, True, tick)
    return found


async def _measured(
    bench: Bench, plan: Plan, batch: int, units: Sequence[int], contended: bool, tick: Tick
) -> list[Runs]:
    rng = random.Random(batch)  # noqa: S311 (orders, not secrets)
    samples: dict[int, list[Sample]] = {each: [] for each in units}
    where = "beside prefill" if contended else "alone"
    for number in range(-NUM_WARM_UPS, plan.num_runs):
        tick(f"batch {batch} {where}, {'warm-up' if number < 0 else number + 1}")
        for each in rng.sample(units, len(units)):
            sample = await bench.encode(each, batch)
            if number >= 0:
                samples[each].append(sample)
    return [_runs(each, batch, contended, of_units) for each, of_units in samples.items()]


def _runs(units: int, batch: int, contended: bool, samples: Sequence[Sample]) -> Runs:
    return Runs(
        units=units,
        batch=batch,
        contended=contended,
        forward_s=tuple(round(sample.forward_s, 6) for sample in samples),
        wall_s=tuple(round(sample.wall_s, 6) for sample in samples),
        num_late=sum(sample.late for sample in samples),
    )
