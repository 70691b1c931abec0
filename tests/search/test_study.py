import math
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from easerve.search.ahead import Ahead
from easerve.search.methods.method import METHODS, Candidate, method
from easerve.search.objective import Score, Unworkable
from easerve.search.space import SHARE, Configuration, Knob, Space
from easerve.search.storage import StorageError
from easerve.search.study import Study
from easerve.search.trials import Trial, best
from tests.search.landscapes import BATCH, Fake, allocation, ridge, space, unworkable

LUCK = {1: 1.3, 2: 0.8, 3: 0.9}


def small() -> Space:
    """Two allocations of four."""
    knobs = [Knob(BATCH, (4, 8)), Knob(SHARE, (0.5, 0.65))]
    return Space([allocation("e4-p2-d2"), allocation("e2-p2x2-d2")], knobs)


def study(
    of: Space, objective: Fake, name: str = "grid", where: Path | None = None, **options: Any
) -> Study:
    return Study(where, options.pop("called", "s"), of, objective, method(name, of, 1), **options)


def test_the_winner_is_the_best_of_all_by_brute_force() -> None:
    found = study(space(), Fake(luck=LUCK))
    assert len(found.run(10_000)) == len(space())
    won = found.best
    assert won is not None
    assert won.configuration == max(space(), key=ridge)
    assert won.goodput_per_s == pytest.approx(3.0)


def test_a_study_without_trials_has_no_winner() -> None:
    assert study(space(), Fake()).best is None


def test_no_winner_if_none_keeps_the_promise() -> None:
    found = study(small(), Fake(attainment=lambda each: 0.899))
    found.run(100)
    assert [each.state for each in found.trials] == ["complete"] * 8
    assert found.best is None


def by_luck(configuration: Configuration) -> float:
    """Not a number, infinite, without an engine, or as it is."""
    match configuration[BATCH], configuration[SHARE]:
        case 4, 0.5:
            return math.nan
        case 4, 0.65:
            return math.inf
        case 8, 0.5:
            return unworkable(configuration)
    return ridge(configuration)


def test_what_cannot_be_scored_fails_with_the_cause_and_never_wins(path: Path) -> None:
    found = study(small(), Fake(by_luck), where=path)
    one = found.run(4)
    assert one == found.trials
    assert [each.state for each in one] == ["failed", "failed", "failed", "complete"]
    assert [each.why for each in one] == [
        "seed 1: goodput is nan",
        "seed 1: goodput is inf",
        "no engine starts",
        "",
    ]
    assert found.best is not None
    assert math.isfinite(found.best.goodput_per_s or math.nan)


def test_hopeless_trials_are_stopped_early_and_the_winner_is_the_same() -> None:
    whole, early = Fake(luck=LUCK), Fake(luck=LUCK)
    first = study(small(), whole, prune=False)
    second = study(small(), early, prune=True)
    first.run(100)
    second.run(100)
    assert first.best == second.best
    assert len(whole.calls) == 3 * 8
    assert len(early.calls) < 0.8 * len(whole.calls)
    states = {each.state for each in second.trials}
    assert states == {"complete", "pruned"}
    assert all(each.why for each in second.trials if each.state == "pruned")
    assert {each.state for each in first.trials} == {"complete"}


def test_every_trial_meets_the_seeds_in_their_order() -> None:
    objective = Fake(luck=LUCK)
    found = study(small(), objective, prune=False)
    found.run(2)
    trials = found.trials
    assert objective.calls == [(each.configuration, seed) for each in trials for seed in LUCK]
    assert [each.goodput_per_s for each in trials[0].scores] == [
        ridge(trials[0].configuration) * each for each in LUCK.values()
    ]


def test_listeners_hear_each_score_and_each_trial() -> None:
    scores: list[Trial] = []
    trials: list[Trial] = []
    found = study(small(), Fake(luck=LUCK), prune=False)
    finished = found.run(2, trials.append, scores.append)
    assert trials == finished == found.trials
    assert [(each.number, len(each.scores)) for each in scores] == [
        (number, num) for number in (0, 1) for num in (1, 2, 3)
    ]


def test_it_goes_on_to_a_number_in_all() -> None:
    objective = Fake()
    found = study(small(), objective)
    assert len(found.run(3)) == 3
    assert len(found.run(3)) == 3
    assert len(found.run(5)) == 5
    assert len(found.run(100)) == 8
    assert len(objective.calls) == 8


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_is_the_same_study(name: str) -> None:
    one, other = (study(space(), Fake(luck=LUCK), name) for _ in range(2))
    assert one.run(12) == other.run(12)


def test_an_earlier_study_answers_at_once(path: Path) -> None:
    """All of it, also what it stopped early; and the studies come to the same."""
    first = study(small(), Fake(luck=LUCK), where=path)
    first.run(5)
    again = Fake(luck=LUCK)
    second = study(small(), again, where=path, called="again")
    second.run(5)
    assert again.calls == []
    assert all(each.cached for each in second.trials)
    assert second.trials[3].sources == ("s/3",) * len(second.trials[3].scores)
    blank = [replace(each, sources=()) for each in second.trials]
    assert blank == [replace(each, sources=()) for each in first.trials]


def test_scores_are_reused_seed_by_seed(path: Path) -> None:
    study(small(), Fake(luck={1: 1.3}), where=path).run(2)
    more = Fake(luck=LUCK)
    found = study(small(), more, where=path, called="more", prune=False)
    found.run(3)
    assert [seed for _, seed in more.calls] == [2, 3, 2, 3, 1, 2, 3]
    assert [each.cached for each in found.trials] == [False] * 3
    assert found.trials[0].sources == ("s/0", None, None)


def test_another_objective_or_another_meaning_of_an_allocation_is_not_answered(
    path: Path,
) -> None:
    study(small(), Fake(), where=path).run(1)
    other = Fake(key="another machine")
    study(small(), other, where=path, called="other").run(1)
    assert len(other.calls) == 1
    changed = [replace(each, changes={"encode.replicas": 9}) for each in small().allocations]
    third = Fake()
    study(Space(changed, small().knobs), third, where=path, called="third").run(1)
    assert len(third.calls) == 1


def test_what_failed_elsewhere_is_tried_again(path: Path) -> None:
    study(small(), Fake(unworkable), where=path).run(1)
    again = Fake()
    found = study(small(), again, where=path, called="again")
    found.run(1)
    assert found.trials[0].state == "complete"


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("objective: ridge there, other here", {"objective": Fake(key="other")}),
        (r"seeds: \[1\] there, \[1, 2\] here", {"objective": Fake(luck={1: 1.0, 2: 1.0})}),
        ("required: 0.9 there, 0.8 here", {"objective": Fake(required=0.8)}),
        ("space: ", {"space": space()}),
        ("method: grid there, random here", {"method": method("random", small(), 0)}),
        ("seed: 0 there, 4 here", {"method": method("grid", small(), 4)}),
        ("early stopping: True there, False here", {"prune": False}),
    ],
)
def test_a_study_of_the_same_name_with_something_else_is_refused(
    path: Path, what: str, changed: dict[str, Any]
) -> None:
    made: dict[str, Any] = {
        "space": small(),
        "objective": Fake(),
        "method": method("grid", small(), 0),
    }
    Study(path, "s", **made).run(1)
    with pytest.raises(StorageError, match=rf"study 's' in .*{what}.*choose another name"):
        Study(path, "s", **(made | changed))


def test_other_candidates_are_another_study(path: Path) -> None:
    first = next(iter(small()))
    for candidates, raises in (
        ([Candidate("e4-p2-d2")], False),
        ([Candidate("e4-p2-d2", (first,))], True),
    ):
        by = method("has", small(), 0, candidates)
        if not raises:
            Study(path, "s", small(), Fake(), by)
            continue
        with pytest.raises(StorageError, match="settings of the method"):
            Study(path, "s", small(), Fake(), by)


@dataclass
class Eager:
    """An executor that does at once what it is given."""

    given: list[tuple[Any, ...]] = field(default_factory=list)

    def submit(self, call: Any, *arguments: Any) -> "Future[Any]":
        self.given.append(arguments)
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except Unworkable as error:
            future.set_exception(error)
        return future


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_scores_made_ahead_change_nothing(name: str, prune: bool) -> None:
    def goodput(configuration: Configuration) -> float:
        return unworkable(configuration) if configuration[BATCH] == 2 else ridge(configuration)

    plain, ahead = (study(space(), Fake(goodput, LUCK), name, prune=prune) for _ in range(2))
    assert plain.run(12) == ahead.run(12, executor=Eager(), jobs=3)  # type: ignore[arg-type]


def test_blind_methods_look_ahead_and_do_no_more_than_is_needed() -> None:
    executor, objective = Eager(), Fake(luck=LUCK)
    found = study(small(), objective, "grid", prune=False)
    found.run(2, executor=executor, jobs=2)  # type: ignore[arg-type]
    assert len(executor.given) == 6
    assert len(set(executor.given)) == 6


def test_what_is_expected_is_bounded_and_can_be_forgotten() -> None:
    executor = Eager()
    ahead = Ahead(Fake(), executor, 2)  # type: ignore[arg-type]
    one, two, three = [each for _, each in zip(range(3), small(), strict=False)]
    for configuration in (one, one, two, three):
        ahead.expect(configuration, 1)
    assert executor.given == [(one, 1), (two, 1)]
    ahead.forget(one)
    assert ahead.num_free == 1
    assert ahead.score(two, 1) == Score(ridge(two), 0.95, 4.0)
    assert ahead.score(three, 1) == Score(ridge(three), 0.95, 4.0)
    assert ahead.num_free == 2


@pytest.mark.long
def test_scores_are_made_in_processes() -> None:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    plain, parallel = (study(small(), Fake(ridge, LUCK)) for _ in range(2))
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        objective = parallel._objective
        assert isinstance(objective, Fake)
        objective.attainment = always
        found = parallel.run(8, executor=executor, jobs=2)
    assert found == plain.run(8)


def always(configuration: Configuration) -> float:
    return 0.95


def test_optuna_reads_it(path: Path) -> None:
    """Parameters as they are, the value, the mean after each seed, what is feasible, and states."""

    def attainment(configuration: Configuration) -> float:
        return 0.85 if configuration[SHARE] == 0.65 else 0.95

    found = study(small(), Fake(luck=LUCK, attainment=attainment), where=path)
    found.run(100)
    theirs = optuna.load_study(study_name="s", storage=f"sqlite:///{path}")
    assert [each.state.name.lower() for each in theirs.trials] == [
        each.state for each in found.trials
    ]
    for trial, ours in zip(theirs.trials, found.trials, strict=True):
        assert trial.params == {"allocation": ours.configuration.allocation} | dict(
            ours.configuration.values
        )
        assert trial.value == ours.goodput_per_s
        assert len(trial.intermediate_values) == len(ours.scores)
        assert trial.constraints["0"] == pytest.approx(0.9 - (ours.attainment or 0.0))
    expected = best(found.trials)
    assert expected is not None
    assert theirs.best_trial.number == expected.number


def test_the_dashboard_shows_it(path: Path) -> None:
    dashboard = pytest.importorskip("optuna_dashboard")
    study(small(), Fake(luck=LUCK), where=path).run(4)
    app = dashboard.wsgi(optuna.storages.RDBStorage(f"sqlite:///{path}"))
    listed = asked(app, "/api/studies")
    assert [each["study_name"] for each in listed["study_summaries"]] == ["s"]
    shown = asked(app, f"/api/studies/{listed['study_summaries'][0]['study_id']}")
    assert len(shown["trials"]) == 4
    assert shown["trials"][0]["constraints"] == [pytest.approx(-0.05)]


def asked(app: Any, path: str) -> Any:
    import json
    from wsgiref.util import setup_testing_defaults

    environment: dict[str, Any] = {"PATH_INFO": path, "REQUEST_METHOD": "GET"}
    setup_testing_defaults(environment)
    statuses: list[str] = []
    body: Iterable[bytes] = app(environment, lambda status, headers, *rest: statuses.append(status))
    assert statuses[0].startswith("200")
    return json.loads(b"".join(body))
