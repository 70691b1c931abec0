import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.policy.pool import Pool, Worker
from easerve.types import NS_PER_S, Side, Stage, WorkerId

from .scenario import D0, E0, E1, L0, P0, P1


@pytest.fixture
def pool() -> Pool:
    pool = Pool()
    pool.join(Worker(P0, Stage.PREFILL))
    pool.join(Worker(P1, Stage.PREFILL))
    return pool


@pytest.fixture
def worker() -> Worker:
    return Worker(P0, Stage.PREFILL)


def test_backlog_is_the_sum_of_what_is_held(worker: Worker) -> None:
    worker.hold("a", 5)
    worker.hold("b", 3)
    worker.hold("a", 1)
    assert worker.backlog_tokens == 4
    worker.release("a")
    worker.release("unknown")
    assert (worker.work, worker.backlog_tokens) == ({"b": 3}, 3)


def test_what_starts_is_held_and_what_is_only_held_does_not_run(worker: Worker) -> None:
    worker.hold("on its way", 5)
    worker.start("a", 3, now_ns=0)
    assert worker.running == {"a": 0}
    assert worker.backlog_tokens == 8
    worker.start("on its way", 5, now_ns=9)
    assert worker.running == {"a": 0, "on its way": 9}
    assert worker.backlog_tokens == 8


def test_work_took_as_long_as_it_ran_alone(worker: Worker) -> None:
    worker.start("a", 1, now_ns=5 * NS_PER_S)
    assert worker.finish("a", 5 * NS_PER_S, now_ns=7 * NS_PER_S) == 2
    worker.start("b", 1, now_ns=20 * NS_PER_S)
    assert worker.finish("b", 20 * NS_PER_S, now_ns=23 * NS_PER_S) == 3


def test_work_behind_other_work_took_as_long_as_since_that_ended(worker: Worker) -> None:
    worker.start("a", 1, now_ns=0)
    worker.start("b", 1, now_ns=1 * NS_PER_S)
    assert worker.finish("a", 0, now_ns=4 * NS_PER_S) == 4
    assert worker.finish("b", 1 * NS_PER_S, now_ns=6 * NS_PER_S) == 2
    assert (worker.work, worker.running, worker.backlog_tokens) == ({}, {}, 0)


def test_work_that_is_said_to_have_waited_until_now_took_no_time(worker: Worker) -> None:
    worker.hold("a", 1)
    assert worker.finish("a", since_ns=8 * NS_PER_S, now_ns=7 * NS_PER_S) == 0


def test_what_is_held_begins_once_and_only_if_it_still_is(worker: Worker) -> None:
    worker.hold("a", 1)
    worker.begin("a", now_ns=1)
    worker.begin("a", now_ns=2)
    worker.begin("gone", now_ns=3)
    assert worker.running == {"a": 1}


def test_backlog_in_seconds_shrinks_as_the_first_piece_gets_on(worker: Worker) -> None:
    assert worker.backlog_s(0.1, now_ns=NS_PER_S) == 0
    worker.hold("on its way", 10)
    assert worker.backlog_s(0.1, now_ns=NS_PER_S) == pytest.approx(1)
    worker.start("a", 20, now_ns=NS_PER_S)
    worker.start("b", 30, now_ns=NS_PER_S)
    left_s = [worker.backlog_s(0.1, now_ns=later * NS_PER_S) for later in (1, 2, 3, 4, 9)]
    assert left_s == pytest.approx([6, 5, 4, 4, 4])
    worker.finish("a", NS_PER_S, now_ns=9 * NS_PER_S)
    left_s = [worker.backlog_s(0.1, now_ns=later * NS_PER_S) for later in (9, 10)]
    assert left_s == pytest.approx([4, 3])


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
    pool.join(Worker(P0, Stage.PREFILL))
    assert [worker.work for worker in pool] == [{}, {}]


def test_has_wants_an_engine_of_each_stage(pool: Pool) -> None:
    assert pool.has(Stage.PREFILL)
    assert not pool.has(Stage.PREFILL, Stage.DECODE)
    pool.join(Worker(D0, Stage.DECODE))
    assert pool.has(Stage.PREFILL, Stage.DECODE)
    assert [worker.worker_id for worker in pool.of(Stage.PREFILL)] == [P0, P1]


def test_prefill_engines_beside_an_encoder_are_the_local_side(pool: Pool) -> None:
    pool.join(Worker(L0, Stage.PREFILL, beside=(E0,)))
    pool.join(Worker(E0, Stage.ENCODE))
    sides = {side: [w.worker_id for w in workers] for side, workers in pool.sides().items()}
    assert sides == {Side.REMOTE: [P0, P1], Side.LOCAL: [L0]}
    pool.lose(L0)
    assert [*pool.sides()] == [Side.REMOTE]


def test_the_least_loaded_engine_of_the_stage_is_picked(pool: Pool) -> None:
    pool.join(Worker(E0, Stage.ENCODE))
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
    assert pool.pick(Stage.PREFILL, max_work=0) is None
    assert pool.pick(Stage.PREFILL, max_work=1) is pool.get(P0)
    assert pool.pick(Stage.PREFILL) is pool.get(P0)


def test_a_stage_is_starved_from_when_its_last_engine_was_lost(pool: Pool) -> None:
    pool.note_starved_stages(10)
    assert pool.starved_since == {Stage.ENCODE: 10, Stage.DECODE: 10}
    pool.join(Worker(E0, Stage.ENCODE))
    pool.note_starved_stages(20)
    assert pool.starved_since == {Stage.DECODE: 10}
    pool.lose(E0)
    pool.note_starved_stages(30)
    assert pool.starved_since == {Stage.ENCODE: 30, Stage.DECODE: 10}


# Who is picked ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 3)), st.sets(st.sampled_from("abcde"))
)
def test_no_worker_would_have_been_better(backlog: dict[str, int], avoid: set[str]) -> None:
    pool = Pool()
    for name, tokens in backlog.items():
        pool.join(Worker(WorkerId(name), Stage.DECODE))
        worker = pool.get(WorkerId(name))
        assert worker is not None
        worker.hold("work", tokens)
    chosen = pool.pick(Stage.DECODE, {WorkerId(name) for name in avoid})
    usable = backlog.keys() - avoid or backlog.keys()
    best = min(usable, key=lambda name: (backlog[name], name), default=None)
    assert (None if chosen is None else chosen.worker_id) == best


def test_of_two_idle_encoders_the_one_with_less_prefill_beside_it_is_picked() -> None:
    pool = Pool()
    local = Worker(L0, Stage.PREFILL, beside=(E0,))
    for worker in (Worker(E0, Stage.ENCODE), Worker(E1, Stage.ENCODE), local):
        pool.join(worker)
    first = pool.pick(Stage.ENCODE)
    local.hold("prompt", 100)
    second = pool.pick(Stage.ENCODE)
    assert first is not None
    assert second is not None
    assert (first.worker_id, second.worker_id) == (E0, E1)
