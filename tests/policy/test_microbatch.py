"""The micro-batcher at work in the core: what goes where, when and why."""

import pytest

from easerve.policy import events as ev
from easerve.policy.knobs import Order
from easerve.types import NS_PER_S, MediaItem, Modality, Stage, WorkerId

from .scenario import (
    B1,
    D0,
    E0,
    E1,
    E2,
    MS,
    P0,
    PAIRS,
    R,
    S,
    Scenario,
    T,
    batches,
    encode_item,
    finished,
    for_good,
    joined,
    picture,
    sent,
    slow_scenario,
    start_encode,
    start_prefill,
)

TALL = picture("tall", 90)


# Waiting ------------------------------------------------------------------------------------------


@pytest.fixture
def pairs() -> Scenario:
    return Scenario(knobs=PAIRS)


def test_a_rule_that_waits_is_asked_again_at_its_time(pairs: Scenario) -> None:
    assert pairs.start(num_items=1) == []
    assert pairs.core.next_deadline() == 50
    assert pairs.core.queue_lengths()[Stage.ENCODE] == 1
    assert pairs.wait(49) == []
    assert pairs.wait(1) == [
        start_encode(1, E0, encode_item(R, 0), reason="window"),
        start_prefill(R, coming=True),
    ]
    assert pairs.core.next_deadline() == 1000


def test_items_of_two_requests_share_a_batch(pairs: Scenario) -> None:
    pairs.start(R, num_items=1)
    assert pairs.start(S, num_items=1) == [
        start_encode(1, E0, encode_item(R, 0), encode_item(S, 0), reason="full"),
        start_prefill(R, coming=True),
        start_prefill(S, coming=True),
    ]


def test_a_batch_waits_for_an_idle_encoder(pairs: Scenario) -> None:
    pairs.start(R, num_items=2)
    assert pairs.start(S, num_items=2) == []
    assert pairs.core.next_deadline() == 1000, "a busy encoder is no reason to wake up"
    assert sent(pairs.tell(finished(1))) == [(E0, "s.0 s.1", "full")]


def test_every_idle_encoder_gets_a_batch() -> None:
    scenario = Scenario(E0, E1, P0, D0, knobs=PAIRS)
    assert sent(scenario.start(num_items=3)) == [(E0, "r.0 r.1", "full")]
    assert sent(scenario.wait(50)) == [(E1, "r.2", "window")]


def test_a_full_batch_of_another_kind_does_not_wait_for_one_that_waits() -> None:
    waiting = slow_scenario(when="fixed", timeout_s=1.0, max_batch_items=2, group_by_size=True)
    assert waiting.ask("odd", TALL) == []
    assert waiting.ask("r", "a", "b") == [(E0, "a b", "full")]


def test_a_batch_is_full_by_the_tokens_of_the_smallest_encoder() -> None:
    large, small = joined(E0, max_batch_tokens=1000), joined(E1, max_batch_tokens=100)
    mixed = slow_scenario(large, small, P0, D0)
    assert mixed.ask("r", "a", "b", "c", "d") == [
        (E0, "a b c", "full"),
        (E1, "d", "encoder idle"),
    ]


def test_a_wait_that_nobody_can_end_does_not_keep_the_driver_awake(pairs: Scenario) -> None:
    pairs.start(num_items=1)
    assert pairs.core.next_deadline() == 50
    pairs.tell(ev.WorkerLost(E0))
    assert pairs.wait(60) == []
    assert pairs.core.next_deadline() == 100, "when it has waited long enough for an encoder"


# Live changes -------------------------------------------------------------------------------------


def test_other_knobs_are_in_force_at_once() -> None:
    live = slow_scenario(when="fixed", timeout_s=1.0)
    assert live.ask("r", "a") == []
    live.now_ns += 5
    assert sent(live.tune(timeout_s=0.0)) == [(E0, "a", "window")]
    assert live.ask("s", "b", "c") == []
    assert sent(live.tune(max_batch_items=2, run_ahead=1)) == [(E0, "b c", "full")]
    assert live.core.knobs.max_batch_items == 2


def test_the_rule_may_change_while_items_wait() -> None:
    live = slow_scenario(when="gap")
    live.ask("r", "a", "b")
    assert live.ask("s", "c", "d") == []
    assert sent(live.tune(when="none")) == [(E0, "c", "pass-through"), (E0, "d", "pass-through")]


def test_a_change_may_free_what_flow_held() -> None:
    live = slow_scenario(E0, P0, joined(D0, num_slots=1))
    live.ask("r", "a")
    live.tell(finished(1))
    assert live.ask("s", "b") == []
    assert sent(live.tune(flow=False)) == [(E0, "b", "encoder idle")]


def test_nothing_waits_for_company_while_the_server_drains() -> None:
    draining = slow_scenario(when="fixed", timeout_s=1.0)
    assert draining.ask("r", "a") == []
    assert sent(draining.tell(ev.Draining())) == [(E0, "a", "drain")]
    draining.tell(finished(1))
    assert draining.ask("s", "b") == [(E0, "b", "drain")]


# Running ahead ------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_only_full_batches_run_ahead_and_only_so_many(run_ahead: int) -> None:
    ahead = slow_scenario(max_batch_items=2, run_ahead=run_ahead)
    assert ahead.ask("r", "a", "b") == [(E0, "a b", "full")]
    assert ahead.ask("s", "c") == []
    assert ahead.ask("t", "d") == [(E0, "c d", "full")]
    assert len(ahead.ask("u", *"efgh")) == run_ahead - 1
    assert len(sent(ahead.tell(finished(1)))) == 1


def test_without_running_ahead_a_full_batch_waits_for_the_encoder() -> None:
    behind = slow_scenario(max_batch_items=2)
    behind.ask("r", "a", "b")
    assert behind.ask("s", "c", "d") == []
    assert sent(behind.tell(finished(1))) == [(E0, "c d", "full")]


def test_suspects_do_not_run_ahead_and_nothing_overtakes_them() -> None:
    ahead = slow_scenario(max_batch_items=2, run_ahead=1)
    ahead.ask("r", "a", "b")
    ahead.ask("s", "c", "d")
    assert sent(ahead.tell(for_good(1))) == []
    assert ahead.ask("t", "e", "f") == []
    assert sent(ahead.tell(finished(2))) == [(E0, "a", "full")]


def test_no_batch_runs_ahead_while_an_encoder_is_idle() -> None:
    ahead = slow_scenario(E0, E1, P0, D0, max_batch_items=1, run_ahead=1)
    assert ahead.ask("r", "a") == [(E0, "a", "full")]
    assert ahead.ask("s", "b") == [(E1, "b", "full")]
    retried = sent(ahead.tell(ev.EncodeFailed(B1, retryable=True)))
    assert retried == [(E0, "a", "full")], "though it failed there"


def test_an_encoder_that_runs_ahead_is_measured_batch_by_batch() -> None:
    ahead = slow_scenario(max_batch_items=1, run_ahead=1)
    ahead.ask("r", "a")
    ahead.ask("s", "b")
    ahead.now_ns += 2 * NS_PER_S
    ahead.tell(for_good(1))
    ahead.now_ns += 3 * NS_PER_S
    ahead.tell(finished(2))
    assert ahead.core._flow.times.encode.at(30) == pytest.approx(3.0)


@pytest.mark.parametrize("when", ["greedy", "fixed", "gap"])
def test_the_odd_one_out_is_not_starved_by_full_batches(when: str) -> None:
    crowd = slow_scenario(when=when, max_batch_items=2, run_ahead=1, group_by_size=True, flow=False)
    crowd.ask("r0", "0a", "0b")
    crowd.ask("odd", TALL)
    started = []
    for number in range(1, 20):
        started += crowd.ask(f"r{number}", f"{number}a", f"{number}b")
        crowd.now_ns += 330 * MS
        started += sent(crowd.tell(finished(number)))
    keys = [keys for _, keys, _ in started]
    assert "tall" in keys
    assert keys.index("tall") <= 6


def test_full_batches_run_ahead_of_one_that_still_waits_for_company() -> None:
    crowd = slow_scenario(
        when="fixed", timeout_s=1.0, max_batch_items=2, run_ahead=1, group_by_size=True
    )
    crowd.ask("r", "a", "b")
    assert crowd.ask("odd", TALL) == []
    assert crowd.ask("s", "c", "d") == [(E0, "c d", "full")]


# Spreading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_items", "encoders", "sizes"),
    [
        (4, (E0, E1), [4]),  # 4 x (420 - 360) ms saved < 300 ms for one more call
        (6, (E0, E1), [3, 3]),  # 6 x (480 - 390) > 300
        (6, (E0, E1, E2), [2, 2, 2]),  # 6 x (480 - 360) > 600
        (5, (E0, E1, E2), [5]),  # 5 x (450 - 360) < 600
        (6, (E0,), [6]),
        (1, (E0, E1), [1]),
        (9, (E0, E1), [5, 4]),
    ],
)
def test_items_are_shared_out_when_it_saves_more_than_the_calls_cost(
    num_items: int, encoders: tuple[WorkerId, ...], sizes: list[int]
) -> None:
    spread = slow_scenario(*encoders, P0, D0, spread=True, max_batch_items=16)
    started = spread.ask("r", *map(str, range(num_items)))
    assert [len(keys.split()) for _, keys, _ in started] == sizes
    assert [worker_id for worker_id, _, _ in started] == list(encoders[: len(sizes)])


def test_items_are_not_shared_out_if_they_are_not_to_be() -> None:
    whole = slow_scenario(E0, E1, P0, D0, spread=False, max_batch_items=16)
    assert whole.ask("r", *"abcdef") == [(E0, "a b c d e f", "encoder idle")]


def test_a_full_batch_is_shared_out_only_if_no_more_would_fill_the_other_encoders() -> None:
    spread = slow_scenario(E0, E1, P0, D0, spread=True, max_batch_items=6)
    assert spread.ask("r", *"abcdef") == [(E0, "a b c", "full"), (E1, "d e f", "full")]
    spread.tell(finished(1), finished(2))
    assert spread.ask("s", *"ghijklmnopqr") == [
        (E0, "g h i j k l", "full"),
        (E1, "m n o p q r", "full"),
    ]


def test_the_parts_of_one_request_make_it_whole() -> None:
    spread = slow_scenario(E0, E1, P0, D0, spread=True, max_batch_items=16)
    first, second, prefill = spread.start(R, num_items=6)
    assert batches([first, second]) == [first, second]
    assert prefill == start_prefill(R, coming=True)


# Promises -----------------------------------------------------------------------------------------


def test_a_promise_of_ttft_cuts_the_wait_short() -> None:
    """1000 ms less 330 ms of encode, 100 ms of prefill and a margin of 50 ms."""
    promised = slow_scenario(when="fixed", timeout_s=0.9, ttft_slo_s=1.0)
    assert promised.ask("r", "a") == []
    assert promised.deadline_ns == pytest.approx(520 * MS, abs=10)
    assert sent(promised.wait(promised.deadline_ns - 1)) == []
    assert sent(promised.wait(1)) == [(E0, "a", "slo")]


def test_a_promise_counts_from_when_a_request_was_received() -> None:
    promised = slow_scenario(when="fixed", timeout_s=0.9, ttft_slo_s=1.0)
    promised.receive(R, num_items=1)
    promised.wait(400 * MS)
    assert promised.ask("s", "b") == []
    assert promised.deadline_ns == pytest.approx(920 * MS, abs=10)
    assert promised.prepare(R, num_items=1) == []
    assert promised.deadline_ns == pytest.approx(490 * MS, abs=10), "two items take longer"


def test_work_that_prefill_has_ahead_shortens_the_wait() -> None:
    promised = slow_scenario(when="fixed", timeout_s=0.9, ttft_slo_s=1.0, flow=False)
    promised.start(T, num_choices=2)
    promised.ask("r", "a")
    assert promised.deadline_ns == pytest.approx(320 * MS, abs=10)


def test_the_most_urgent_goes_first_if_so_ordered() -> None:
    urgent = slow_scenario(max_batch_items=1, order=Order.DEADLINE, ttft_slo_s=100.0)
    urgent.ask("q", "first")
    urgent.receive(R, num_items=1)
    urgent.wait(MS)
    urgent.ask("s", "b")
    urgent.prepare(R, num_items=1)
    assert sent(urgent.tell(finished(1))) == [(E0, "r.0", "full")]


# Decisions ----------------------------------------------------------------------------------------


def test_a_decision_says_what_was_known() -> None:
    known = slow_scenario(max_batch_items=2)
    for index in range(4):
        known.ask(f"r{index}", str(index))
        known.wait(500 * MS)
    (batch,) = batches(known.tell(finished(1)))
    decision = batch.decision
    assert (decision.reason, decision.wait_s, decision.num_left) == ("full", 1.5, 1)
    assert (decision.held_by, decision.held_s) == ("", 0.0)
    assert decision.rate_per_s == pytest.approx(2.0)
    assert decision.cv == pytest.approx(0.0, abs=1e-6)


def test_only_requests_with_media_count_as_arrivals() -> None:
    known = slow_scenario()
    known.start(T)
    assert known.core.arrivals.last_ns is None
    known.wait(MS)
    known.ask("r", "a", "b", MediaItem("bark", Modality.AUDIO, 5))
    assert known.core.arrivals.last_ns == MS
