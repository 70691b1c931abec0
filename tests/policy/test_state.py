from easerve.policy.lifecycle import LegState
from easerve.policy.state import Leg

from .scenario import LIMITS, request


def test_a_first_token_is_due_when_it_is_promised() -> None:
    assert request("r", received_ns=7).due_ns(ttft_slo_s=2e-9) == 9


def test_without_a_promise_it_is_due_when_the_request_times_out() -> None:
    asked = request("r", received_ns=7)
    assert asked.due_ns(ttft_slo_s=None) == asked.deadline_ns == 7 + LIMITS.request_timeout_ns


def test_a_request_needs_prefill_while_a_leg_of_it_waits_for_that() -> None:
    asked = request("r")
    assert asked.needs_prefill, "it has no legs yet"
    asked.legs = [Leg(0, LegState.PREFILLING), Leg(1, LegState.PREFILL_QUEUED)]
    assert asked.needs_prefill
    asked.legs[1].move("prefill started")
    assert not asked.needs_prefill
