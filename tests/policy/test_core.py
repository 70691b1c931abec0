"""One readable scenario for each path through the core."""

from typing import Any

import pytest

from easerve.policy import events as ev
from easerve.policy.core import Limits
from easerve.types import NS_PER_S, Reason, Shape, Stage, WorkerId

from .scenario import (
    B1,
    B2,
    B3,
    D0,
    D1,
    E0,
    E1,
    LIMITS,
    P0,
    P1,
    R,
    S,
    Scenario,
    encode_item,
    item,
    joined,
    start_encode,
    start_prefill,
    start_send,
)

IDLE = {E0: 0, P0: 0, D0: 0}


def failed(reason: Reason) -> list[ev.Action]:
    return [ev.Cancel(R), ev.Fail(R, reason)]


def prefill(worker_id: WorkerId = P0, leg: int = 0, attempt: int = 0, **m: Any) -> ev.StartPrefill:
    return start_prefill(R, worker_id, leg, attempt, **m)


def encode(batch_id: int, worker_id: WorkerId, index: int, to: WorkerId = P0) -> ev.StartEncode:
    return start_encode(batch_id, worker_id, encode_item(R, index, to))


def send(batch_id: int, *indices: int, to: WorkerId = P0) -> ev.StartEncode:
    return start_send(batch_id, E0, *(encode_item(R, index, to) for index in indices))


def missing(leg: int, attempt: int = 0, index: int = 0) -> ev.EmbeddingMissing:
    return ev.EmbeddingMissing(R, leg, attempt, (item(R, index).key,))


# All goes well ------------------------------------------------------------------------------------


def test_text_is_prefilled_and_decoded() -> None:
    scenario = Scenario()
    assert scenario.receive() == [ev.Prepare(R)]
    assert scenario.prepare() == [prefill()]
    assert scenario.backlog() == IDLE | {P0: 100}
    assert scenario.tell(ev.PrefillFinished(R, 0, 0)) == [ev.StartDecode(R, 0, 0, D0)]
    assert scenario.backlog() == IDLE | {D0: 120}
    assert scenario.tell(ev.FirstToken(R, 0, 0)) == []
    assert scenario.core.num_open == 1
    assert scenario.tell(ev.DecodeFinished(R, 0, 0)) == [ev.Complete(R)]
    assert scenario.backlog() == IDLE
    assert scenario.core.num_open == 0
    assert scenario.core.next_deadline() is None


def test_prefill_is_started_with_encode_and_waits_for_the_embeddings() -> None:
    scenario = Scenario()
    assert scenario.start(num_items=1) == [encode(1, E0, 0), prefill(coming=True)]
    assert scenario.backlog() == {E0: 30, P0: 100, D0: 0}
    assert scenario.tell(ev.EncodeFinished(B1)) == []
    assert scenario.backlog() == IDLE | {P0: 100}


def test_items_spread_over_encoders_and_go_to_one_prefill() -> None:
    scenario = Scenario(E0, E1, P0, P1, D0)
    assert scenario.start(num_items=3) == [
        encode(1, E0, 0),
        encode(2, E1, 1),
        encode(3, E0, 2),
        prefill(coming=True),
    ]


def test_a_prefill_is_measured_without_its_wait_for_embeddings() -> None:
    scenario = Scenario()
    scenario.start(num_items=1)
    scenario.now_ns = 900
    scenario.tell(ev.EncodeFinished(B1))
    scenario.now_ns = 999
    scenario.tell(ev.PrefillFinished(R, 0, 0, wait_s=900e-9))
    assert scenario.core._flow.times.prefill_s == pytest.approx(99e-9)


def test_requests_spread_over_prefill_and_decode_workers() -> None:
    scenario = Scenario(P0, P1, D0, D1)
    assert scenario.start(R) == [prefill(P0)]
    assert scenario.start(S) == [start_prefill(S, P1)]
    assert scenario.tell(ev.PrefillFinished(R, 0, 0), ev.PrefillFinished(S, 0, 0)) == [
        ev.StartDecode(R, 0, 0, D0),
        ev.StartDecode(S, 0, 0, D1),
    ]


def test_every_choice_is_a_leg_and_the_last_completes_the_request() -> None:
    scenario = Scenario()
    assert scenario.start(num_choices=3) == [prefill(leg=leg) for leg in range(3)]
    scenario.tell(*(ev.PrefillFinished(R, leg, 0) for leg in range(3)))
    assert scenario.tell(ev.DecodeFinished(R, 2, 0), ev.DecodeFinished(R, 0, 0)) == []
    assert scenario.tell(ev.DecodeFinished(R, 1, 0)) == [ev.Complete(R)]


def test_a_first_token_that_is_the_last_needs_no_decode() -> None:
    scenario = Scenario()
    scenario.start()
    assert scenario.tell(ev.PrefillFinished(R, 0, 0, final=True)) == [ev.Complete(R)]


def test_a_request_id_in_use_is_refused() -> None:
    scenario = Scenario()
    scenario.receive()
    with pytest.raises(ValueError, match="request id r is in use"):
        scenario.receive()


# Failures -----------------------------------------------------------------------------------------


def test_bad_media_fails_the_request() -> None:
    scenario = Scenario()
    scenario.receive()
    assert scenario.tell(ev.PrepareFailed(R)) == failed(Reason.PREPARE_FAILED)


def test_preparation_is_tried_again_as_often_as_it_may_be() -> None:
    scenario = Scenario()
    scenario.receive()
    for _ in range(LIMITS.max_retries):
        assert scenario.tell(ev.PrepareFailed(R, retryable=True)) == [ev.Prepare(R)]
    assert scenario.tell(ev.PrepareFailed(R, retryable=True)) == failed(Reason.PREPARE_FAILED)


@pytest.mark.parametrize(("num_items", "renders"), [(0, P0), (1, E0)])
def test_preparation_waits_for_an_engine_of_the_stage_that_renders(
    num_items: int, renders: WorkerId
) -> None:
    scenario = Scenario()
    scenario.receive(num_items=num_items)
    lost = ev.WorkerLost(renders)
    assert scenario.tell(ev.PrepareFailed(R, retryable=True), lost) == []
    assert scenario.core.next_deadline() == LIMITS.worker_wait_ns
    assert scenario.tell(joined(renders)) == [ev.Prepare(R)]
    scenario.tell(lost, ev.PrepareFailed(R, retryable=True))
    assert scenario.wait(LIMITS.worker_wait_ns) == failed(Reason.NO_WORKER)


def test_an_item_is_encoded_again_on_another_encoder() -> None:
    scenario = Scenario(E0, E1, P0, D0)
    scenario.start(num_items=1)
    assert scenario.tell(ev.EncodeFailed(B1, retryable=True)) == [encode(2, E1, 0)]


def test_an_item_that_no_encoder_can_take_fails_the_request_with_its_other_items() -> None:
    scenario = Scenario()
    scenario.start(num_items=2)
    actions = scenario.tell(ev.EncodeFailed(B1, retryable=False))
    assert actions == [ev.Cancel(R), ev.CancelEncode(B2), ev.Fail(R, Reason.ENCODE_FAILED)]
    assert scenario.backlog() == IDLE


def test_a_prefill_is_tried_again_on_another_worker() -> None:
    scenario = Scenario(P0, P1, D0)
    scenario.start()
    failure = ev.PrefillFailed(R, 0, 0, retryable=True)
    assert scenario.tell(failure) == [prefill(P1, attempt=1)]


def test_a_prefill_is_tried_again_on_the_only_worker() -> None:
    scenario = Scenario()
    scenario.start(num_items=1)
    scenario.tell(ev.EncodeFinished(B1))
    failure = ev.PrefillFailed(R, 0, 0, retryable=True)
    assert scenario.tell(failure) == [prefill(attempt=1)]


def test_a_prefill_that_cannot_be_tried_again_fails_the_request() -> None:
    scenario = Scenario()
    scenario.start(num_choices=2)
    failure = ev.PrefillFailed(R, 1, 0, retryable=False)
    assert scenario.tell(failure) == failed(Reason.PREFILL_FAILED)
    assert scenario.backlog() == IDLE


def test_a_decode_that_has_sent_nothing_begins_again_at_prefill() -> None:
    scenario = Scenario(P0, D0, D1)
    assert scenario.start_decode() == [ev.StartDecode(R, 0, 0, D0)]
    failure = ev.DecodeFailed(R, 0, 0, retryable=True)
    assert scenario.tell(failure) == [prefill(attempt=1)]
    assert scenario.tell(ev.PrefillFinished(R, 0, 1)) == [ev.StartDecode(R, 0, 1, D1)]


def test_a_decode_that_ends_mid_stream_resumes_if_it_can() -> None:
    scenario = Scenario()
    scenario.start_decode(can_resume=True)
    scenario.tell(ev.FirstToken(R, 0, 0))
    failure = ev.DecodeFailed(R, 0, 0, retryable=True)
    assert scenario.tell(failure) == [prefill(attempt=1, resume=True)]


def test_a_decode_that_ends_mid_stream_and_cannot_resume_fails_the_request() -> None:
    scenario = Scenario()
    scenario.start_decode()
    scenario.tell(ev.FirstToken(R, 0, 0))
    failure = ev.DecodeFailed(R, 0, 0, retryable=True)
    assert scenario.tell(failure) == failed(Reason.DECODE_FAILED)


def test_retries_are_counted_over_all_stages() -> None:
    scenario = Scenario()
    scenario.receive(num_items=1)
    scenario.tell(ev.PrepareFailed(R, retryable=True))
    scenario.prepare(num_items=1)
    scenario.tell(ev.EncodeFailed(B1, retryable=True))
    scenario.tell(ev.EncodeFinished(B2))
    failure = ev.PrefillFailed(R, 0, 0, retryable=True)
    assert scenario.tell(failure) == failed(Reason.PREFILL_FAILED)


def test_embeddings_follow_a_request_to_another_prefill_worker() -> None:
    scenario = Scenario(E0, P0, P1, D0, limits=Limits(max_retries=3))
    scenario.start(num_items=2)
    scenario.tell(ev.EncodeFinished(B1), ev.EncodeFinished(B2))
    failure = ev.PrefillFailed(R, 0, 0, retryable=True)
    assert scenario.tell(failure) == [send(3, 0, 1, to=P1), prefill(P1, attempt=1, coming=True)]
    assert scenario.backlog() == {E0: 0, P0: 0, P1: 100, D0: 0}, "to send is no work"
    scenario.tell(ev.EncodeFinished(B3))
    failure = ev.PrefillFailed(R, 0, 1, retryable=True)
    assert scenario.tell(failure) == [prefill(attempt=2)], "both failed it, and P0 has them still"
    missing = ev.EmbeddingMissing(R, 0, 2, (item(R, 1).key,))
    assert scenario.tell(missing) == [send(4, 1), prefill(attempt=3, coming=True)]


# Embeddings that are missing ----------------------------------------------------------------------


def test_an_embedding_that_is_missing_is_sent_again_by_the_encoder_that_has_it() -> None:
    scenario = Scenario()
    scenario.start(num_items=2)
    scenario.tell(ev.EncodeFinished(B1), ev.EncodeFinished(B2))
    assert scenario.tell(missing(0, 0, 1)) == [send(3, 1), prefill(attempt=1, coming=True)]
    assert scenario.tell(ev.EncodeFinished(B3)) == []


def test_an_embedding_that_is_missing_and_that_no_encoder_has_is_encoded_again() -> None:
    scenario = Scenario()
    scenario.start(num_items=2)
    scenario.tell(ev.EncodeFinished(B1), ev.EncodeFinished(B2))
    evicted = ev.Evicted(E0, (item(R, 0).key, "another"))
    assert scenario.tell(missing(0, 0, 0), evicted) == [
        encode(3, E0, 0),
        prefill(attempt=1, coming=True),
    ]


def test_an_embedding_that_is_evicted_before_it_is_needed_is_sent_again() -> None:
    scenario = Scenario(E0, P0, D0, D1)
    scenario.start_decode(num_items=1)
    scenario.tell(ev.Evicted(P0, (item(R, 0).key,)))
    failure = ev.DecodeFailed(R, 0, 0, retryable=True)
    assert scenario.tell(failure) == [send(2, 0), prefill(attempt=1, coming=True)]


def test_prefills_started_before_a_miss_was_known_of_cost_one_retry() -> None:
    scenario = Scenario(limits=Limits(max_retries=1))
    scenario.start(num_items=1, num_choices=3)
    scenario.tell(ev.EncodeFinished(B1))
    assert scenario.tell(missing(0)) == [send(2, 0), prefill(attempt=1, coming=True)]
    assert scenario.tell(ev.EncodeFinished(B2)) == []
    assert scenario.tell(missing(1)) == [send(3, 0), prefill(leg=1, attempt=1, coming=True)]
    assert scenario.tell(ev.EncodeFinished(B3)) == []
    assert scenario.tell(missing(0, attempt=1)) == failed(Reason.ENCODE_FAILED)


def test_text_that_misses_an_embedding_is_tried_again_as_often_as_it_may_be() -> None:
    scenario = Scenario(limits=Limits(max_retries=1))
    scenario.start()
    assert scenario.tell(ev.EmbeddingMissing(R, 0, 0, ())) == [prefill(attempt=1)]
    assert scenario.tell(ev.EmbeddingMissing(R, 0, 1, ())) == failed(Reason.ENCODE_FAILED)


# Encode fails while prefills wait -----------------------------------------------------------------


def test_prefills_wait_on_while_an_item_is_encoded_again() -> None:
    scenario = Scenario()
    scenario.start(num_items=1)
    lost = scenario.tell(ev.WorkerLost(E0))
    assert (lost, scenario.backlog()) == ([], {P0: 100, D0: 0})
    assert scenario.tell(joined(E1)) == [encode(2, E1, 0)]
    assert scenario.tell(ev.EncodeFinished(B2)) == []
    assert scenario.tell(ev.PrefillFinished(R, 0, 0)) == [ev.StartDecode(R, 0, 0, D0)]


def test_legs_that_fail_while_an_item_is_encoded_again_start_with_it() -> None:
    scenario = Scenario(limits=Limits(max_retries=9))
    scenario.start(num_items=1, num_choices=3)
    scenario.tell(ev.WorkerLost(E0))
    assert scenario.tell(missing(0)) == []
    assert scenario.tell(ev.PrefillFailed(R, 1, 0, retryable=True)) == []
    assert scenario.tell(joined(E1)) == [
        encode(2, E1, 0),
        prefill(leg=0, attempt=1, coming=True),
        prefill(leg=1, attempt=1, coming=True),
    ]


def test_an_answer_that_needs_no_embedding_after_all_completes_the_request() -> None:
    scenario = Scenario()
    scenario.start(num_items=1)
    scenario.tell(ev.WorkerLost(E0))
    assert scenario.tell(ev.PrefillFinished(R, 0, 0, final=True)) == [ev.Complete(R)]
    assert scenario.core.queue_lengths() == {Stage.ENCODE: 0, Stage.PREFILL: 0}


# Lost workers -------------------------------------------------------------------------------------


def test_items_of_a_lost_encoder_go_to_another() -> None:
    scenario = Scenario(E0, E1, P0, D0)
    scenario.start(num_items=2)
    assert scenario.tell(ev.WorkerLost(E0)) == [encode(3, E1, 0)]


def test_a_lost_encoder_costs_one_retry_however_many_items_it_held() -> None:
    scenario = Scenario(E0, P0, D0, limits=Limits(max_retries=1))
    scenario.start(num_items=3)
    assert scenario.tell(ev.WorkerLost(E0), joined(E1)) == [
        encode(4 + index, E1, index) for index in range(3)
    ]
    assert scenario.tell(ev.WorkerLost(E1)) == failed(Reason.WORKER_LOST)


def test_prefills_of_a_lost_worker_go_to_another() -> None:
    scenario = Scenario(P0, P1, D0)
    scenario.start()
    assert scenario.tell(ev.WorkerLost(P0)) == [prefill(P1, attempt=1)]


@pytest.mark.parametrize("what", [ev.WorkerLost(P0), joined(P0)], ids=["lost", "rejoined"])
def test_embeddings_under_way_to_a_lost_worker_are_sent_on_when_they_are_there(
    what: ev.Event,
) -> None:
    scenario = Scenario(E0, P0, P1, D0)
    scenario.start(num_items=1)
    assert scenario.tell(what) == []
    assert scenario.tell(ev.EncodeFinished(B1)) == [
        send(2, 0, to=P1),
        prefill(P1, attempt=1, coming=True),
    ]


def test_a_lost_engine_has_no_embeddings_any_more() -> None:
    scenario = Scenario()
    scenario.start_decode(num_items=1)
    scenario.tell(joined(E0), joined(P0))
    failure = ev.DecodeFailed(R, 0, 0, retryable=True)
    assert scenario.tell(failure) == [encode(2, E0, 0), prefill(attempt=1, coming=True)]


def test_legs_of_a_lost_decoder_begin_again_and_cost_one_retry() -> None:
    scenario = Scenario(P0, D0, D1, limits=Limits(max_retries=1))
    scenario.start_decode(num_choices=3)  # two of them at D0
    assert scenario.tell(ev.WorkerLost(D0)) == [
        prefill(leg=0, attempt=1),
        prefill(leg=2, attempt=1),
    ]
    scenario.tell(ev.PrefillFinished(R, 0, 1))
    assert scenario.tell(ev.WorkerLost(D1)) == failed(Reason.WORKER_LOST)


def test_a_stream_that_cannot_resume_fails_with_its_decoder() -> None:
    scenario = Scenario()
    scenario.start_decode(num_choices=2)
    scenario.tell(ev.FirstToken(R, 1, 0))
    assert scenario.tell(ev.WorkerLost(D0)) == failed(Reason.WORKER_LOST)


def test_a_first_token_counts_though_its_worker_is_lost_in_the_same_instant() -> None:
    scenario = Scenario(P0, D0, D1)
    scenario.start_decode(can_resume=True)
    actions = scenario.tell(ev.WorkerLost(D0), ev.FirstToken(R, 0, 0))
    assert actions == [prefill(attempt=1, resume=True)]


def test_an_answer_counts_though_its_worker_is_lost_in_the_same_instant() -> None:
    scenario = Scenario(P0, D0, D1)
    scenario.start_decode()
    assert scenario.tell(ev.WorkerLost(D0), ev.DecodeFinished(R, 0, 0)) == [ev.Complete(R)]


def test_a_worker_that_joins_again_has_lost_what_it_held() -> None:
    scenario = Scenario()
    scenario.start()
    assert scenario.tell(joined(P0)) == [prefill(attempt=1)]
    assert scenario.backlog() == IDLE | {P0: 100}


def test_the_loss_of_an_unknown_worker_is_ignored() -> None:
    scenario = Scenario()
    scenario.start()
    assert scenario.tell(ev.WorkerLost(P1)) == []


# Stages without an engine -------------------------------------------------------------------------


def test_items_wait_for_an_encoder() -> None:
    scenario = Scenario()
    scenario.start(num_items=1)
    assert scenario.tell(ev.WorkerLost(E0)) == []
    assert scenario.core.queue_lengths() == {Stage.ENCODE: 1, Stage.PREFILL: 0}
    assert scenario.core.next_deadline() == 100
    assert scenario.tell(joined(E1)) == [encode(2, E1, 0)]
    assert scenario.core.next_deadline() == 1000


def test_items_wait_for_a_place_to_go_to() -> None:
    scenario = Scenario()
    scenario.receive(num_items=1)
    scenario.tell(ev.WorkerLost(P0))
    assert scenario.prepare(num_items=1) == []
    assert scenario.tell(joined(P1)) == [encode(1, E0, 0, to=P1), prefill(P1, coming=True)]


def test_a_prefill_waits_for_a_decoder_to_pull_its_kv_cache() -> None:
    scenario = Scenario(P0, D0)
    scenario.receive()
    scenario.tell(ev.WorkerLost(D0))
    assert scenario.prepare() == []
    assert scenario.core.queue_lengths() == {Stage.ENCODE: 0, Stage.PREFILL: 1}
    assert scenario.tell(joined(D1)) == [prefill()]


def test_a_prefill_that_finds_no_decoder_is_done_again_when_there_is_one() -> None:
    scenario = Scenario(P0, D0)
    scenario.start()
    scenario.tell(ev.WorkerLost(D0))
    assert scenario.tell(ev.PrefillFinished(R, 0, 0)) == []
    assert scenario.tell(joined(D1)) == [prefill(attempt=1)]


def test_a_prefill_that_finds_no_decoder_and_may_not_be_done_again_fails() -> None:
    scenario = Scenario(P0, D0, limits=Limits(max_retries=0))
    scenario.start()
    scenario.tell(ev.WorkerLost(D0))
    assert scenario.tell(ev.PrefillFinished(R, 0, 0)) == failed(Reason.NO_WORKER)


@pytest.mark.parametrize(("lost", "num_items"), [(E0, 1), (P0, 1), (P0, 0), (D0, 0)])
def test_work_that_waited_too_long_for_an_engine_fails(lost: WorkerId, num_items: int) -> None:
    scenario = Scenario()
    scenario.receive(num_items=num_items)
    scenario.tell(ev.WorkerLost(lost))
    scenario.prepare(num_items=num_items)
    assert scenario.core.next_deadline() == 100
    assert scenario.wait(99) == []
    assert scenario.wait(1) == failed(Reason.NO_WORKER)
    assert scenario.core.next_deadline() is None


def test_an_engine_that_joins_at_the_last_moment_is_in_time() -> None:
    scenario = Scenario()
    scenario.start(num_items=1)
    scenario.tell(ev.WorkerLost(E0))
    scenario.now_ns = 100
    assert scenario.tell(joined(E0)) == [encode(2, E0, 0)]


def test_a_request_with_several_waiting_parts_fails_once() -> None:
    scenario = Scenario()
    scenario.start(num_items=3)
    scenario.tell(ev.WorkerLost(E0), ev.WorkerLost(P0))
    assert scenario.wait(100) == failed(Reason.NO_WORKER)


def test_who_turns_out_to_need_an_engine_that_is_missing_for_too_long_fails_at_once() -> None:
    scenario = Scenario()
    scenario.start_decode(num_items=1)
    scenario.tell(ev.WorkerLost(E0), ev.Evicted(P0, (item(R, 0).key,)))
    scenario.now_ns = 100
    failure = ev.DecodeFailed(R, 0, 0, retryable=True)
    assert scenario.tell(failure) == failed(Reason.NO_WORKER)


def test_requests_that_do_not_need_the_starved_stage_go_on() -> None:
    scenario = Scenario()
    scenario.start_decode()
    scenario.tell(ev.WorkerLost(E0), ev.WorkerLost(P0))
    assert scenario.core.next_deadline() == 1000
    assert scenario.wait(500) == []
    assert scenario.tell(ev.DecodeFinished(R, 0, 0)) == [ev.Complete(R)]


# Ends from outside --------------------------------------------------------------------------------


def test_a_request_times_out_at_its_deadline() -> None:
    scenario = Scenario()
    scenario.start(R)
    scenario.wait(10)
    scenario.start(S)
    assert scenario.core.next_deadline() == 1000
    assert scenario.wait(989) == []
    assert scenario.wait(1) == failed(Reason.TIMED_OUT)
    assert scenario.core.next_deadline() == 1010


def test_an_answer_at_the_deadline_is_in_time() -> None:
    scenario = Scenario()
    scenario.start_decode()
    scenario.now_ns = 1000
    assert scenario.tell(ev.DecodeFinished(R, 0, 0)) == [ev.Complete(R)]


@pytest.mark.parametrize("num_items", [0, 2])
def test_a_cancelled_request_leaves_nothing_behind(num_items: int) -> None:
    scenario = Scenario()
    scenario.start(num_items=num_items)
    batches = [ev.CancelEncode(batch_id) for batch_id in (B1, B2)[:num_items]]
    assert scenario.tell(ev.ClientCancelled(R)) == [ev.Cancel(R), *batches]
    assert scenario.backlog() == IDLE
    assert scenario.tell(ev.ClientCancelled(R)) == []


def test_a_cancelled_request_leaves_the_queues() -> None:
    scenario = Scenario()
    scenario.receive(R, num_items=1)
    scenario.receive(S)
    scenario.tell(ev.WorkerLost(P0))
    scenario.prepare(R, num_items=1)
    scenario.prepare(S)
    scenario.tell(ev.ClientCancelled(R), ev.ClientCancelled(S))
    assert scenario.core.queue_lengths() == {Stage.ENCODE: 0, Stage.PREFILL: 0}


def test_a_client_may_cancel_in_the_instant_of_its_request() -> None:
    scenario = Scenario()
    actions = scenario.tell(ev.ClientCancelled(R), ev.RequestReceived(R, num_bytes=1))
    assert actions == [ev.Prepare(R), ev.Cancel(R)]
    assert scenario.core.num_open == 0


# Late answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        ev.Prepared(R, Shape(1, 1)),
        ev.PrepareFailed(R),
        ev.EncodeFinished(B2),
        ev.EncodeFailed(B2, retryable=False),
        ev.PrefillFinished(R, 0, 1),
        ev.PrefillFailed(R, 0, 0, retryable=False),
        ev.EmbeddingMissing(R, 0, 0, ()),
        ev.FirstToken(R, 0, 0),
        ev.DecodeFinished(R, 0, 0),
        ev.DecodeFailed(R, 0, 0, retryable=False),
        ev.DecodeFinished(R, -1, 1),
        ev.DecodeFinished(R, 7, 1),
        ev.DecodeFinished(S, 0, 0),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_a_late_answer_is_ignored(answer: ev.Event) -> None:
    scenario = Scenario()
    scenario.start_decode(num_items=2)
    scenario.tell(ev.DecodeFailed(R, 0, 0, retryable=True))
    scenario.tell(ev.PrefillFinished(R, 0, 1))
    assert scenario.tell(answer) == []
    assert scenario.tell(ev.DecodeFinished(R, 0, 1)) == [ev.Complete(R)]
    assert scenario.tell(answer) == []


def test_limits_are_sane_by_default() -> None:
    limits = Limits()
    assert limits.max_retries >= 1
    assert 0 < limits.worker_wait_ns < limits.request_timeout_ns <= 3600 * NS_PER_S
