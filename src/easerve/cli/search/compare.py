"""``easerve search --compare``: every configuration is tried, then each method searches in that.

A method is judged by how many trials it needs until its best is within ``NEAR`` of the best there
is. Scores are looked up, which changes nothing for a method: the same seed makes the same study.
How long a study takes is measured on one that looks nothing up.
"""

import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from easerve.bench.report import Cell, Chart, Limit, Section, Series, Table
from easerve.cli.search import shown
from easerve.cli.search.prepare import Prepared
from easerve.cli.search.result import GOODPUT, Result, best_so_far, of_trial
from easerve.config import ConfigError
from easerve.search.methods.method import method
from easerve.search.objective import Objective, Score, Unworkable
from easerve.search.simulated import OURS, SimulatedObjective
from easerve.search.space import SHARE, Configuration, Space
from easerve.search.study import Study
from easerve.search.trials import Trial, best
from easerve.sim.simulate import simulate

KIND = "search-compare"
METHODS = ("has", "tpe", "random", "coordinate")
NEAR = 0.02
PERCENT = 100
Tick = Callable[[str], None]


@dataclass(frozen=True)
class Known:
    """An objective whose scores are all known; what failed then fails again."""

    objective: Objective
    scores: Mapping[Configuration, Sequence[Score]]

    @property
    def key(self) -> str:
        return self.objective.key

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.objective.seeds

    @property
    def required(self) -> float:
        return self.objective.required

    def score(self, configuration: Configuration, seed: int) -> Score:
        found = self.scores[configuration]
        if not found:
            raise Unworkable("it failed when all were tried")
        return found[self.seeds.index(seed)]


def exhausted(study: Study, space: Space, jobs: int, tick: Tick) -> list[Trial]:
    """Every configuration, in so many processes."""

    def told(trial: Trial) -> None:
        tick(f"all configurations, {trial.configuration.allocation}")

    context = multiprocessing.get_context("spawn")  # no thread of ours holds a lock there
    with ProcessPoolExecutor(jobs, context) as pool:
        return study.run(len(space), told, executor=pool, jobs=jobs)


def compared(
    found: Prepared, everything: Sequence[Trial], num_trials: int, num_seeds: int, tick: Tick
) -> Result:
    """``everything``: all trials of the grid. Raises ConfigError where none keeps the promise."""
    won = best(everything)
    if won is None or won.goodput_per_s is None:
        raise ConfigError("no configuration keeps the promise, so methods cannot be compared")
    done = {
        each.configuration: each.scores if each.state == "complete" else () for each in everything
    }
    known = Known(found.objective, done)
    methods = {
        name: [
            _of_study(found, known, name, seed, num_trials, won.goodput_per_s, tick)
            for seed in range(num_seeds)
        ]
        for name in METHODS
    }
    tick("a study that looks nothing up")
    begin_s = time.monotonic()
    fresh = _study(found, found.objective, METHODS[0], 0, num_trials)
    wall_s = time.monotonic() - begin_s
    best_fresh = best(fresh)
    return {
        "kind": KIND,
        **found.question.as_dict(),
        "required": found.objective.required,
        "seeds": list(found.objective.seeds),
        "near": NEAR,
        "budget": num_trials,
        "exhaustive": of_trial(won),
        "num_trials": len(fresh),
        "best": None if best_fresh is None else of_trial(best_fresh),
        "gap": 1 - ((best_fresh.goodput_per_s if best_fresh else 0.0) or 0.0) / won.goodput_per_s,
        "best_without_offload": _best_where(found.objective, everything, offload=False),
        "best_with_offload": _best_where(found.objective, everything, offload=True),
        "methods": methods,
        "fresh": {
            "method": METHODS[0],
            "seed": 0,
            "wall_s": wall_s,
            "num_scores": sum(len(each.scores) for each in fresh),
        },
    }


def _best_where(objective: Objective, trials: Sequence[Trial], offload: bool) -> Result | None:
    """The best with local prefill, or without; and for how much of the time its encoders work."""
    wanted = [each for each in trials if (each.configuration.get(SHARE) != 1) is offload]
    found = best(wanted)
    if found is None:
        return None
    told = of_trial(found)
    assert isinstance(objective, SimulatedObjective), "all was tried in the simulator"
    load = objective.scenario(found.configuration).at(told["rate_per_s"], objective.seeds[0])
    return told | {"utilisation": simulate(load, OURS).utilisation()}


def _study(
    found: Prepared, objective: Objective, name: str, seed: int, num_trials: int
) -> list[Trial]:
    space = found.question.space
    chosen = method(name, space, seed, found.candidates if name == "has" else ())
    study = Study(None, f"{name} {seed}", space, objective, chosen)
    return study.run(num_trials)


def _of_study(
    found: Prepared,
    known: Known,
    name: str,
    seed: int,
    num_trials: int,
    most: float,
    tick: Tick,
) -> Result:
    tick(f"{name}, seed {seed}")
    begin_s = time.monotonic()
    trials = _study(found, known, name, seed, num_trials)
    thinking_s = time.monotonic() - begin_s
    told = [of_trial(each) for each in trials]
    curve = [None if each is None else each / most for each in best_so_far(told, known.required)]
    near = (at for at, each in enumerate(curve, 1) if each is not None and each >= 1 - NEAR)
    return {
        "seed": seed,
        "curve": curve,
        "trials_to_near": next(near, None),
        "gap": 1 - (curve[-1] or 0.0) if curve else 1.0,
        "num_scores": sum(len(each.scores) for each in trials),
        "thinking_s": thinking_s,
    }


# Shown --------------------------------------------------------------------------------------------


def sections(result: Result) -> list[Section]:
    title = f"{result['title']}: methods"
    return [Section(title, said(result), [table(result), chart(result)]), *shown.space(result)]


def said(result: Result) -> str:
    won = result["exhaustive"]
    fresh = result["fresh"]
    texts = [
        f"The best of all {result['num_configurations']} configurations is {won['allocation']} "
        f"with {shown.knobs(won)}: {shown.with_confidence(won)}, {shown.promise(result)}.",
        f"A method gets {result['budget']} trials. A study of {fresh['method']} that looks nothing "
        f"up takes {fresh['wall_s']:.0f} s ({fresh['num_scores']} loads simulated).",
    ]
    with_it, without = result["best_with_offload"], result["best_without_offload"]
    if with_it is not None and without is not None:
        texts.append(_offload(with_it, without))
    return "\n\n".join(texts)


def _offload(with_it: Result, without: Result) -> str:
    ratio = with_it[GOODPUT] / without[GOODPUT]
    busy = ", ".join(
        f"{stage} {PERCENT * share:.0f} %" for stage, share in without["utilisation"].items()
    )
    return (
        f"Offload: the best with local prefill ({with_it['allocation']}, {shown.knobs(with_it)}) "
        f"has {ratio:.3f} times the goodput of the best without ({without['allocation']}, "
        f"{shown.knobs(without)}), whose engines work for so much of the time: {busy}. What the "
        "encoders' GPUs have left is what local prefill may use."
    )


def table(result: Result) -> Table:
    near = f"{PERCENT * result['near']:g} %"
    columns = ["method", f"within {near}, studies", "trials until then, median", "most"]
    columns += [f"gap after {result['budget']}, median %", "worst %", "loads, median"]
    columns += ["own time, median s"]
    rows = [_row(name, studies) for name, studies in result["methods"].items()]
    return Table(f"{result['title']}: trials to within {near} of the best", columns, rows)


def _row(name: str, studies: Sequence[Mapping[str, Any]]) -> list[Cell]:
    # Of studies that did not come near the number of trials is not known, only that it is more.
    near = [math.inf if (at := each["trials_to_near"]) is None else at for each in studies]
    half, most = (each if each < math.inf else None for each in (median(near), max(near)))
    gaps = [PERCENT * each["gap"] for each in studies]
    return [
        name,
        f"{sum(each < math.inf for each in near)} of {len(studies)}",
        half,
        most,
        median(gaps),
        max(gaps),
        median(each["num_scores"] for each in studies),
        median(each["thinking_s"] for each in studies),
    ]


def chart(result: Result) -> Chart:
    series = [_series(name, studies) for name, studies in result["methods"].items()]
    return Chart(
        f"{result['title']}: best so far",
        "trials",
        "of the best there is (median; band: all seeds)",
        series,
        limits=[Limit(1 - result["near"], f"{PERCENT * (1 - result['near']):g} %")],
        y_range=(0.5, 1.01),
    )


def _series(name: str, studies: Sequence[Mapping[str, Any]]) -> Series:
    length = max(len(each["curve"]) for each in studies)
    columns = [[_at(each["curve"], number) for each in studies] for number in range(length)]
    return Series(
        name,
        list(range(1, length + 1)),
        [median(each) for each in columns],
        [min(each) for each in columns],
        [max(each) for each in columns],
    )


def _at(curve: Sequence[float | None], number: int) -> float:
    """A method that has nothing left to try keeps what it has."""
    return curve[min(number, len(curve) - 1)] or 0.0


def num_steps(space: Space, num_seeds: int) -> int:
    """For a progress bar."""
    return len(space) + len(METHODS) * num_seeds + 1
