from itertools import permutations
from typing import get_args

import pytest

from easerve.policy import events as ev
from easerve.types import Stage

from .scenario import B1, B2, E0, NONE, P0, PAIRS, R, S, shape


def order(*events: ev.Event) -> list[ev.Event]:
    """The one order that every permutation of the events is sorted to."""
    orders = [sorted(some, key=ev.sort_key) for some in permutations(events)]
    assert all(other == orders[0] for other in orders)
    return orders[0]


def test_every_kind_of_event_has_its_rank() -> None:
    samples: list[ev.Event] = [
        ev.FirstToken(R, 0, 0),
        ev.DecodeFinished(R, 0, 0),
        ev.EncodeFinished(B1),
        ev.Evicted(P0, ("cat",)),
        ev.WorkerJoined(P0, Stage.PREFILL),
        ev.WorkerLost(P0),
        ev.KnobsChanged(NONE),
        ev.Draining(),
        ev.DecodeFailed(R, 0, 0, retryable=True),
        ev.PrefillFinished(R, 0, 0),
        ev.PrefillFailed(R, 0, 0, retryable=True),
        ev.EmbeddingMissing(R, 0, 0, ()),
        ev.EncodeFailed(B1, retryable=True),
        ev.Prepared(R, shape(R, 1)),
        ev.PrepareFailed(R),
        ev.RequestReceived(R, 1),
        ev.ClientCancelled(R),
    ]
    assert [type(sample) for sample in samples] == list(get_args(ev.Event))
    backwards = samples[::-1]
    assert sorted(backwards, key=ev.sort_key) == samples


def test_what_was_done_counts_before_the_loss_of_who_did_it() -> None:
    done = ev.DecodeFinished(R, 0, 0)
    assert order(ev.WorkerLost(P0), done, ev.FirstToken(R, 0, 0))[-1] == ev.WorkerLost(P0)


def test_what_an_engine_evicts_it_has_had() -> None:
    finished, evicted = ev.EncodeFinished(B1), ev.Evicted(P0, ("cat",))
    assert order(evicted, finished) == [finished, evicted]


def test_a_cancellation_comes_after_the_request_it_is_about() -> None:
    received, cancelled = ev.RequestReceived(R, 1), ev.ClientCancelled(R)
    assert order(cancelled, received) == [received, cancelled]


def test_equal_kinds_go_by_id_then_leg_then_attempt() -> None:
    wanted = [
        ev.DecodeFinished(R, 0, 10),
        ev.DecodeFinished(R, 1, 2),
        ev.DecodeFinished(R, 1, 10),
        ev.DecodeFinished(S, 0, 0),
    ]
    assert order(*wanted) == wanted


def test_batches_go_by_number() -> None:
    ninth, tenth = ev.EncodeFinished(B1), ev.EncodeFinished(B2)
    assert order(tenth, ninth) == [ninth, tenth]


@pytest.mark.parametrize(
    "pair",
    [
        (ev.WorkerJoined(E0, Stage.ENCODE), ev.WorkerJoined(E0, Stage.PREFILL)),
        (ev.KnobsChanged(NONE), ev.KnobsChanged(PAIRS)),
        (ev.Evicted(P0, ("cat",)), ev.Evicted(P0, ("dog",))),
        (ev.EmbeddingMissing(R, 0, 0, ("cat",)), ev.EmbeddingMissing(R, 0, 0, ("dog",))),
        (ev.EncodeFailed(B1, retryable=True), ev.EncodeFailed(B1, retryable=False)),
        (ev.PrefillFinished(R, 0, 0), ev.PrefillFinished(R, 0, 0, final=True)),
        (ev.PrepareFailed(R, retryable=True), ev.PrepareFailed(R)),
        (ev.Prepared(R, shape(R, 0)), ev.Prepared(R, shape(R, 1))),
    ],
    ids=lambda pair: type(pair[0]).__name__,
)
def test_answers_that_contradict_each_other_have_an_order(pair: tuple[ev.Event, ev.Event]) -> None:
    order(*pair)
