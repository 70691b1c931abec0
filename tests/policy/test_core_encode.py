"""Items in the core: what may pass, what is shared, and what becomes of batches that fail."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from easerve.policy import events as ev
from easerve.policy.core import Limits
from easerve.types import NS_PER_S, BatchId, Reason, RequestId, Stage

from .scenario import (
    B1,
    D0,
    E0,
    E1,
    FOREVER,
    GREEDY,
    MS,
    P0,
    PAIRS,
    SLOW,
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
    prefills,
    sent,
    shape_of,
    slow_scenario,
    start_encode,
    start_prefill,
)


@pytest.fixture
def pairs() -> Scenario:
    return Scenario(knobs=PAIRS)


def one_slot(**knobs: Any) -> Scenario:
    """Decode runs one request at a time."""
    return slow_scenario(E0, P0, joined(D0, num_slots=1), **knobs)


# Flow ---------------------------------------------------------------------------------------------


def test_items_wait_for_a_decode_slot() -> None:
    full = one_slot()
    full.start(R, num_items=1)
    full.tell(finished(1))
    assert full.start(S, num_items=1) == []
    full.wait(200 * MS)
    full.tell(ev.PrefillFinished(R, 0, 0))
    full.wait(300 * MS)
    (batch,) = batches(full.tell(ev.DecodeFinished(R, 0, 0)))
    assert (batch.decision.held_by, batch.decision.held_s) == ("decode", 0.5)
    assert batch.decision.wait_s == 0.5


def test_no_batch_was_held_for_longer_than_it_waited() -> None:
    full = one_slot()
    full.start(T)
    full.ask("r", "a")
    full.wait(100 * MS)
    full.ask("s", "b")
    full.wait(100 * MS)
    full.tell(ev.ClientCancelled(R))
    (batch,) = batches(full.tell(ev.ClientCancelled(T)))
    assert batch.decision.held_s == batch.decision.wait_s == 0.1


def test_what_is_left_behind_by_a_batch_is_held_anew() -> None:
    full = one_slot()
    full.start(T)
    full.ask("r", "a")
    full.wait(100 * MS)
    full.ask("s", "b")
    full.wait(100 * MS)
    full.tell(ev.ClientCancelled(T))
    full.tell(finished(1))
    full.wait(100 * MS)
    (batch,) = batches(full.tell(ev.ClientCancelled(R)))
    assert batch.decision.wait_s == 0.2
    assert batch.decision.held_s == 0.1, "before that, it was not its turn"


def test_items_wait_while_prefill_has_enough_ahead_and_are_asked_for_in_time() -> None:
    full = slow_scenario(prefill_ahead_s=0.15)
    full.start(T, num_choices=2)
    assert full.ask("r", "a") == []
    assert full.deadline_ns == pytest.approx(50 * MS, abs=10)
    (batch,) = batches(full.wait(full.deadline_ns))
    assert batch.decision.held_by == "prefill"
    assert batch.decision.held_s == pytest.approx(0.05)


def test_a_prefill_that_is_late_is_looked_at_again_but_not_all_the_time() -> None:
    full = slow_scenario(prefill_ahead_s=0.2 - 1e-9)
    full.start(T, num_choices=3)
    full.ask("r", "a")
    num_steps = 0
    while full.now_ns < 2 * NS_PER_S:
        assert full.deadline_ns > full.now_ns
        full.now_ns = full.deadline_ns
        assert full.tell() == []
        num_steps += 1
    assert num_steps <= 2 * 1000


def test_what_was_not_held_says_so() -> None:
    (batch,) = batches(slow_scenario().start(num_items=1))
    assert (batch.decision.held_by, batch.decision.held_s) == ("", 0.0)


def test_being_held_ends_with_the_queue() -> None:
    full = one_slot()
    full.start(T)
    full.ask("r", "a")
    full.wait(100 * MS)
    full.tell(ev.ClientCancelled(R), ev.PrefillFinished(T, 0, 0, final=True))
    (batch,) = batches(full.start(S, num_items=1))
    assert batch.decision.held_s == 0.0


def test_the_other_items_of_a_request_that_has_passed_need_no_credit() -> None:
    full = one_slot(max_batch_items=1)
    assert full.ask("r", "a", "b") == [(E0, "a", "full")]
    assert full.ask("s", "c") == []
    assert sent(full.tell(finished(1))) == [(E0, "b", "full")]
    assert sent(full.tell(finished(2))) == []


def test_one_who_shares_an_item_that_is_being_encoded_passes_with_it() -> None:
    full = slow_scenario(E0, P0, joined(D0, num_slots=2))
    full.ask("r", "cat")
    full.ask("s", "cat")
    full.tell(finished(1))
    assert full.ask("t", "dog") == [], "two legs are on their way to two slots"
    full.tell(ev.ClientCancelled(R))
    assert full.core.queue_lengths()[Stage.ENCODE] == 0


def test_who_has_its_embeddings_by_others_waits_for_credit_all_the_same() -> None:
    full = one_slot()
    full.ask("r", "cat")
    full.tell(finished(1))
    assert full.ask("s", "cat") == []
    assert full.core.queue_lengths() == {Stage.ENCODE: 0, Stage.PREFILL: 1}
    assert full.tell(ended("r")) == [ev.Complete(R), start_prefill(S, num_held=1)]


def test_a_request_with_more_choices_than_slots_passes_where_nothing_is_downstream() -> None:
    full = one_slot()
    assert full.ask("r", "a", num_choices=8) == [(E0, "a", "encoder idle")]


def start_text(scenario: Scenario, name: str) -> list[RequestId]:
    """The requests whose prefill starts by this one."""
    return prefilled(scenario.start(RequestId(name)))


def prefilled(actions: Sequence[ev.Action]) -> list[RequestId]:
    return [action.request_id for action in prefills(actions)]


def ended(name: str) -> ev.PrefillFinished:
    """A text whose first token was its last."""
    return ev.PrefillFinished(RequestId(name), 0, 0, final=True)


def test_text_and_pictures_wait_for_a_slot_in_the_order_they_came() -> None:
    full = one_slot()
    assert start_text(full, "t0") == ["t0"]
    assert full.ask("r", "a") == []
    assert start_text(full, "t1") == []
    actions = full.tell(ended("t0"))
    assert (sent(actions), prefilled(actions)) == ([(E0, "a", "encoder idle")], ["r"])
    assert full.core.queue_lengths() == {Stage.ENCODE: 0, Stage.PREFILL: 1}
    assert prefilled(full.tell(ev.ClientCancelled(R))) == ["t1"]


def test_pictures_are_not_starved_by_a_stream_of_text() -> None:
    full = one_slot()
    start_text(full, "t0")
    assert full.ask("r", "a") == []
    started = []
    for number in range(1, 9):
        full.wait(100 * MS)
        start_text(full, f"t{number}")
        started += sent(full.tell(ended(f"t{number - 1}")))
    assert started == [(E0, "a", "encoder idle")]


def test_text_is_not_starved_by_a_stream_of_pictures() -> None:
    full = one_slot()
    full.ask("r", "a")
    assert start_text(full, "t") == []
    full.ask("s", "b")
    full.tell(finished(1))
    assert prefilled(full.tell(ended("r"))) == ["t"]


def test_text_does_not_wait_behind_pictures_for_an_encoder() -> None:
    busy = slow_scenario(E0, P0, joined(D0, num_slots=3), max_batch_items=1)
    assert busy.ask("r", *"abcd") == [(E0, "a", "full")]
    for name in "stu":
        busy.ask(name, f"{name}0")
    assert start_text(busy, "t0") == ["t0"]
    assert start_text(busy, "t1") == ["t1"]
    assert start_text(busy, "t2") == [], "there are three slots"


def test_text_does_not_wait_behind_pictures_for_an_encoder_that_is_gone() -> None:
    gone = one_slot()
    gone.ask("r", "a")
    gone.ask("s", "b")
    gone.tell(ev.WorkerLost(E0), ev.ClientCancelled(R))
    assert start_text(gone, "t") == ["t"]


def test_the_tpot_promise_bounds_how_many_legs_pass() -> None:
    promised = slow_scenario(tpot_slo_s=0.03)
    names = [RequestId(str(number)) for number in range(20)]
    assert sum(len(start_text(promised, name)) for name in names) == 8
    promised.tell(*(ev.PrefillFinished(name, 0, 0) for name in names[:8]))
    promised.tell(*(ev.ClientCancelled(name) for name in names[8:]))
    slow = [ev.DecodeFinished(name, 0, 0, decode_s=10.0, tpot_s=0.06) for name in names[:8]]
    promised.tell(*slow)
    later = [RequestId(f"later {number}") for number in range(20)]
    assert sum(len(start_text(promised, name)) for name in later) == 3


def test_a_wait_for_prefill_that_is_lost_does_not_keep_the_driver_awake() -> None:
    lost = slow_scenario(prefill_ahead_s=0.15)
    lost.start(T, num_choices=2)
    lost.ask("r", "a")
    assert lost.deadline_ns == pytest.approx(50 * MS, abs=10)
    lost.tell(ev.WorkerLost(P0))
    lost.wait(60 * MS)
    assert lost.deadline_ns == FOREVER.worker_wait_ns


# Sharing ------------------------------------------------------------------------------------------


def test_an_embedding_that_is_there_is_not_made_again() -> None:
    shared = slow_scenario()
    shared.ask("r", "cat")
    shared.tell(finished(1), ev.ClientCancelled(R))
    shared.receive(S, num_items=1)
    prepared = ev.Prepared(S, shape_of(picture("cat")))
    assert shared.tell(prepared) == [start_prefill(S, num_held=1)]
    assert shared.ask("t", "cat", "dog") == [(E0, "dog", "encoder idle")]


def test_an_item_that_two_want_is_encoded_once_for_both() -> None:
    shared = slow_scenario(when="fixed")
    shared.ask("r", "cat")
    shared.ask("s", "dog", "cat")
    batch, *started = shared.wait(NS_PER_S)
    assert isinstance(batch, ev.StartEncode)
    assert batch.items == (
        ev.EncodeItem(picture("cat"), (ev.Waiter(R, 0, P0), ev.Waiter(S, 1, P0))),
        ev.EncodeItem(picture("dog"), (ev.Waiter(S, 0, P0),)),
    )
    assert started == [start_prefill(R, coming=True), start_prefill(S, coming=True)]


def test_one_who_comes_later_waits_for_the_item_that_is_being_encoded() -> None:
    shared = slow_scenario()
    shared.ask("r", "cat")
    assert shared.ask("s", "cat") == []
    assert shared.tell(finished(1)) == [start_prefill(S, num_held=1)]


def test_a_shared_batch_goes_on_for_the_request_that_is_left(pairs: Scenario) -> None:
    pairs.start(R, num_items=1)
    pairs.start(S, num_items=1)
    assert pairs.tell(ev.ClientCancelled(R)) == [ev.Cancel(R)]
    assert pairs.backlog()[E0] == 60
    assert pairs.tell(finished(1)) == []
    assert pairs.tell(ended("s")) == [ev.Complete(S)]


def test_a_batch_of_ended_requests_is_off_its_encoder(pairs: Scenario) -> None:
    pairs.start(R, num_items=1)
    pairs.start(S, num_items=1)
    actions = pairs.tell(ev.ClientCancelled(R), ev.ClientCancelled(S))
    assert actions == [ev.Cancel(R), ev.Cancel(S), ev.CancelEncode(BatchId(1))]
    assert pairs.backlog() == {E0: 0, P0: 0, D0: 0}


# Failures -----------------------------------------------------------------------------------------


def test_only_the_request_with_the_poisoned_item_fails() -> None:
    poisoned = Scenario(
        knobs=replace(GREEDY, max_batch_items=8), limits=Limits(max_retries=0), estimates=SLOW
    )
    poisoned.ask("first", "x")
    for name in "abcdefg":
        poisoned.ask(name, name)
    told: list[ev.Action] = list(poisoned.tell(finished(1)))
    sizes = []
    pending = batches(told)
    while pending:
        batch = pending.pop()
        keys = [entry.item.key for entry in batch.items]
        sizes.append(len(keys))
        ends = for_good(batch.batch_id) if "c" in keys else finished(batch.batch_id)
        actions = poisoned.tell(ends)
        told += actions
        pending += batches(actions)
    assert [action for action in told if isinstance(action, ev.Fail)] == [
        ev.Fail(RequestId("c"), Reason.ENCODE_FAILED)
    ]
    assert poisoned.core.num_open == 7, "the others are prefilled"
    assert poisoned.core.queue_lengths() == {Stage.ENCODE: 0, Stage.PREFILL: 0}
    assert sizes == [7, 4, 2, 2, 1, 1, 3]


def test_all_who_share_a_poisoned_item_fail() -> None:
    shared = slow_scenario()
    shared.ask("r", "cat")
    shared.ask("s", "cat")
    assert [action for action in shared.tell(for_good(1)) if isinstance(action, ev.Fail)] == [
        ev.Fail(R, Reason.ENCODE_FAILED),
        ev.Fail(S, Reason.ENCODE_FAILED),
    ]


def test_a_batch_that_may_be_tried_again_is_tried_item_by_item_elsewhere() -> None:
    retried = slow_scenario(E0, E1, P0, D0)
    retried.ask("r", "a", "b")
    assert sent(retried.tell(ev.EncodeFailed(B1, retryable=True))) == [
        (E1, "a", "full"),
        (E0, "b", "full"),
    ]


def test_what_is_tried_again_waits_for_no_company() -> None:
    retried = slow_scenario(when="fill")
    retried.ask("q", "first")
    retried.wait(100 * MS)
    retried.ask("r", "a", "b")
    retried.wait(2 * NS_PER_S)
    retried.tell(finished(1))
    assert sent(retried.tell(for_good(2))) == [(E0, "a", "full")]


def test_a_failed_batch_is_tried_again_for_the_request_that_is_left(pairs: Scenario) -> None:
    pairs.start(R, num_items=1)
    pairs.start(S, num_items=1)
    pairs.tell(ev.ClientCancelled(R))
    assert pairs.tell(ev.EncodeFailed(B1, retryable=True)) == [
        start_encode(2, E0, encode_item(S, 0), reason="full")
    ]


def test_items_that_are_tried_again_go_before_those_that_came_later(pairs: Scenario) -> None:
    pairs.start(R, num_items=2)
    pairs.wait(10)
    pairs.start(S, num_items=1)
    pairs.wait(10)
    assert sent(pairs.tell(ev.EncodeFailed(B1, retryable=True))) == [(E0, "r.0", "full")]
    pairs.wait(40)
    assert sent(pairs.tell(finished(2))) == [(E0, "r.1", "full")]
    assert sent(pairs.tell(finished(3))) == [(E0, "s.0", "window")]
