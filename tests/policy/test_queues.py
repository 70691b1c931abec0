from easerve.policy.lifecycle import RequestState
from easerve.policy.queues import Queues
from easerve.policy.state import Request
from easerve.types import RequestId, Stage

from .scenario import shape


def request(name: str, num_items: int) -> Request:
    request_id = RequestId(name)
    made = Request(request_id, RequestState.PREPARING, 1, 1, False, 0, 0, num_items > 0)
    made.shape = shape(request_id, num_items)
    return made


def test_each_stage_is_needed_by_those_that_wait_for_it() -> None:
    queues = Queues()
    text, media = request("text", 0), request("media", 1)
    items, legs = request("items", 2), request("legs", 0)
    queues.preparations = [text, media]
    queues.add_items(items, 0)
    queues.add_legs(legs)
    needing = {stage: sorted(set(queues.needing(stage))) for stage in Stage}
    assert needing == {
        Stage.ENCODE: ["items", "media"],
        Stage.PREFILL: ["items", "legs", "text"],
        Stage.DECODE: ["legs"],
    }
    for each in (text, media, items, legs):
        queues.drop(each)
    assert not any(list(queues.needing(stage)) for stage in Stage)
