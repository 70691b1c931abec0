from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.policy.offload import least_backlog
from easerve.types import WorkerId

from .scenario import P0, P1

WORKERS = st.sampled_from([WorkerId(name) for name in "abcde"])


def test_nobody_is_chosen_from_nobody() -> None:
    assert least_backlog({}) is None


def test_the_least_loaded_is_chosen() -> None:
    assert least_backlog({P0: 7, P1: 3}) == P1


def test_ties_go_by_id_whatever_the_order() -> None:
    assert least_backlog({P1: 5, P0: 5}) == P0


def test_one_to_avoid_is_chosen_only_when_there_is_no_other() -> None:
    assert least_backlog({P0: 0, P1: 9}, avoid=[P0]) == P1
    assert least_backlog({P0: 0}, avoid=[P0]) == P0


@settings(deadline=None)
@given(st.dictionaries(WORKERS, st.integers(0, 3), min_size=1), st.sets(WORKERS))
def test_no_worker_would_have_been_better(
    backlog: dict[WorkerId, int], avoid: set[WorkerId]
) -> None:
    chosen = least_backlog(backlog, avoid)
    usable = backlog.keys() - avoid or backlog.keys()
    assert chosen is not None
    assert chosen in usable
    assert all((backlog[chosen], chosen) <= (backlog[other], other) for other in usable)
