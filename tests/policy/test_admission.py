import pytest

from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.types import Reason, RequestId

from .scenario import D0, E0, P0, R, S, Scenario


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
