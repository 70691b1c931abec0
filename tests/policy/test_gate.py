from dataclasses import replace

from easerve.policy.gate import Credit, Gate, Opening
from easerve.policy.knobs import Order
from easerve.policy.state import Request

from .scenario import DEFAULTS, request


def gate_with(*requests: Request) -> Gate:
    gate = Gate()
    for each in requests:
        gate.join(each)
    return gate


def admitted(opening: Opening, *requests: Request) -> str:
    return " ".join(each.request_id for each in requests if opening.admits(each))


def test_the_gate_is_open_while_there_is_credit_for_all() -> None:
    waiting = [request("r", num_choices=2), request("s")]
    assert gate_with(*waiting).opening(Credit(3), DEFAULTS) == Opening(None, "", None)
    assert gate_with().opening(Credit(0, "prefill", 0.5), DEFAULTS) == Opening(None, "", None)


def test_who_came_first_passes_first_with_all_its_legs() -> None:
    waiting = request("r", num_choices=2), request("s", "a picture"), request("t")
    gate = gate_with(*waiting)
    openings = [gate.opening(Credit(num_legs), DEFAULTS) for num_legs in range(5)]
    assert [admitted(opening, *waiting) for opening in openings] == ["", "r", "r", "r s", "r s t"]
    assert [opening.held_by for opening in openings] == ["decode"] * 4 + [""]


def test_who_is_due_first_passes_first_if_so_ordered() -> None:
    waiting = request("late", received_ns=9), request("early", received_ns=3)
    urgent = replace(DEFAULTS, order=Order.DEADLINE)
    assert admitted(gate_with(*waiting).opening(Credit(1), urgent), *waiting) == "early"


def test_who_waits_for_an_encoder_keeps_no_credit_from_others_while_none_is_idle() -> None:
    waiting = request("r", "a picture"), request("s", "encoded"), request("t")
    waiting[0].pending = {0}
    opening = gate_with(*waiting).opening(Credit(1), DEFAULTS, idle_encoder=False)
    assert admitted(opening, *waiting) == "s"


def test_the_gate_says_when_to_ask_again() -> None:
    opening = gate_with(request("r")).opening(Credit(0, "prefill", 0.5), DEFAULTS)
    assert opening == Opening(frozenset(), "prefill", 0.5)


def test_who_has_passed_is_admitted_ever_after_and_counts_until_it_is_closed() -> None:
    passes, waits = request("r", num_choices=3), request("s")
    gate = gate_with(passes, waits)
    gate.let_pass(passes)
    gate.let_pass(passes)
    assert gate.num_passed == 3
    shut = gate.opening(Credit(0), DEFAULTS)
    assert admitted(shut, passes, waits) == "r"
    gate.close(passes)
    assert gate.num_passed == 0


def test_who_is_closed_before_it_passes_waits_no_more() -> None:
    never_came, leaves = request("q"), request("r")
    gate = gate_with(leaves)
    gate.close(never_came)
    gate.close(leaves)
    assert gate.num_passed == 0
    assert gate.opening(Credit(0), DEFAULTS).allowed is None
