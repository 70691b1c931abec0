from typing import Any

import pytest

from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.types import NS_PER_S, Reason, RequestId, WorkerId

from .scenario import D0, E0, E1, P0, R, S, Scenario, T, finished, for_good, slow_scenario


@pytest.mark.parametrize(
    ("num_requests", "num_bytes", "new_bytes", "admitted"),
    [
        (0, 0, 10, True),
        (0, 0, 11, True),
        (1, 4, 6, True),
        (1, 4, 7, False),
        (1, 0, 11, False),
        (2, 0, 0, False),
    ],
)
def test_bounds(num_requests: int, num_bytes: int, new_bytes: int, admitted: bool) -> None:
    admission = Admission(max_requests=2, max_bytes=10)
    assert admission.admits(num_requests, num_bytes, new_bytes) is admitted


def test_a_request_too_many_is_rejected_until_another_has_ended() -> None:
    scenario = Scenario(admission=Admission(max_requests=1, max_bytes=10))
    assert scenario.receive(R) == [ev.Prepare(R)]
    assert scenario.receive(S) == [ev.Reject(S, Reason.OVERLOADED, retry_after_s=1)]
    scenario.tell(ev.ClientCancelled(R))
    assert scenario.receive(S) == [ev.Prepare(S)]


def test_the_bytes_of_ended_requests_do_not_count() -> None:
    scenario = Scenario(admission=Admission(max_requests=9, max_bytes=10))
    scenario.receive(RequestId("a third"), num_bytes=1)
    scenario.receive(R, num_bytes=7)
    assert scenario.receive(S, num_bytes=3) == [ev.Reject(S, Reason.OVERLOADED, retry_after_s=1)]
    scenario.tell(ev.PrepareFailed(R))
    assert scenario.receive(S, num_bytes=3) == [ev.Prepare(S)]


def test_retry_after_is_the_time_the_least_loaded_prefill_needs_for_what_it_holds() -> None:
    scenario = Scenario(admission=Admission(max_requests=1, max_bytes=10))
    scenario.start(R, num_choices=300)  # 300 legs of 100 tokens at 0.1 ms each, and 10 ms
    assert scenario.receive(S) == [ev.Reject(S, Reason.OVERLOADED, retry_after_s=4)]


@pytest.mark.parametrize("workers", [(E0, D0), (E0, P0), (P0, D0)])
def test_a_request_is_rejected_where_a_stage_that_it_needs_has_no_engine(
    workers: tuple[str, ...],
) -> None:
    scenario = Scenario(*[id_ for id_ in (E0, P0, D0) if id_ in workers])
    assert scenario.receive(num_items=1) == [ev.Reject(R, Reason.NO_WORKER, retry_after_s=1)]


def test_text_needs_no_encoder() -> None:
    assert Scenario(P0, D0).receive() == [ev.Prepare(R)]


# By the length of the encode queue ----------------------------------------------------------------


def queueing(*workers: WorkerId, **knobs: Any) -> Scenario:
    """Each picture is a call of 330 ms; the first has been sent to the encoder."""
    full = slow_scenario(*workers, **{"max_batch_items": 1, "max_queue_s": 1.0, **knobs})
    full.ask("first", "x")
    return full


def test_pictures_that_would_wait_too_long_are_refused() -> None:
    full = queueing()
    full.ask("q", *"abc")
    assert full.core.queue_s() == pytest.approx(0.99)
    assert full.receive(R, num_items=1) == [ev.Prepare(R)]
    assert full.receive(S, num_items=1) == [ev.Reject(S, Reason.OVERLOADED, retry_after_s=1)]
    assert full.receive(T) == [ev.Prepare(T)], "text does not wait for Encode"


def test_retry_after_is_the_time_until_the_queue_is_short_enough() -> None:
    full = queueing()
    full.receive(R, num_items=12)
    assert full.core.queue_s() == pytest.approx(3.96)
    assert full.receive(S, num_items=1) == [ev.Reject(S, Reason.OVERLOADED, retry_after_s=3)]


def test_pictures_are_admitted_again_when_the_queue_is_shorter() -> None:
    full = queueing()
    full.receive(R, num_items=4)
    full.tell(ev.ClientCancelled(R))
    assert full.core.queue_s() == 0
    assert full.receive(S, num_items=1) == [ev.Prepare(S)]


def test_two_encoders_halve_the_queue() -> None:
    full = queueing(E0, E1, P0, D0)
    full.receive(R, num_items=4)
    assert full.core.queue_s() == pytest.approx(0.66)


def test_batches_shorten_the_queue() -> None:
    full = queueing(max_batch_items=4)
    full.receive(R, num_items=4)
    assert full.core.queue_s() == pytest.approx(0.42)


def test_a_queue_without_engines_has_no_length() -> None:
    full = queueing()
    full.receive(R, num_items=99)
    full.tell(ev.WorkerLost(P0))
    assert full.core.queue_s() == 0.0


def test_the_estimate_learns_how_fast_the_encoder_is() -> None:
    full = queueing()
    full.receive(R, num_items=10)
    full.now_ns += NS_PER_S // 100
    full.tell(finished(1))
    assert full.core.queue_s() == pytest.approx(0.1)


def test_a_batch_that_failed_is_no_sample_of_how_fast_the_encoder_is() -> None:
    full = queueing()
    full.receive(R, num_items=10)
    full.tell(for_good(1))
    assert full.core.queue_s() == pytest.approx(3.3)


def test_a_slow_stage_behind_the_gate_lengthens_the_queue() -> None:
    full = queueing()
    full.tell(finished(1))
    full.now_ns += 2 * NS_PER_S
    full.tell(ev.PrefillFinished(RequestId("first"), 0, 0))
    full.receive(R, num_items=1, num_choices=3)
    assert full.core.queue_s() == pytest.approx(3 * 2.0)
    full.tell(ev.ClientCancelled(R))
    assert full.core.queue_s() == 0.0
