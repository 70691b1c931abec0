import pytest
from hypothesis import given
from hypothesis import strategies as st

from easerve.policy import directory as module
from easerve.policy.directory import Directory
from easerve.types import WorkerId

from .scenario import E0, P0, P1


@pytest.fixture
def directory() -> Directory:
    directory = Directory()
    directory.gained(E0, "cat")
    directory.gained(P0, "cat")
    directory.gained(P0, "dog")
    return directory


def test_it_knows_who_has_what(directory: Directory) -> None:
    assert [*directory.holders("cat")] == [E0, P0]
    assert [*directory.holders("owl")] == []
    assert directory.holds(P0, "dog")
    assert not directory.holds(E0, "dog")
    assert not directory.holds(P0, "owl")


def test_what_is_dropped_is_not_there_any_more(directory: Directory) -> None:
    directory.dropped(P0, ["cat", "never had"])
    directory.dropped(P1, ["dog"])
    assert [*directory.holders("cat")] == [E0]
    assert directory.holds(P0, "dog")


def test_a_lost_engine_has_nothing(directory: Directory) -> None:
    directory.lost(P0)
    directory.lost(P0)
    assert [*directory.holders("cat")] == [E0]
    assert [*directory.holders("dog")] == []


def test_beyond_its_size_what_came_first_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 2)
    directory = Directory()
    for key in ("cat", "dog", "cat", "owl"):
        directory.gained(P0, key)
    assert [directory.holds(P0, key) for key in ("cat", "dog", "owl")] == [True, False, True]


WORKERS, KEYS = st.sampled_from([E0, P0, P1]), st.sampled_from("abc")
CHANGES = st.tuples(st.sampled_from(["gained", "dropped", "lost"]), WORKERS, KEYS)


@given(st.lists(CHANGES))
def test_it_is_a_set_of_pairs(changes: list[tuple[str, WorkerId, str]]) -> None:
    directory, pairs = Directory(), set[tuple[WorkerId, str]]()
    for change, worker_id, key in changes:
        if change == "gained":
            directory.gained(worker_id, key)
            pairs.add((worker_id, key))
        elif change == "dropped":
            directory.dropped(worker_id, [key])
            pairs.discard((worker_id, key))
        else:
            directory.lost(worker_id)
            pairs = {pair for pair in pairs if pair[0] != worker_id}
        assert {(id_, each) for each in "abc" for id_ in directory.holders(each)} == pairs
        assert all(directory.holds(*pair) for pair in pairs)
    assert directory._holders.keys() == {key for _, key in pairs}, "nothing else is kept"
