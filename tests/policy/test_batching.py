import pytest

from easerve.policy import events as ev
from easerve.policy.batching import RULES, Close, NoBatching, QueuedItem
from easerve.types import Stage

from .scenario import B1, B2, B3, D0, E0, E1, P0, Pairs, R, S, Scenario, encode_item, item


@pytest.fixture
def pairs() -> Scenario:
    return Scenario(batching=Pairs())


def test_no_batching_closes_a_batch_for_each_item_at_once() -> None:
    queue = [QueuedItem(R, index, item(R, index), since_ns=0) for index in range(3)]
    assert NoBatching().decide(queue, now_ns=0) == Close(1, "pass-through")


def test_every_rule_is_known_by_its_name() -> None:
    assert {name: make().name for name, make in RULES.items()} == {name: name for name in RULES}


def test_a_rule_that_waits_is_asked_again_at_its_time(pairs: Scenario) -> None:
    assert pairs.start(num_items=1) == []
    assert pairs.core.next_deadline() == 50
    assert pairs.core.queue_lengths()[Stage.ENCODE] == 1
    assert pairs.wait(49) == []
    assert pairs.wait(1) == [ev.StartEncode(B1, E0, (encode_item(R, 0),), "timeout")]
    assert pairs.core.next_deadline() == 1000


def test_items_of_two_requests_share_a_batch(pairs: Scenario) -> None:
    pairs.start(R, num_items=1)
    assert pairs.start(S, num_items=1) == [
        ev.StartEncode(B1, E0, (encode_item(R, 0), encode_item(S, 0)), "full")
    ]


def test_a_rule_that_needs_an_idle_encoder_waits_for_one(pairs: Scenario) -> None:
    pairs.start(R, num_items=2)
    assert pairs.start(S, num_items=2) == []
    assert pairs.core.next_deadline() == 1000, "a busy encoder is no reason to wake up"
    assert ev.StartEncode(B2, E0, (encode_item(S, 0), encode_item(S, 1)), "full") in pairs.tell(
        ev.EncodeFinished(B1)
    )


def test_every_idle_encoder_gets_a_batch() -> None:
    scenario = Scenario(E0, E1, P0, D0, batching=Pairs())
    actions = scenario.start(num_items=3)
    assert actions == [ev.StartEncode(B1, E0, (encode_item(R, 0), encode_item(R, 1)), "full")]
    assert scenario.wait(50) == [ev.StartEncode(B2, E1, (encode_item(R, 2),), "timeout")]


def test_a_shared_batch_goes_on_for_the_request_that_is_left(pairs: Scenario) -> None:
    pairs.start(R, num_items=1)
    pairs.start(S, num_items=1)
    assert pairs.tell(ev.ClientCancelled(R)) == [ev.Cancel(R)]
    assert pairs.backlog()[E0] == 60
    assert pairs.tell(ev.EncodeFinished(B1)) == [
        ev.StartPrefill(S, 0, 0, P0, "holds its embeddings")
    ]


def test_a_shared_batch_that_fails_is_tried_again_for_the_request_that_is_left(
    pairs: Scenario,
) -> None:
    pairs.start(R, num_items=1)
    pairs.start(S, num_items=1)
    pairs.tell(ev.ClientCancelled(R))
    pairs.now_ns = 50
    assert pairs.tell(ev.EncodeFailed(B1, retryable=True)) == [
        ev.StartEncode(B2, E0, (encode_item(S, 0),), "timeout")
    ]


def test_a_batch_of_ended_requests_is_off_its_encoder(pairs: Scenario) -> None:
    pairs.start(R, num_items=1)
    pairs.start(S, num_items=1)
    assert pairs.tell(ev.ClientCancelled(R), ev.ClientCancelled(S)) == [ev.Cancel(R), ev.Cancel(S)]
    assert pairs.backlog() == {E0: 0, P0: 0, D0: 0}


def test_items_that_are_tried_again_keep_their_place_in_the_queue(pairs: Scenario) -> None:
    pairs.start(R, num_items=2)
    pairs.wait(10)
    pairs.start(S, num_items=1)
    pairs.wait(10)
    assert pairs.tell(ev.EncodeFailed(B1, retryable=True)) == [
        ev.StartEncode(B2, E0, (encode_item(R, 0), encode_item(R, 1)), "full")
    ]
    pairs.wait(40)
    assert pairs.tell(ev.EncodeFinished(B2)) == [
        ev.StartEncode(B3, E0, (encode_item(S, 0),), "timeout"),
        ev.StartPrefill(R, 0, 0, P0, "holds its embeddings"),
    ]
