"""Which allocations are worth trying, and with what to begin, by what their stages can do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from easerve.config import Policy
from easerve.search.bottleneck import (
    MACHINE,
    Engines,
    Lacking,
    Site,
    call_limit_s,
    engines,
    tp_of,
)
from easerve.search.capacity import Row
from easerve.search.space import SHARE, Allocation, Configuration, Knob, Space, Value
from easerve.types import Stage

BATCH, SLOTS = "policy.max_batch_items", "decode.max_num_seqs"
MAX_KEPT, TOLERANCE = 3, 0.25
SAME = 0.98
"""Of the best rate of an encoder: a smaller batch that does so much is preferred."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The most that an allocation can do, requests per second in all and of each stage.

    ``share``: the remote share with which it does, the highest of those. ``why_not``: what keeps it
    from serving at all.
    """

    allocation: str
    per_s: float
    stages: Mapping[str, float]
    share: float = 1.0
    why_not: str | None = None

    @property
    def bottleneck(self) -> str:
        """Its name and what it does, as in ``prefill 1.9/s``."""
        return f"{self._slowest} {self.per_s:.3g}/s"

    @property
    def is_of_machine(self) -> bool:
        """No stage is the slowest, but all of them together."""
        return bool(self.stages) and self._slowest == MACHINE

    @property
    def _slowest(self) -> str:
        return min(self.stages, key=lambda stage: self.stages[stage])


@dataclass(frozen=True, slots=True)
class Dropped:
    allocation: str
    why: str


@dataclass(frozen=True, slots=True)
class Pruning:
    """``kept``: best first."""

    kept: tuple[Estimate, ...]
    pruned: tuple[Dropped, ...]


def prune(
    space: Space, site: Site, max_kept: int = MAX_KEPT, tolerance: float = TOLERANCE
) -> Pruning:
    """The best allocations, none more than ``tolerance`` below the best of all."""
    found = sorted((estimate(each, space, site) for each in space.allocations), key=_rank)
    kept, pruned = list[Estimate](), list[Dropped]()
    for each in found:
        why = each.why_not
        if why is None and each.per_s < (1 - tolerance) * found[0].per_s:
            why = f"{each.bottleneck} is the bottleneck, best is {found[0].per_s:.3g}/s"
        elif why is None and len(kept) >= max_kept:
            why = f"{each.bottleneck} is the bottleneck, {max_kept} others do as much or more"
        if why is None:
            kept.append(each)
        else:
            pruned.append(Dropped(each.allocation, why))
    return Pruning(tuple(kept), tuple(pruned))


def _rank(each: Estimate) -> list[float]:
    """Where the slowest stages are as fast, the next ones decide, then the order of the space: of
    engines that share all cores more are no better.
    """
    stages = [] if each.is_of_machine else sorted(each.stages.values())
    return [-round(per_s, 6) for per_s in (each.per_s, *stages)]


def estimate(allocation: Allocation, space: Space, site: Site) -> Estimate:
    knobs = {knob.path: knob for knob in space.knobs_of(allocation.name)}
    try:
        found = engines(allocation, site, _most(knobs.get(BATCH)), _most(knobs.get(SLOTS)))
    except Lacking as error:
        return Estimate(allocation.name, 0.0, {}, why_not=str(error))
    share = _highest_best(found, _shares(knobs.get(SHARE), found))
    per_s = found.most_per_s(share)
    return Estimate(allocation.name, per_s, found.stages(per_s, share), share)


def _highest_best(found: Engines, shares: Sequence[float]) -> float:
    """Of the remote shares with which most is done the highest: encoders are disturbed least."""
    return max(shares, key=lambda share: (round(found.most_per_s(share), 9), share))


def _shares(knob: Knob | None, found: Engines) -> list[float]:
    """That can be had, rising. Without the knob: the balanced one."""
    if not found.local_per_s:
        return [1.0]
    return sorted(_numbers(knob)) or [found.balanced_share]


def _numbers(knob: Knob | None) -> list[float]:
    values = knob.values if knob is not None else ()
    return [float(each) for each in values if isinstance(each, int | float)]


def _most(knob: Knob | None) -> int | None:
    """None: nothing is known of a bound."""
    return int(max(_numbers(knob), default=0)) or None


def starts(
    allocation: Allocation, space: Space, site: Site, given: Mapping[str, Value] | None = None
) -> list[Configuration]:
    """Configurations to begin with, one or two, the better guess first.

    Both sides of prefill as busy as each other; as much of it remote as costs nothing. Batches of
    the encoder are the smallest with which it does its best. ``given``: what the file says of
    knobs; other knobs begin with the default, or their first value where that is none of them.
    Raises Lacking.
    """
    knobs = {knob.path: knob for knob in space.knobs_of(allocation.name)}
    found = engines(allocation, site, _most(knobs.get(BATCH)), _most(knobs.get(SLOTS)))
    first = {path: _first(knob, given or {}) for path, knob in knobs.items()}
    if SLOTS in knobs:
        first[SLOTS] = _slots(allocation, knobs[SLOTS], site)
    if BATCH in knobs:
        first[BATCH] = _cap(allocation, knobs[BATCH], site)
    guesses = _guesses(found, knobs[SHARE]) if SHARE in knobs else []
    begun = [first | {SHARE: share} for share in guesses] or [first]
    return list(dict.fromkeys(space.configuration(allocation.name, each) for each in begun))


def _first(knob: Knob, given: Mapping[str, Value]) -> Value:
    section, _, key = knob.path.partition(".")
    defaults = Policy().model_dump() if section == "policy" else {}
    for value in (given.get(knob.path), defaults.get(key)):
        if value in knob.values:
            return value
    return knob.values[0]


def _guesses(found: Engines, knob: Knob) -> list[float]:
    """Remote shares: balanced, and the highest of the best.

    What balances prefill may slow the encoders more than it is worth; then it comes second.
    """
    grid = sorted(_numbers(knob))
    balanced = found.balanced_share
    at = min(range(len(grid)), key=lambda index: abs(grid[index] - balanced))
    first = [grid[at], _highest_best(found, _shares(knob, found))]
    return sorted(first, key=lambda share: -round(found.most_per_s(share), 9))


def _cap(allocation: Allocation, knob: Knob, site: Site) -> Value:
    """The smallest batch cap that does about as much as any that is allowed."""
    rows = site.capacities.rows(Stage.ENCODE, 1)
    values = sorted(int(each) for each in _numbers(knob))
    at = {value: _reached(rows, value) for value in values}
    limit_s = call_limit_s(allocation, site)
    allowed = [value for value in values if at[value].seconds <= limit_s] or values[:1]
    most = max(at[value].per_s for value in allowed)
    return next(value for value in allowed if at[value].per_s >= SAME * most)


def _reached(rows: Sequence[Row], batch: int) -> Row:
    """The largest batch that was measured of those that are no larger, else the smallest."""
    return max((row for row in rows if row.batch <= batch), key=_batch, default=rows[0])


def _batch(row: Row) -> int:
    return row.batch


def _slots(allocation: Allocation, knob: Knob, site: Site) -> Value:
    """The most decode slots with which a step keeps the TPOT promise, as far as it is known."""
    rows = site.capacities.rows(Stage.DECODE, tp_of(allocation, Stage.DECODE))
    limit_s = math.inf if site.slo.tpot_s is None else site.slo.tpot_s
    longer = [row.batch for row in rows if row.seconds > limit_s]
    values = sorted(int(each) for each in _numbers(knob))
    within = [value for value in values if not longer or value < min(longer)]
    return within[-1] if within else values[0]
