import pytest

from easerve.policy.pool import Pool, Worker
from easerve.types import Stage

from .scenario import D0, E0, P0, P1


@pytest.fixture
def pool() -> Pool:
    pool = Pool()
    pool.join(P0, Stage.PREFILL)
    pool.join(P1, Stage.PREFILL)
    return pool


def test_backlog_is_the_sum_of_what_is_held() -> None:
    worker = Worker(P0, Stage.PREFILL)
    worker.hold("a", 5)
    worker.hold("b", 3)
    worker.hold("a", 1)
    assert worker.backlog_tokens == 4
    worker.release("a")
    worker.release("unknown")
    assert (worker.work, worker.backlog_tokens) == ({"b": 3}, 3)


def test_a_lost_engine_is_forgotten_once(pool: Pool) -> None:
    assert pool.lose(P0)
    assert not pool.lose(P0)
    assert [worker.worker_id for worker in pool] == [P1]
    assert pool.get(P0) is None
    assert pool.get(None) is None


def test_work_of_an_engine_that_is_gone_needs_no_release(pool: Pool) -> None:
    pool.lose(P0)
    pool.release(P0, "a")
    pool.release(None, "a")


def test_an_engine_that_joins_again_holds_nothing(pool: Pool) -> None:
    held = pool.pick(Stage.PREFILL)
    assert held is not None
    held.hold("a", 1)
    pool.join(P0, Stage.PREFILL)
    assert [worker.work for worker in pool] == [{}, {}]


def test_has_wants_an_engine_of_each_stage(pool: Pool) -> None:
    assert pool.has(Stage.PREFILL)
    assert not pool.has(Stage.PREFILL, Stage.DECODE)
    pool.join(D0, Stage.DECODE)
    assert pool.has(Stage.PREFILL, Stage.DECODE)


def test_the_least_loaded_engine_of_the_stage_is_picked(pool: Pool) -> None:
    pool.join(E0, Stage.ENCODE)
    first = pool.pick(Stage.PREFILL)
    assert first is not None
    assert first.worker_id == P0
    first.hold("a", 1)
    assert pool.pick(Stage.PREFILL) is pool.get(P1)
    assert pool.pick(Stage.PREFILL, avoid=[P1]) is first
    assert pool.pick(Stage.DECODE) is None


def test_an_engine_that_holds_anything_is_not_idle(pool: Pool) -> None:
    for worker in pool:
        worker.hold("nothing to do yet", 0)
    assert pool.pick(Stage.PREFILL) is not None
    assert pool.pick(Stage.PREFILL, idle=True) is None


def test_a_stage_is_starved_from_when_its_last_engine_was_lost(pool: Pool) -> None:
    pool.note_starved_stages(10)
    assert pool.starved_since == {Stage.ENCODE: 10, Stage.DECODE: 10}
    pool.join(E0, Stage.ENCODE)
    pool.note_starved_stages(20)
    assert pool.starved_since == {Stage.DECODE: 10}
    pool.lose(E0)
    pool.note_starved_stages(30)
    assert pool.starved_since == {Stage.ENCODE: 30, Stage.DECODE: 10}
