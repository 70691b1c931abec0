"""A search that is ended anywhere goes on as if it had not been."""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import BaseStorage, InMemoryStorage

from easerve.search import study as studies
from easerve.search.methods.method import Candidate, Method, method
from easerve.search.objective import Score
from easerve.search.space import Configuration
from easerve.search.storage import Storage
from easerve.search.study import Study
from easerve.search.trials import Trial
from tests.search.landscapes import Fake, ridge, space, unworkable

LUCK = {1: 1.3, 2: 0.8}
WRITES = ("create_new", "set_")


class Ended(BaseException):
    """As an interrupt, which nothing catches."""


class Ending:
    """A storage that ends the search at its n-th write, just before it or just after."""

    def __init__(self, storage: BaseStorage, num_left: int, is_after: bool) -> None:
        self._storage = storage
        self._num_left = num_left
        self._is_after = is_after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        return self._ending(found) if name.startswith(WRITES) else found

    def _ending(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def written(*arguments: Any) -> Any:
            self._num_left -= 1
            if self._num_left < 0 and not self._is_after:
                raise Ended
            result = write(*arguments)
            if self._num_left < 0:
                raise Ended
            return result

        return written


def goodput(configuration: Configuration) -> float:
    failing = configuration.allocation == "e2-p4-d2"
    return unworkable(configuration) if failing else ridge(configuration)


def by_turns() -> Method:
    """Of which the third candidate fails."""
    names = ("e2-p2x2-d2", "e4-p2-d2", "e2-p4-d2")
    return method("has", space(), 3, [Candidate(each) for each in names])


@pytest.mark.parametrize("is_after", [False, True])
def test_wherever_it_ends_nothing_is_lost_or_done_twice(
    monkeypatch: pytest.MonkeyPatch, is_after: bool
) -> None:
    """At every single write. What was being scored, but not yet written, is scored again."""
    whole = Study(None, "s", space(), Fake(goodput, LUCK), by_turns()).run(6)
    assert {each.state for each in whole} == {"complete", "pruned", "failed"}
    for num_writes in range(1000):
        storage, objective = InMemoryStorage(), Fake(goodput, LUCK)
        ending = Storage(Ending(storage, num_writes, is_after), None)  # type: ignore[arg-type]
        if is_done(monkeypatch, ending, objective):
            break
        assert is_done(monkeypatch, Storage(storage, None), objective, whole)
        again = [num - 1 for num in Counter(objective.calls).values() if num > 1]
        assert again in ([], [1])
    assert num_writes > 40


def is_done(
    monkeypatch: pytest.MonkeyPatch,
    storage: Storage,
    objective: Fake,
    whole: list[Trial] | None = None,
) -> bool:
    monkeypatch.setattr(studies, "open_storage", lambda where: storage)
    try:
        found = Study(None, "s", space(), objective, by_turns())
        trials = found.run(6)
    except Ended:
        return False
    assert whole is None or trials == found.trials == whole
    return True


def test_an_interrupted_trial_is_taken_up_with_the_seeds_it_lacks(path: Path) -> None:
    class Interrupting(Fake):
        def score(self, configuration: Configuration, seed: int) -> Score:
            if len(self.calls) == 3:
                self.calls.append((configuration, seed))
                raise KeyboardInterrupt
            return super().score(configuration, seed)

    objective = Interrupting(luck=LUCK)
    found = Study(path, "s", space(), objective, method("grid", space(), 0), False)
    with pytest.raises(KeyboardInterrupt):
        found.run(3)
    assert [each.state for each in found.trials] == ["complete", "running"]
    assert len(found.trials[1].scores) == 1
    assert found.best is not None
    again = Study(path, "s", space(), objective, method("grid", space(), 0), False)
    assert [each.state for each in again.run(3)] == ["complete"] * 3
    assert [seed for _, seed in objective.calls] == [1, 2, 1, 2, 2, 1, 2]


@dataclass
class Slow(Fake):
    """Writes down each pair that it is asked for before it works on it."""

    log: Path = Path()

    def score(self, configuration: Configuration, seed: int) -> Score:
        with self.log.open("a") as file:
            file.write(f"{configuration} {seed}\n")
        time.sleep(0.015)
        return super().score(configuration, seed)


def searched(path: Path, log: Path) -> None:
    Study(path, "s", space(), Slow(goodput, LUCK, log=log), by_turns()).run(40)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_ten_times_it_comes_to_the_same(tmp_path: Path, path: Path, seed: int) -> None:
    log, times, num_killed = tmp_path / "log", random.Random(seed), 0
    context = multiprocessing.get_context("fork")
    for _ in range(10):
        child = context.Process(target=searched, args=(path, log))
        child.start()
        assert child.pid is not None
        child.join(times.uniform(0.03, 0.15))
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            num_killed += 1
        child.join()
    objective = Slow(goodput, LUCK, log=log)
    found = Study(path, "s", space(), objective, by_turns()).run(40)
    assert found == Study(None, "s", space(), Fake(goodput, LUCK), by_turns()).run(40)
    counted = Counter(log.read_text().splitlines())
    assert num_killed >= 5
    assert counted.total() - len(counted) <= num_killed
