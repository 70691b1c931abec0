from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easerve.search.methods.method import method
from easerve.search.records import Records, key_of, read
from easerve.search.space import SHARE, Configuration
from easerve.search.storage import StorageError, open_storage
from easerve.search.study import Study
from tests.search.landscapes import BATCH, GAP, WHEN, Fake, ruled, space


@given(st.sampled_from([*ruled(), *space()]))
def test_a_configuration_comes_back_as_it_was(configuration: Configuration) -> None:
    of = ruled() if configuration.allocation in ("e1-p1-d1", "e2-p1-d1") else space()
    records = Records(open_storage(None), "s", of, 0.9)
    trial = records.start(configuration)
    assert records.trials() == [trial]
    assert trial.configuration == configuration


def test_parameters_are_of_the_kinds_that_they_are(path: Path) -> None:
    """One kind for each name, also where an allocation has one value, or a knob is at rest."""
    records = Records(open_storage(path), "s", ruled(), 0.9)
    for configuration in list(ruled())[::4]:
        records.start(configuration)
    stored = optuna.load_study(study_name="s", storage=f"sqlite:///{path}").trials
    kinds = {
        name: type(each).__name__ for trial in stored for name, each in trial.distributions.items()
    }
    assert kinds == {
        "allocation": "CategoricalDistribution",
        BATCH: "IntDistribution",
        WHEN: "CategoricalDistribution",
        GAP: "FloatDistribution",
        SHARE: "FloatDistribution",
    }


def test_a_study_is_read_without_what_made_it(path: Path) -> None:
    made = Study(path, "s", space(), Fake(), method("grid", space(), 7))
    made.run(2)
    identity, trials = read(path, "s")
    assert trials == made.trials
    assert (identity["method"], identity["seed"], identity["objective"]) == ("grid", 7, "ridge")
    with pytest.raises(StorageError, match="no search of the name 'other'; there are: s"):
        read(path, "other")
    with pytest.raises(StorageError, match="there is no such file"):
        read(path.with_name("none.db"), "s")
    assert not path.with_name("none.db").exists()


def test_trials_of_other_tools_are_left_alone(path: Path) -> None:
    """The dashboard can put one there; a study that is all theirs is not written to."""
    made = Study(path, "s", space(), Fake(), method("grid", space(), 0))
    made.run(1)
    theirs = optuna.load_study(study_name="s", storage=f"sqlite:///{path}")
    theirs.enqueue_trial({"allocation": "e2-p2-d4"})
    assert [each.state for each in made.run(2)] == ["complete"] * 2
    optuna.create_study(study_name="theirs", storage=f"sqlite:///{path}").ask()
    with pytest.raises(StorageError, match="not made by a search"):
        Study(path, "theirs", space(), Fake(), method("grid", space(), 0))


def test_the_order_of_changes_is_nothing() -> None:
    assert key_of({"a": 1, "b": {}}) == key_of({"b": {}, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})
