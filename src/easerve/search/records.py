"""Trials on disk: one Optuna study for each of ours.

What counts is in the attributes that a trial has of its own, scores by seed and the changes that
the configuration makes; parameters, values and constraints are there so that Optuna's tools can
show it. A trial is there with its configuration before it is first scored, and each score as soon
as it is made. Each is one transaction, so that whatever ends a search leaves a history to go on
from.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from easerve.search.objective import Score
from easerve.search.space import Configuration, Knob, Space, Value
from easerve.search.storage import Storage, StorageError, cause, open_storage, path_of
from easerve.search.trials import State, Trial

IDENTITY = "easerve"
STATES: Mapping[State, TrialState] = {
    "running": TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
NAMES: Mapping[TrialState, State] = {theirs: ours for ours, theirs in STATES.items()}
Cache = dict[tuple[str, int], tuple[Score, str]]
"""Scores by changes and seed, each with the study and the trial that it comes from."""


class Records:
    """The trials of one study."""

    def __init__(self, storage: Storage, name: str, space: Space, required: float) -> None:
        """The study is made if there is none of that name."""
        self._storage = storage
        self._optuna = storage.optuna
        self._name = name
        self._space = space
        self._required = required
        self._study = _study_id(storage, name)
        self._ids: dict[int, int] = {}

    def claim(self, identity: Mapping[str, Any]) -> None:
        """This study is of that, by name; raises StorageError, which names what differs, if it is
        of something else.
        """
        identity = json.loads(json.dumps(identity))
        known = self._optuna.get_study_user_attrs(self._study).get(IDENTITY)
        if known is None and self._optuna.get_n_trials(self._study):
            raise StorageError(f"{self._here}: not made by a search; choose another name")
        if known is None:
            self._optuna.set_study_user_attr(self._study, IDENTITY, identity)
            return
        differences = [
            f"{key}: {known.get(key)} there, {asked} here"
            for key, asked in identity.items()
            if known.get(key) != asked
        ]
        if differences:
            what = "; ".join(differences)
            raise StorageError(f"{self._here} is another study ({what}); choose another name")

    @property
    def _here(self) -> str:
        return f"study {self._name!r} in {self._storage.name}"

    def writing(self) -> AbstractContextManager[None]:
        """Raises StorageError if another process writes this study."""
        return self._storage.locked(self._study)

    def trials(self) -> list[Trial]:
        """In order; the last one is running if a search ended in the middle of it."""
        stored = _ours(self._optuna, self._study)
        self._ids = {each.number: each._trial_id for each in stored}
        return [_read(each, self._required) for each in stored]

    def start(self, configuration: Configuration) -> Trial:
        """A trial that runs, numbered after the others."""
        params, distributions = _parameters(self._space, configuration)
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions=distributions,
            user_attrs={
                "configuration": [configuration.allocation, configuration.values],
                "changes": self._space.changes(configuration),
            },
        )
        trial_id = self._optuna.create_new_trial(self._study, template)
        number = self._optuna.get_trial(trial_id).number
        self._ids[number] = trial_id
        return Trial(number, configuration, self._required)

    def save(self, trial: Trial) -> None:
        """The scores that a running trial has so far."""
        trial_id = self._ids[trial.number]
        scores = [[each.goodput_per_s, each.attainment, each.rate_per_s] for each in trial.scores]
        kept = {"scores": scores, "sources": trial.sources}
        self._optuna.set_trial_user_attr(trial_id, "scores", kept)

    def finish(self, trial: Trial) -> None:
        """Its state is the last that is written."""
        trial_id, value = self._ids[trial.number], trial.goodput_per_s
        for step in range(len(trial.scores)):
            mean = fmean(each.goodput_per_s for each in trial.scores[: step + 1])
            self._optuna.set_trial_intermediate_value(trial_id, step + 1, mean)
        for name, each in _shown(trial).items():
            self._optuna.set_trial_user_attr(trial_id, name, each)
        if trial.attainment is not None:
            lacking = [trial.required - trial.attainment]  # Optuna's: kept at zero or below
            self._optuna.set_trial_system_attr(trial_id, "constraints", lacking)
        values = None if trial.state == "failed" or value is None else [value]
        self._optuna.set_trial_state_values(trial_id, STATES[trial.state], values)

    def cache(self, objective: str) -> Cache:
        """All scores of this objective in the database, of whichever study."""
        found: Cache = {}
        for study in self._optuna.get_all_studies():
            if study.user_attrs.get(IDENTITY, {}).get("objective") == objective:
                self._add(found, study.study_name, study._study_id, study.user_attrs[IDENTITY])
        return found

    def _add(self, found: Cache, name: str, study_id: int, identity: Mapping[str, Any]) -> None:
        for stored in _ours(self._optuna, study_id):
            scores, sources = _scores(stored)
            key = key_of(stored.user_attrs["changes"])
            for seed, score, source in zip(identity["seeds"], scores, sources, strict=False):
                found.setdefault((key, seed), (score, source or f"{name}/{stored.number}"))


def key_of(changes: Mapping[str, Any]) -> str:
    """What a configuration comes to: names of allocations may mean other things elsewhere."""
    return json.dumps(changes, sort_keys=True)


def read(where: str | Path, name: str) -> tuple[dict[str, Any], list[Trial]]:
    """What a study was made of, and its trials. Raises StorageError if there is none."""
    path = path_of(where)
    if not path.is_file():
        raise StorageError(f"{path}: there is no such file")
    storage = open_storage(path)
    studies = {each.study_name: each for each in storage.optuna.get_all_studies()}
    if name not in studies or IDENTITY not in studies[name].user_attrs:
        known = ", ".join(studies) or "none"
        raise StorageError(f"{path}: no search of the name {name!r}; there are: {known}")
    identity = studies[name].user_attrs[IDENTITY]
    stored = _ours(storage.optuna, studies[name]._study_id)
    return identity, [_read(each, identity["required"]) for each in stored]


def _ours(storage: BaseStorage, study_id: int) -> list[FrozenTrial]:
    """Without what other tools may have put there."""
    stored = storage.get_all_trials(study_id, deepcopy=False)
    return [each for each in stored if "configuration" in each.user_attrs]


def _study_id(storage: Storage, name: str) -> int:
    try:
        return storage.optuna.create_new_study([StudyDirection.MAXIMIZE], name)
    except optuna.exceptions.DuplicatedStudyError:
        return storage.optuna.get_study_id_from_name(name)
    except optuna.exceptions.StorageInternalError as error:
        why = cause(error.__cause__ or error)
        raise StorageError(f"study {name!r} in {storage.name}: {why}") from error


def _read(stored: FrozenTrial, required: float) -> Trial:
    allocation, values = stored.user_attrs["configuration"]
    scores, sources = _scores(stored)
    return Trial(
        stored.number,
        Configuration(allocation, tuple((path, value) for path, value in values)),
        required,
        scores,
        sources,
        NAMES[stored.state],
        stored.user_attrs.get("why", ""),
    )


def _scores(stored: FrozenTrial) -> tuple[tuple[Score, ...], tuple[str | None, ...]]:
    kept = stored.user_attrs.get("scores", {"scores": [], "sources": []})
    return tuple(Score(*each) for each in kept["scores"]), tuple(kept["sources"])


def _shown(trial: Trial) -> dict[str, Any]:
    """``why`` is always written: a search that ended while it wrote may have left another."""
    shown: dict[str, Any] = {
        "attainment": trial.attainment,
        "half_width_per_s": trial.confidence_per_s,
        "cached_from": sorted({each for each in trial.sources if each}) or None,
    }
    known = {name: each for name, each in shown.items() if each is not None}
    return {"why": trial.why, **known}


def _parameters(
    space: Space, configuration: Configuration
) -> tuple[dict[str, Value], dict[str, BaseDistribution]]:
    knobs = {each.path: each for each in space.knobs}
    params: dict[str, Value] = {
        "allocation": configuration.allocation,
        **dict(configuration.values),
    }
    names = [each.name for each in space.allocations]
    distributions: dict[str, BaseDistribution] = {"allocation": CategoricalDistribution(names)}
    for path, value in configuration.values:
        distributions[path] = _distribution(knobs[path], value)
    return params, distributions


def _distribution(knob: Knob, value: Value) -> BaseDistribution:
    """Of a study it has to be of one kind for a name; the limits may differ."""
    numbers = [each for each in (*knob.values, value) if isinstance(each, int | float)]
    if not knob.is_ordered:
        return CategoricalDistribution(knob.values)
    if all(isinstance(each, int) for each in knob.values):
        return IntDistribution(int(min(numbers)), int(max(numbers)))
    return FloatDistribution(float(min(numbers)), float(max(numbers)))
