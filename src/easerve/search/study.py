"""A search from beginning to end: propose, score seed by seed, give up the hopeless, record.

What is tried next is a function of the trials before it, and what a trial comes to is one of those
and of its scores; so a search that was interrupted goes on as if it had not been, and one that is
done again with the same seed is the same.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from easerve.search import trials as histories
from easerve.search.ahead import Ahead
from easerve.search.methods.method import Method
from easerve.search.objective import Objective, Score, Unworkable
from easerve.search.records import Cache, Records, key_of
from easerve.search.space import Configuration, Space
from easerve.search.stopping import hopeless
from easerve.search.storage import open_storage
from easerve.search.trials import Trial

OnTrial = Callable[[Trial], None]


class Study:
    """``where``: the path of a SQLite database or its URL, ``sqlite:///PATH``; None: in memory.
    ``prune``: hopeless trials are given up early. Raises StorageError, also if there is a study of
    this name with another objective, space, method or seed.
    """

    def __init__(
        self,
        where: str | Path | None,
        name: str,
        space: Space,
        objective: Objective,
        method: Method,
        prune: bool = True,
    ) -> None:
        self._space = space
        self._objective = objective
        self._method = method
        self._prune = prune
        self._records = Records(open_storage(where), name, space, objective.required)
        self._identity = identity(space, objective, method, prune)
        self._records.claim(self._identity)
        self._name = name
        self._cache: Cache = {}
        self._ahead: Ahead | None = None
        self._on_trial: OnTrial = _ignore
        self._on_score: OnTrial = _ignore

    @property
    def trials(self) -> list[Trial]:
        """As they are stored; the last one may be running."""
        return self._records.trials()

    @property
    def best(self) -> Trial | None:
        """None if no trial keeps the promise."""
        return histories.best(self.trials)

    def run(
        self,
        num_trials: int,
        on_trial: OnTrial | None = None,
        on_score: OnTrial | None = None,
        executor: Executor | None = None,
        jobs: int = 1,
    ) -> list[Trial]:
        """Goes on until there are so many in all, or nothing is left to try. Returns all that are
        finished.

        ``on_trial``: is told each trial that this run finishes; ``on_score``: a trial with each
        score that it gets. ``executor``: scores are made in it, ``jobs`` at once; what is recorded
        is the same. Raises StorageError if another process runs this study. What the objective
        raises, but Unworkable, ends the run; the next one takes the trial up.
        """
        with self._records.writing():
            self._records.claim(self._identity)
            self._cache = self._records.cache(self._objective.key)
            self._on_trial, self._on_score = on_trial or _ignore, on_score or _ignore
            if executor is not None:
                self._ahead = Ahead(self._objective, executor, 2 * jobs)
            try:
                return self._run(num_trials)
            finally:
                if self._ahead is not None:
                    self._ahead.forget()
                self._ahead = None

    def _run(self, num_trials: int) -> list[Trial]:
        stored = self.trials
        finished = [each for each in stored if each.state != "running"]
        running = [each for each in stored if each.state == "running"]
        while len(finished) < num_trials:
            trial = running.pop() if running else self._next(finished)
            if trial is None:
                break
            finished.append(self._tried(trial, finished, num_trials))
            self._on_trial(finished[-1])
        return finished

    def _next(self, finished: Sequence[Trial]) -> Trial | None:
        configuration = self._method.propose(finished)
        return None if configuration is None else self._records.start(configuration)

    def _tried(self, trial: Trial, finished: Sequence[Trial], num_trials: int) -> Trial:
        seeds, incumbent = self._objective.seeds, histories.best(finished)
        for seed in seeds[len(trial.scores) :]:
            if why := self._hopeless(trial, incumbent):
                return self._finished(replace(trial, state="pruned", why=why))
            self._look_ahead(trial, finished, num_trials)
            try:
                score, source = self._score(trial.configuration, seed)
            except Unworkable as error:
                return self._finished(replace(trial, state="failed", why=str(error)))
            if why := _unusable(score):
                return self._finished(replace(trial, state="failed", why=f"seed {seed}: {why}"))
            trial = self._with(trial, seed, score, source)
            self._on_score(trial)
        return self._finished(replace(trial, state="complete", why=""))

    def _hopeless(self, trial: Trial, incumbent: Trial | None) -> str:
        if not self._prune or not trial.scores:
            return ""
        num_seeds = len(self._objective.seeds)
        return hopeless(trial.scores, num_seeds, trial.required, incumbent)

    def _score(self, configuration: Configuration, seed: int) -> tuple[Score, str | None]:
        known = self._cache.get(self._key(configuration, seed))
        if known is not None:
            return known
        made = self._ahead or self._objective
        return made.score(configuration, seed), None

    def _with(self, trial: Trial, seed: int, score: Score, source: str | None) -> Trial:
        trial = replace(trial, scores=(*trial.scores, score), sources=(*trial.sources, source))
        self._records.save(trial)
        key = self._key(trial.configuration, seed)
        self._cache.setdefault(key, (score, source or f"{self._name}/{trial.number}"))
        return trial

    def _finished(self, trial: Trial) -> Trial:
        self._records.finish(trial)
        if self._ahead is not None:
            self._ahead.forget(trial.configuration)
        return trial

    def _key(self, configuration: Configuration, seed: int) -> tuple[str, int]:
        return key_of(self._space.changes(configuration)), seed

    def _look_ahead(self, trial: Trial, finished: Sequence[Trial], num_trials: int) -> None:
        if self._ahead is None:
            return
        for configuration, seed in self._needed(trial, finished, num_trials):
            if self._ahead.num_free <= 0:
                return
            if self._key(configuration, seed) not in self._cache:
                self._ahead.expect(configuration, seed)

    def _needed(
        self, trial: Trial, finished: Sequence[Trial], num_trials: int
    ) -> Iterator[tuple[Configuration, int]]:
        """What will be scored next, as far as it is known. While a trial may still be given up and
        others are known to come, only the first seed of each is.
        """
        seeds, is_blind = self._objective.seeds, self._method.is_blind
        some = seeds[:1] if self._prune and is_blind else seeds
        for seed in seeds[len(trial.scores) :] if trial.scores else some:
            yield trial.configuration, seed
        known = [*finished, trial]
        while is_blind and len(known) < num_trials:
            configuration = self._method.propose(known)
            if configuration is None:
                return
            yield from ((configuration, seed) for seed in some)
            known.append(Trial(len(known), configuration, trial.required))


def identity(space: Space, objective: Objective, method: Method, prune: bool) -> dict[str, Any]:
    """What makes a study what it is."""
    names = [each.name for each in fields(cast(Any, method)) if each.name != "space"]
    return {
        "objective": objective.key,
        "seeds": list(objective.seeds),
        "required": objective.required,
        "space": _digest(space.allocations, space.knobs),
        "method": method.name,
        "seed": method.seed,
        "settings of the method": _digest([(each, getattr(method, each)) for each in names]),
        "early stopping": prune,
    }


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def _unusable(score: Score) -> str:
    numbers = {
        "goodput": score.goodput_per_s,
        "attainment": score.attainment,
        "rate": score.rate_per_s,
    }
    return ", ".join(
        f"{name} is {each}" for name, each in numbers.items() if not math.isfinite(each)
    )


def _ignore(trial: Trial) -> None:
    """Nobody is told."""
