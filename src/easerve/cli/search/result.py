"""What a search came to, as JSON: what ``--json`` prints and ``easerve report`` draws."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from easerve.goodput import Slo
from easerve.search.objective import Objective
from easerve.search.pruning import Pruning
from easerve.search.space import Space
from easerve.search.trials import Trial, best

KIND = "search"
Result = dict[str, Any]
ALLOCATION, GOODPUT = "allocation", "goodput_per_s"


@dataclass(frozen=True, slots=True)
class Question:
    """What is searched, by what. ``impossible``: allocations that cannot be, with why;
    ``remote_only``: those beside whose encoders nothing can run.

    ``tier``: the promise as it was asked for. ``live``: on engines, else simulated.
    """

    source: str
    title: str
    live: bool
    tier: str
    slo: Slo
    rates_per_s: Sequence[float]
    load: str
    space: Space
    impossible: Mapping[str, str]
    remote_only: Mapping[str, str]
    pruning: Pruning
    capacities: str
    """Where they come from."""

    def as_dict(self) -> Result:
        space = self.space
        kept = {each.allocation: each for each in self.pruning.kept}
        dropped = {each.allocation: each.why for each in self.pruning.pruned}
        allocations = [
            {
                "name": each.name,
                "num_configurations": space.num_of(each.name),
                "kept": each.name in kept,
                "capacity_per_s": kept[each.name].per_s if each.name in kept else None,
                "stages_per_s": dict(kept[each.name].stages) if each.name in kept else None,
                "why": dropped.get(each.name, ""),
                "remote_only": self.remote_only.get(each.name, ""),
            }
            for each in space.allocations
        ]
        return {
            "source": self.source,
            "title": self.title,
            "objective": "live" if self.live else "simulated",
            "tier": self.tier,
            "slo": asdict(self.slo),
            "rates_per_s": list(self.rates_per_s),
            "load": self.load,
            "capacities": self.capacities,
            "knobs": {each.path: list(each.values) for each in space.knobs},
            "num_configurations": len(space),
            "num_candidates": len(kept),
            "allocations": allocations,
            "impossible": [{"name": name, "why": why} for name, why in self.impossible.items()],
        }


def of_trial(trial: Trial) -> Result:
    rates = [each.rate_per_s for each in trial.scores]
    return {
        "trial": trial.number,
        ALLOCATION: trial.configuration.allocation,
        "knobs": dict(trial.configuration.values),
        GOODPUT: trial.goodput_per_s,
        "confidence_per_s": trial.confidence_per_s,
        "attainment": trial.attainment,
        "rate_per_s": sum(rates) / len(rates) if rates else None,
        "num_seeds": len(trial.scores),
        "state": trial.state,
        "why": trial.why,
        "cached": trial.cached,
    }


def of_study(
    question: Question,
    objective: Objective,
    study: Mapping[str, Any],
    trials: Sequence[Trial],
    wall_s: float,
) -> Result:
    """``study``: its name, storage, method and seed. ``runner_up``: the best of another allocation
    or, if there is none, the second best.
    """
    winner, second = best(trials), runner_up(trials)
    told = question.as_dict()
    if study["method"] != "has":  # nothing is pruned
        told["num_candidates"] = len(told["allocations"])
        told["allocations"] = [each | {"kept": True, "why": ""} for each in told["allocations"]]
    finished = [each for each in trials if each.state != "running"]
    return {
        "kind": KIND,
        **told,
        **study,
        "required": objective.required,
        "seeds": list(objective.seeds),
        "num_trials": len(finished),
        "num_failed": sum(each.state == "failed" for each in finished),
        "num_pruned": sum(each.state == "pruned" for each in finished),
        "num_cached": sum(each.cached for each in finished),
        "trials": [of_trial(each) for each in finished],
        "best": None if winner is None else of_trial(winner),
        "runner_up": None if second is None else of_trial(second),
        "closest": None if winner is not None else _closest(finished),
        "wall_s": wall_s,
    }


def runner_up(trials: Sequence[Trial]) -> Trial | None:
    winner = best(trials)
    if winner is None:
        return None
    name = winner.configuration.allocation
    others = [each for each in trials if each.configuration.allocation != name]
    return best(others) or best([each for each in trials if each is not winner])


def _closest(trials: Sequence[Trial]) -> Result | None:
    """Of trials none of which keeps the promise, the one that comes closest."""
    scored = [each for each in trials if each.attainment is not None]
    found = max(scored, key=lambda each: each.attainment or 0.0, default=None)
    return None if found is None else of_trial(found)


def best_so_far(trials: Sequence[Mapping[str, Any]], required: float) -> list[float | None]:
    """After each trial, the goodput of the best that keeps the promise; None before the first."""
    found: list[float | None] = []
    most: float | None = None
    for each in trials:
        if each["state"] == "complete" and each["attainment"] >= required:
            most = max(most or 0.0, each[GOODPUT])
        found.append(most)
    return found
