"""Whether to split the model's stages over the devices, and how, at a load and a promise.

Each family, from whole engines to ours, has its best topology on the same devices; all have the
same requests at the same rates. What a system is worth is the most goodput that it has at a rate
that it keeps; the verdict is "split" where that of the best split system is more than that of whole
engines by ``AHEAD``. Then it is ahead from some rate on, the break-even, up to the rate at which it
has the most. Beyond, systems fall off within a few percent of a rate: who breaks the promise less
there is no reason.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

from easerve.config import ConfigError
from easerve.search import trying
from easerve.search.contenders import AGGREGATED, Contender, Family, alone
from easerve.search.rates import Mapped, Tick, Trials
from easerve.search.trying import Candidate, Chosen, Load, Outcome, Point

Verdict = Literal["split", "do not split"]
SPLIT: Verdict = "split"
WHOLE: Verdict = "do not split"
AHEAD = 1.02
MAX_ROUNDS = 10
NUM_RUNGS, ABOVE = 8, 1.1
"""Of the ladder of rates, up to a tenth more than the best of all keeps."""
CLEARLY = 0.05
CHOOSING_REQUESTS = 800
"""Of a run that only compares topologies."""
STEPS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest offered rate at which enough requests keep the promise, and the goodput there.

    ``at_least``: nobody tried more.
    """

    rate_per_s: float
    goodput_per_s: float
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Serving:
    """A family at its best topology. ``points``: all rates that were tried, rising. ``refused``:
    why there are no others.
    """

    name: str
    chosen: Chosen
    num_topologies: int
    refused: Sequence[str]
    points: Sequence[Point]

    @property
    def capacity(self) -> Capacity | None:
        """No more than its engines can do at best, which a run that ends may hide."""
        found, most = capacity(self.points), self.chosen.candidate.bound_per_s
        if found is None or found.rate_per_s <= most:
            return found
        return Capacity(most, found.goodput_per_s * most / found.rate_per_s, found.at_least)

    @property
    def best(self) -> Point | None:
        """The most goodput at a rate that is kept."""
        kept = [each for each in self.points if each.is_kept]
        return max(kept, key=lambda each: each.goodput_per_s, default=None)

    @property
    def best_per_s(self) -> float:
        """Goodput; 0 where no rate is kept."""
        return 0.0 if self.best is None else self.best.goodput_per_s

    @property
    def broken(self) -> Point | None:
        """The lowest rate above its capacity that it does not keep, clearly if there is one."""
        least = self.capacity.rate_per_s if self.capacity else 0.0
        broken = [each for each in self.points if each.rate_per_s >= least and not each.is_kept]
        clearly = (each for each in broken if each.attainment < trying.REQUIRED - CLEARLY)
        return next(clearly, next(iter(broken), None))

    def at(self, rate_per_s: float) -> Point:
        """Of a rate that was tried."""
        return next(each for each in self.points if each.rate_per_s == rate_per_s)


@dataclass(frozen=True, slots=True)
class Advice:
    """``servings``: from the simplest on; of families that cannot be, ``impossible`` has why.

    ``split``: the best of those that split, which also wins where whole engines cannot be.
    ``break_even_per_s``: None where it is ahead nowhere, or keeps no rate.
    ``traced``: by name, a run of whole engines and of the split at the rate that each breaks.
    """

    verdict: Verdict
    winner: Serving
    split: Serving | None
    break_even_per_s: float | None
    rates_per_s: Sequence[float]
    servings: Sequence[Serving]
    impossible: Mapping[str, Sequence[str]]
    traced: Mapping[str, Outcome]

    @property
    def whole(self) -> Serving | None:
        return next((each for each in self.servings if each.name == AGGREGATED), None)


def capacity(points: Sequence[Point]) -> Capacity | None:
    """Attainment and goodput are straight between rates; None where no rate is kept."""
    kept = [each for each in points if each.is_kept]
    if not kept:
        return None
    best = kept[-1]
    above = next((each for each in points if each.rate_per_s > best.rate_per_s), None)
    if above is None:
        return Capacity(best.rate_per_s, best.goodput_per_s, at_least=True)
    part = (best.attainment - trying.REQUIRED) / (best.attainment - above.attainment)
    return Capacity(
        best.rate_per_s + part * (above.rate_per_s - best.rate_per_s),
        best.goodput_per_s + part * (above.goodput_per_s - best.goodput_per_s),
    )


def ladder(top_per_s: float) -> tuple[float, ...]:
    """Rates in equal, round steps, to a little more than the top."""
    least = ABOVE * top_per_s / NUM_RUNGS
    size: float = 10.0 ** math.floor(math.log10(least))
    step = size * next(each for each in STEPS if each * size >= least * 0.999)
    num = math.ceil(ABOVE * top_per_s / step - 1e-6)
    return tuple(float(f"{step * rung:.6g}") for rung in range(1, num + 1))


def advise(
    content: Mapping[str, Any],
    families: Sequence[Family],
    load: Load,
    seeds: Sequence[int],
    rates_per_s: Sequence[float] | None = None,
    mapped: Mapped = map,
    tick: Tick = lambda what, done, of: None,
) -> Advice:
    """``content``: of the scenario. ``rates_per_s`` None: a ladder up to what the best keeps.

    The same whatever ``mapped`` is. Raises ConfigError where no system can be.
    """
    possible, impossible = _possible(content, families, mapped, tick)
    chosen = _chosen(possible, load, seeds[0], mapped, tick)
    rates = tuple(sorted({*(rates_per_s or ladder(_top(chosen.values())))}))
    candidates = {name: each.candidate for name, each in chosen.items()}
    trials = Trials(candidates, load, seeds, mapped, tick)
    trials.run("ladder of rates", product(chosen, rates))
    trials.refine()

    def servings() -> dict[str, Serving]:
        return {
            family.name: Serving(
                family.name,
                chosen[family.name],
                sum(1 + len(each.variants) for each in possible[family.name]),
                family.refused,
                trials.points(family.name),
            )
            for family in families
            if family.name in chosen
        }

    found = servings()
    for _ in range(MAX_ROUNDS):  # what is tried for the break-even may tell more of who is best
        split = _best_split([each for name, each in found.items() if name != AGGREGATED])
        even = None if split is None else break_even(trials, split, found.get(AGGREGATED))
        before, found = found, servings()
        if found == before:
            break
    compared = [each for each in (AGGREGATED, split and split.name) if each in found]
    winner = _winner(found, split, even)
    return Advice(
        WHOLE if winner.name == AGGREGATED else SPLIT,
        winner,
        None if split is None else found[split.name],
        even,
        rates,
        list(found.values()),
        impossible,
        trials.traced({name: _telling_rate(found[name]) for name in compared if name}),
    )


def _winner(found: Mapping[str, Serving], split: Serving | None, even: float | None) -> Serving:
    if split is not None and (even is not None or AGGREGATED not in found):
        return found[split.name]
    return found[AGGREGATED]


def _possible(
    content: Mapping[str, Any], families: Sequence[Family], mapped: Mapped, tick: Tick
) -> tuple[dict[str, list[Candidate]], dict[str, list[str]]]:
    """By family: those that can be, or why none can. Raises ConfigError if no family can."""
    possible, impossible = dict[str, list[Candidate]](), dict[str, list[str]]()
    for number, family in enumerate(families):
        tick("topologies", number, len(families))
        found = list(mapped(partial(_candidate, content), family.contenders))
        candidates = [each for each in found if isinstance(each, Candidate)]
        why = [each for each in found if isinstance(each, str)]
        if candidates:
            possible[family.name] = candidates
        else:
            impossible[family.name] = [*family.refused, *why]
    if not possible:
        reasons = dict.fromkeys(why for whys in impossible.values() for why in whys)
        raise ConfigError("\n".join(["no system can serve this:", *reasons]))
    return possible, impossible


def _candidate(content: Mapping[str, Any], contender: Contender) -> Candidate | str:
    """Why it cannot be, if it cannot."""
    try:
        variants = [(each.name, alone(content, each)) for each in contender.varied]
        return trying.candidate(contender.name, alone(content, contender), variants)
    except ConfigError as error:
        return str(error)  # which names it


def _chosen(
    possible: Mapping[str, Sequence[Candidate]], load: Load, seed: int, mapped: Mapped, tick: Tick
) -> dict[str, Chosen]:
    """All families have the same lowest rate, below which nothing is tried."""
    short = Load(load.slo, min(load.max_requests, CHOOSING_REQUESTS))
    best = [max(each.bound_per_s for each in some) for some in possible.values()]
    floor = max(best) / trying.FLOOR
    choose = partial(trying.choose, load=short, seed=seed, floor_per_s=floor)
    found: dict[str, Chosen] = {}
    tick("choosing topologies", 0, len(possible))
    for name, each in zip(possible, mapped(choose, possible.values()), strict=True):
        found[name] = each
        tick("choosing topologies", len(found), len(possible))
    return found


def _top(chosen: Iterable[Chosen]) -> float:
    """The highest rate that one keeps; else one that is low for all."""
    all_chosen = list(chosen)
    kept = [each.rate_per_s for each in all_chosen if each.rate_per_s]
    bounds = [each.candidate.bound_per_s for each in all_chosen]
    return max(kept, default=max(bounds) / 2)


def _best_split(servings: Sequence[Serving]) -> Serving | None:
    """The simplest of those that have about as much goodput as any."""
    most = max((each.best_per_s for each in servings), default=0.0)
    return next((each for each in servings if each.best_per_s * AHEAD >= most), None)


def break_even(trials: Trials, split: Serving, whole: Serving | None) -> float | None:
    """The lowest rate from which on ``split`` is ahead, up to the one at which it is best.

    None where it is not. Where there are no whole engines, the lowest rate that was tried.
    """
    best = split.best
    if best is None:
        return None
    if whole is None:
        return split.points[0].rate_per_s
    if best.goodput_per_s <= AHEAD * whole.best_per_s:
        return None
    limit = best.rate_per_s

    def is_ahead(rate_per_s: float) -> bool:
        ours, theirs = trials.at(split.name, rate_per_s), trials.at(whole.name, rate_per_s)
        return ours.goodput_per_s > AHEAD * theirs.goodput_per_s

    if not is_ahead(limit):
        return None
    shared = {each.rate_per_s for each in split.points} & {each.rate_per_s for each in whole.points}
    ahead, behind = limit, 0.0
    for rate in sorted((each for each in shared if each < limit), reverse=True):
        if not is_ahead(rate):
            behind = rate
            break
        ahead = rate
    while behind and ahead > behind * trying.NEAR:
        middle = float(f"{(ahead + behind) / 2:.4g}")
        ahead, behind = (middle, behind) if is_ahead(middle) else (ahead, middle)
    return ahead


def _telling_rate(serving: Serving) -> float:
    """The lowest that it breaks, or the highest that was tried."""
    return (serving.broken or serving.points[-1]).rate_per_s
