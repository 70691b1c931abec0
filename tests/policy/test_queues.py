from easerve.policy.queues import Queues
from easerve.types import Stage

from .scenario import request


def test_each_stage_is_needed_by_those_that_wait_for_it() -> None:
    queues = Queues()
    text, media, legs = request("text"), request("media", "a picture"), request("legs")
    queues.preparations = [text, media]
    queues.add_legs(legs)
    needing = {stage: sorted(r.request_id for r in queues.needing(stage)) for stage in Stage}
    assert needing == {
        Stage.ENCODE: ["media"],
        Stage.PREFILL: ["legs", "text"],
        Stage.DECODE: ["legs"],
    }
    for each in (text, media, legs):
        queues.drop(each)
    assert not any(list(queues.needing(stage)) for stage in Stage)


def test_legs_are_taken_in_the_order_of_their_requests() -> None:
    queues = Queues()
    first, second = request("first", num_choices=2), request("second")
    queues.add_legs(first)
    queues.add_legs(second)
    taken = [(each.request_id, leg.index) for each, leg in queues.take_legs()]
    assert taken == [("first", 0), ("first", 1), ("second", 0)]
    assert queues.take_legs() == []


def test_only_legs_that_wait_are_queued() -> None:
    queues = Queues()
    asked = request("r", num_choices=2)
    queues.add_legs(asked)
    queues.drop(asked)
    asked.legs[0].move("prefill started")
    queues.add_legs(asked)
    assert [leg.index for _, leg in queues.take_legs()] == [1]
