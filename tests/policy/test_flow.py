from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.costs.linear import LinearCosts
from easerve.policy.estimates import Times
from easerve.policy.flow import (
    AGAIN_S,
    CAUTION,
    SHARE_OF_TTFT,
    START,
    UNLIMITED,
    Load,
    Waiting,
    Window,
    credit,
    queue_s,
)
from easerve.policy.gate import Credit

from .scenario import DEFAULTS, NONE, picture

COSTS = LinearCosts(
    encode_base_s=0.2,
    encode_token_s=0.001,
    prefill_base_s=0.1,
    prefill_token_s=0.0001,
    decode_token_s=0.02,
)
OPEN = Window()
PROMISE_S = 0.03
EMPTY = Load(num_passed=0, backlog_s=0.0, slots=(4, 4))


@pytest.fixture
def times() -> Times:
    return Times(COSTS)


# Window -------------------------------------------------------------------------------------------


def window_after(*legs: tuple[float, int], num_slots: int = 64) -> Window:
    """Legs that ended, by their TPOT as a multiple of the promise, and how many ran beside."""
    window = Window()
    for multiple, num_running in legs:
        window.observe(multiple * PROMISE_S, num_running, num_slots, PROMISE_S)
    return window


def size(window: Window, num_slots: int = 64) -> int:
    return window.usable([num_slots], PROMISE_S)


def test_without_a_promise_every_slot_is_usable() -> None:
    assert Window().usable((300, 5), promise_s=None) == 305


def test_a_window_begins_small_and_is_one_for_each_worker() -> None:
    assert Window().usable((300, 5), PROMISE_S) == int(START) + 5


def test_a_slow_leg_closes_the_window_part_of_the_way_to_what_should_have_been_right() -> None:
    assert size(window_after((2.0, 8))) == int(START - CAUTION * (START - 4))
    assert size(window_after(*[(2.0, 8)] * 50)) == 4


def test_a_slow_leg_that_ran_among_more_than_the_window_says_little() -> None:
    assert size(window_after((1.5, 30))) == START, "20 should have been right"


def test_fast_legs_open_the_window_by_what_they_left_of_the_promise() -> None:
    assert size(window_after(*[(0.5, 8)] * 4)) == START + 2
    assert size(window_after(*[(1.0, 8)] * 9)) == START


def test_fast_legs_that_were_few_do_not_open_the_window() -> None:
    assert size(window_after(*[(0.1, 3)] * 9)) == START
    assert size(window_after(*[(0.0, 4)] * 9)) == START + 1, "half of the window was needed"


def test_a_window_is_no_wider_than_the_slots_and_never_closed() -> None:
    assert size(window_after(*[(0.0, 10)] * 9, num_slots=10)) == 10
    assert size(window_after(*[(100.0, 1)] * 99)) == 1
    assert window_after(*[(100.0, 1)] * 99).usable((4, 4), PROMISE_S) == 2


def test_nothing_is_learned_while_nothing_is_promised() -> None:
    window = Window()
    for _ in range(9):
        window.observe(1.0, 8, 64, promise_s=None)
    assert size(window) == START


@pytest.mark.parametrize(("base_s", "crowding_s", "right"), [(0.01, 0.002, 10), (0.0, 0.001, 30)])
def test_a_window_finds_how_many_legs_keep_the_promise(
    base_s: float, crowding_s: float, right: int
) -> None:
    window, sizes = Window(), []
    for _ in range(400):
        num_running = size(window)
        window.observe(base_s + crowding_s * num_running, num_running, 64, PROMISE_S)
        sizes.append(num_running)
    assert all(right - 2 <= each <= right + 1 for each in sizes[300:])


# Credit -------------------------------------------------------------------------------------------


def test_without_flow_everything_may_pass(times: Times) -> None:
    busy = Load(num_passed=99, backlog_s=99.0, slots=(1,))
    assert credit(replace(DEFAULTS, flow=False), times, OPEN, busy) == Credit(UNLIMITED)
    assert credit(NONE, times, OPEN, busy) == Credit(UNLIMITED), "nor by a rule that never waits"


def test_as_many_legs_may_pass_as_decode_has_slots_left(times: Times) -> None:
    allowed = [credit(DEFAULTS, times, OPEN, replace(EMPTY, num_passed=n)) for n in (0, 5, 7, 8, 9)]
    assert [each.num_legs for each in allowed] == [8, 3, 1, 0, 0]
    assert allowed[-1] == Credit(0, "decode", again_s=None), "an event will say when"
    assert credit(DEFAULTS, times, OPEN, replace(EMPTY, num_passed=99)).num_legs == 0


def test_slots_that_come_free_on_the_way_to_decode_count_as_well(times: Times) -> None:
    times.decoded(0.8)
    assert times.lead_s == pytest.approx(0.2), "a quarter of a decode"
    assert credit(DEFAULTS, times, OPEN, EMPTY).num_legs == 8 + 2


def test_only_slots_that_keep_the_promise_give_credit(times: Times) -> None:
    promised, window = replace(DEFAULTS, tpot_slo_s=PROMISE_S), window_after(*[(4.0, 8)] * 50)
    assert credit(promised, times, window, EMPTY).num_legs == 4, "two of each worker"
    assert credit(promised, times, window, replace(EMPTY, num_passed=4)) == Credit(0, "decode")


@pytest.mark.parametrize(("ttft_slo_s", "ahead_s"), [(None, 1.0), (10.0, 1.0), (2.0, 0.5)])
def test_prefill_has_only_so_much_work_ahead(
    times: Times, ttft_slo_s: float | None, ahead_s: float
) -> None:
    knobs = replace(DEFAULTS, ttft_slo_s=ttft_slo_s)
    assert ttft_slo_s is None or ahead_s <= SHARE_OF_TTFT * ttft_slo_s
    assert credit(knobs, times, OPEN, replace(EMPTY, backlog_s=ahead_s)).num_legs > 0
    held = credit(knobs, times, OPEN, replace(EMPTY, backlog_s=ahead_s + 0.25))
    assert held[:2] == (0, "prefill")
    assert held.again_s == pytest.approx(0.25)


def test_prefill_that_is_late_is_not_asked_again_and_again(times: Times) -> None:
    held = credit(DEFAULTS, times, OPEN, replace(EMPTY, backlog_s=1.0 + 1e-9))
    assert held == Credit(0, "prefill", AGAIN_S)


@settings(deadline=None)
@given(
    slots=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    tpot_slo_s=st.none() | st.floats(1e-4, 10),
    ttft_slo_s=st.none() | st.floats(1e-4, 100),
    prefill_ahead_s=st.floats(1e-4, 100),
    decodes=st.lists(st.tuples(st.floats(0.001, 100), st.floats(0.01, 100), st.integers(1, 300))),
)
def test_with_nothing_downstream_something_may_pass(
    slots: list[int],
    tpot_slo_s: float | None,
    ttft_slo_s: float | None,
    prefill_ahead_s: float,
    decodes: list[tuple[float, float, int]],
) -> None:
    times, window = Times(COSTS), window_after(*(leg[1:] for leg in decodes))
    for decode_s, *_ in decodes:
        times.decoded(decode_s)
    knobs = replace(
        DEFAULTS, tpot_slo_s=tpot_slo_s, ttft_slo_s=ttft_slo_s, prefill_ahead_s=prefill_ahead_s
    )
    assert credit(knobs, times, window, Load(0, 0.0, slots)).num_legs >= len(slots)


# The length of the queue in seconds ---------------------------------------------------------------


def test_the_slowest_stage_sets_the_pace_of_the_queue(times: Times) -> None:
    knobs = replace(DEFAULTS, max_batch_items=4)
    waiting = Waiting(
        num_items=16,
        num_legs=12,
        num_encoders=2,
        max_batch_tokens=2048,
        num_prefills=3,
        slots=(2, 2),
        num_passed=4,
    )
    times.seen(picture("a", 100))
    assert queue_s(knobs, times, OPEN, waiting) == pytest.approx(4 * 0.6 / 2), "of encode"
    times.prefilled(0.5, 100)
    assert queue_s(knobs, times, OPEN, waiting) == pytest.approx(12 * 0.5 / 3), "of prefill"
    times.decoded(2.0)
    assert queue_s(knobs, times, OPEN, waiting) == pytest.approx(12 * 2 / 4), "of decode"


def test_without_flow_only_encode_holds_up_the_queue(times: Times) -> None:
    knobs = replace(DEFAULTS, max_batch_items=4, flow=False)
    times.seen(picture("a", 100))
    times.prefilled(100.0, 1)
    for each in (knobs, replace(NONE, max_batch_items=4)):
        assert queue_s(each, times, OPEN, Waiting(4, 4, 1, 2048, 1, (1,), 1)) == pytest.approx(0.6)


def test_an_empty_queue_takes_no_time(times: Times) -> None:
    assert queue_s(DEFAULTS, times, OPEN, Waiting(0, 0, 1, 2048, 1, (1,), 1)) == 0.0


def test_a_call_holds_no_more_items_than_its_tokens_allow(times: Times) -> None:
    times.seen(picture("a", 1000))
    waiting = Waiting(4, 4, 1, 2500, 1, (1,), 1)
    assert queue_s(DEFAULTS, times, OPEN, waiting) == pytest.approx(2 * (0.2 + 2000 * 0.001))


def test_slots_that_are_free_hold_nobody_up(times: Times) -> None:
    times.decoded(100.0)
    assert queue_s(DEFAULTS, times, OPEN, Waiting(0, 8, 1, 2048, 1, (8,), 0)) == 0.0
    assert queue_s(DEFAULTS, times, OPEN, Waiting(0, 8, 1, 2048, 1, (8,), 4)) == 50.0
