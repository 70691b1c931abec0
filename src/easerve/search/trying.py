"""Runs of contenders at rates, and the highest rate at which one keeps its promise.

A run lasts long enough to tell a rate a tenth beyond what a system can do from one that it can: a
queue that is fed so grows until a tenth of the requests are later than the TTFT limit.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from easerve.config import ConfigError
from easerve.goodput import Record, Slo, percentile, summarise
from easerve.sim.bound import bound_per_s
from easerve.sim.config import EaserveSystem
from easerve.sim.host import NoHost
from easerve.sim.run import Run
from easerve.sim.scenario import Scenario
from easerve.sim.sharing import machine
from easerve.sim.simulate import finished, make_world
from easerve.sim.systems import easerve
from easerve.sim.systems.registry import BUILDERS
from easerve.sim.world import World

REQUIRED = 0.9
"""Share of all requests."""
BEYOND = 0.1
MIN_RUN_S, MIN_REQUESTS, MAX_REQUESTS = 30.0, 200, 1000
TIER = "slo"
CLOSER = 1.02
"""Another topology is taken when it keeps the promise at a rate higher by this."""
NEAR = 1.05
"""The rates between which a capacity is known."""
FLOOR = 16
"""Rates below a sixteenth of what engines can do at best are not tried."""


@dataclass(frozen=True, slots=True)
class Load:
    """``max_requests``: of a run; fewer where they take long enough."""

    slo: Slo
    max_requests: int = MAX_REQUESTS

    def at(self, scenario: Scenario, rate_per_s: float, seed: int) -> Scenario:
        """Its requests at another rate. All contenders have the same at a rate."""
        run_s = max(MIN_RUN_S, self._limit_s * (1 + BEYOND) / (BEYOND * REQUIRED))
        num = min(self.max_requests, max(MIN_REQUESTS, math.ceil(rate_per_s * run_s)))
        found = scenario.at(rate_per_s, seed)
        workload = found.workload.model_copy(update={"num_requests": num})
        return found.model_copy(update={"workload": workload})

    def unseen(self, rate_per_s: float) -> float:
        """By which share a rate can be beyond what a system can do and look as if it were kept."""
        most_s = self.max_requests / rate_per_s
        queued_s = self._limit_s / REQUIRED
        return math.inf if queued_s >= most_s else queued_s / (most_s - queued_s)

    @property
    def _limit_s(self) -> float:
        return self.slo.ttft_s or self.slo.latency_s or 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """One run of the one system of a scenario, which has its rate and seed already."""

    scenario: Scenario
    slo: Slo
    traced: bool = False


@dataclass(frozen=True, slots=True)
class Steps:
    """Of a traced run: how long engines' steps take, in the median, and which share of their time
    steps with prompts have. None: there was no such step.
    """

    with_prompts_s: float | None
    decodes_s: float | None
    prompts_share: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """``num_late`` and ``num_slow``: that broke TTFT, and TPOT; a request may break both. Times are
    what 90 % of the completed requests do not exceed. ``utilisation``: by stage.
    """

    num_requests: int
    num_media: int
    goodput_per_s: float
    attainment: float
    num_late: int
    num_slow: int
    ttft_s: float | None
    tpot_s: float | None
    utilisation: dict[str, float]
    steps: Steps | None = None


def run(task: Task) -> Outcome:
    """Raises ConfigError."""
    scenario, slo = task.scenario, task.slo
    found = simulated(scenario, task.traced)
    summary = summarise(found.records, found.end_s, {TIER: slo})
    late, slow = Slo(ttft_s=slo.ttft_s, latency_s=slo.latency_s), Slo(tpot_s=slo.tpot_s)
    return Outcome(
        len(found.records),
        found.num_items,
        summary.goodput_per_s[TIER] or 0.0,
        summary.attainment[TIER] or 0.0,
        sum(not late.met(each) for each in found.records),
        sum(not slow.met(each) for each in found.records),
        _of_most(found.records, "ttft_s"),
        _of_most(found.records, "tpot_s"),
        found.utilisation(),
        _steps(found) if task.traced else None,
    )


def simulated(scenario: Scenario, traced: bool = False) -> Run:
    """Its own system, without the host's work, which on a CPU only ours has a model of.

    Raises ConfigError.
    """
    world, config = _world(scenario, Run(traced)), scenario.configs[scenario.system]
    if isinstance(config, EaserveSystem):
        ours = easerve.build(config.seeded(scenario.workload.seed), world)
        return finished(ours, world, scenario.system)
    return finished(BUILDERS[scenario.system](config, world), world, scenario.system)


def _world(scenario: Scenario, run: Run) -> World:
    world = make_world(scenario, run)
    if world.machine is None:
        return world
    return replace(world, machine=machine(world.num_units), host=NoHost())


def _of_most(records: Iterable[Record], key: str) -> float | None:
    times = [getattr(each, key) for each in records if each.outcome == "completed"]
    return percentile([time for time in times if time is not None], round(100 * REQUIRED))


def _steps(found: Run) -> Steps:
    seconds: dict[str, list[float]] = {"mixed": [], "prefill": [], "decode": []}
    for span in found.spans:
        if span.kind in seconds:
            seconds[span.kind].append((span.end_ns - span.begin_ns) / 1e9)
    prompts = seconds["mixed"] or seconds["prefill"]
    total = sum(map(sum, seconds.values()))
    share = (sum(seconds["mixed"]) + sum(seconds["prefill"])) / total if total else 0.0
    return Steps(percentile(prompts, 50), percentile(seconds["decode"], 50), share)


@dataclass(frozen=True, slots=True)
class Point:
    """A rate, over seeds: means."""

    rate_per_s: float
    goodput_per_s: float
    attainment: float
    outcomes: tuple[Outcome, ...] = ()

    @property
    def is_kept(self) -> bool:
        return self.attainment >= REQUIRED


def point(rate_per_s: float, outcomes: Sequence[Outcome]) -> Point:
    return Point(
        rate_per_s,
        fmean(each.goodput_per_s for each in outcomes),
        fmean(each.attainment for each in outcomes),
        tuple(outcomes),
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A contender as a scenario; ``bound_per_s``: what its engines can do at best."""

    name: str
    scenario: Scenario
    bound_per_s: float
    variants: tuple[tuple[str, Scenario], ...] = ()

    @property
    def varied(self) -> "list[Candidate]":
        """The same engines, with the same bound."""
        return [Candidate(name, each, self.bound_per_s) for name, each in self.variants]


def candidate(
    name: str, scenario: Scenario, variants: Sequence[tuple[str, Scenario]] = ()
) -> Candidate | str:
    """Why it cannot be, if it cannot."""
    try:
        world = make_world(scenario, Run())
        bound = bound_per_s(scenario.configs[scenario.system], world)
    except ConfigError as error:
        return f"{name}: {error}"
    return Candidate(name, scenario, bound, tuple(variants))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The topology of a family. ``rate_per_s``: that it was seen to keep, with one seed; None: not
    even the lowest that was tried. ``pruned``: why each other one is not, by name.
    """

    candidate: Candidate
    rate_per_s: float | None
    pruned: dict[str, str]


def choose(
    candidates: Sequence[Candidate],
    load: Load,
    seed: int,
    floor_per_s: float,
    tick: Callable[[str], None] = lambda _: None,
) -> Chosen:
    """The candidate that keeps the promise at the highest rate, or, where none does at the floor,
    the one with most goodput there.

    By what their engines can do at best, which no run exceeds, so that a candidate is tried only
    where it can be better, and then first at a rate that is. Of equal ones the first.
    """
    choice = _Choice(load, seed, floor_per_s)
    for each in sorted(candidates, key=lambda each: -each.bound_per_s):
        tick(each.name)
        choice.challenge(each)
    if choice.rate_per_s and choice.best:
        for each in choice.best.varied:
            tick(each.name)
            choice.challenge(each)
    return choice.made()


class _Choice:
    """The best so far, and why each other one is not."""

    def __init__(self, load: Load, seed: int, floor_per_s: float) -> None:
        self._load, self._seed, self._floor = load, seed, floor_per_s
        self.best: Candidate | None = None
        self.rate_per_s = 0.0
        self._at_floor: list[tuple[float, Candidate]] = []
        """Goodput of those that do not keep the promise there."""
        self._pruned: dict[str, str] = {}

    def challenge(self, each: Candidate) -> None:
        """At a rate at which it would be better than the best so far."""
        rate = max(self._floor, CLOSER * self.rate_per_s)
        if self.rate_per_s and each.bound_per_s < rate:
            self._pruned[each.name] = f"its engines can do {each.bound_per_s:.3g}/s at best"
            return
        met = _at(each, self._load, rate, self._seed)
        if met.attainment < REQUIRED:
            share = f"{100 * met.attainment:.3g} %"
            self._pruned[each.name] = f"at {rate:.3g}/s {share} of requests keep the promise"
            self._at_floor += [] if self.rate_per_s else [(met.goodput_per_s, each)]
            return
        if self.best is not None:
            self._pruned[self.best.name] = f"{each.name} keeps the promise at {rate:.3g}/s as well"
        self.best = each
        self.rate_per_s = _highest(each, self._load, rate, self._seed)

    def made(self) -> Chosen:
        best = self.best
        if best is None:
            best = max(self._at_floor, key=lambda each: each[0])[1]
            self._pruned.pop(best.name)
        return Chosen(best, self.rate_per_s or None, self._pruned)


def _at(each: Candidate, load: Load, rate_per_s: float, seed: int) -> Outcome:
    return run(Task(load.at(each.scenario, rate_per_s, seed), load.slo))


def _highest(each: Candidate, load: Load, kept: float, seed: int) -> float:
    """By halving between the rate that is kept and a little more than engines can do."""
    broken = max(kept * NEAR, each.bound_per_s * (1 + BEYOND))
    while broken / kept > NEAR:
        middle = math.sqrt(kept * broken)
        if _at(each, load, middle, seed).attainment >= REQUIRED:
            kept = middle
        else:
            broken = middle
    return kept
