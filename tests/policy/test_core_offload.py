"""Where embeddings come from and prefills go to, in the core."""

from dataclasses import replace

import pytest

from easerve.policy import events as ev
from easerve.policy.lifecycle import RequestState
from easerve.policy.offload import ONLY
from easerve.policy.placing import BESIDE
from easerve.policy.supply import HELD
from easerve.types import RequestId, Side, Stage, WorkerId

from .scenario import (
    B1,
    B2,
    D0,
    DEFAULTS,
    E0,
    E1,
    L0,
    L1,
    LIMITS,
    P0,
    P1,
    R,
    S,
    Scenario,
    T,
    batches,
    finished,
    joined,
    picture,
    prefills,
    sent,
    shape_of,
    slow_scenario,
    start_prefill,
)


def goes_to(scenario: Scenario, name: str) -> list[WorkerId]:
    """Where the prefill of a text is started."""
    return [each.worker_id for each in prefills(scenario.start(RequestId(name)))]


# Sides --------------------------------------------------------------------------------------------


def test_prefills_go_to_both_sides_as_they_share() -> None:
    half = slow_scenario(E0, P0, L0, D0, remote_share=0.5)
    assert [goes_to(half, name) for name in "abcd"] == [[P0], [L0], [P0], [L0]]
    assert half.core.offload.deficit == 0.0


def test_the_requests_of_a_batch_may_go_to_both_sides() -> None:
    half = slow_scenario(E0, P0, L0, D0, remote_share=0.5, when="fixed", max_batch_items=2)
    half.ask("r", "a")
    half.receive(S, num_items=1)
    started = half.prepare(S, num_items=1)
    (batch,) = batches(started)
    waiters = [waiter for entry in batch.items for waiter in entry.waiters]
    assert [waiter.destination for waiter in waiters] == [P0, L0]
    assert [each.worker_id for each in prefills(started)] == [P0, L0]


def test_a_local_prefill_runs_beside_its_encoder() -> None:
    local = slow_scenario(E0, E1, P0, L0, L1, D0, remote_share=0.0)
    assert local.start(R, num_items=1)[1:] == [start_prefill(R, L0, reason=BESIDE, coming=True)]
    assert local.start(S, num_items=1)[1:] == [start_prefill(S, L1, reason=BESIDE, coming=True)]


def test_while_a_side_is_down_nothing_counts() -> None:
    half = slow_scenario(E0, P0, L0, D0, remote_share=0.5)
    goes_to(half, "a")
    half.tell(ev.WorkerLost(P0))
    (prefill,) = prefills(half.start(RequestId("b")))
    assert (prefill.worker_id, prefill.placement.reason) == (L0, ONLY)
    assert half.core.offload.deficit == -0.5


def test_the_backlogs_of_the_sides_can_be_seen() -> None:
    half = slow_scenario(E0, P0, P1, L0, D0, remote_share=0.5)
    goes_to(half, "a")
    goes_to(half, "b")
    assert half.core.backlogs_s(half.now_ns) == pytest.approx({Side.REMOTE: 0.0, Side.LOCAL: 0.1})


def test_another_share_is_in_force_at_once() -> None:
    live = slow_scenario(E0, P0, L0, D0)
    assert goes_to(live, "a") == [P0]
    live.tune(remote_share=0.0)
    assert live.core.offload.share == 0.0
    assert goes_to(live, "b") == [L0]


def test_the_side_with_more_ahead_holds_the_gate() -> None:
    half = slow_scenario(E0, P0, L0, D0, remote_share=0.5, prefill_ahead_s=0.15)
    assert [goes_to(half, name) for name in "abcd"] == [[P0], [L0], [P0], []]
    half.tell(ev.KnobsChanged(replace(DEFAULTS, remote_share=0.0, prefill_ahead_s=0.15)))
    assert half.core.queue_lengths()[Stage.PREFILL] == 0, "only the local side counts now"


# Embeddings ---------------------------------------------------------------------------------------


def test_an_embedding_that_an_encoder_has_is_only_sent() -> None:
    shared = slow_scenario()
    shared.ask("r", "cat")
    shared.tell(finished(1), ev.Evicted(P0, ("cat",)))
    assert shared.ask("s", "cat", "dog", "cat") == [(E0, "dog", "encoder idle"), (E0, "cat", HELD)]
    assert shared.backlog()[E0] == 30, "to send is no work"
    assert shared.tell(finished(3)) == []
    assert shared.backlog()[E0] == 30


def test_a_request_whose_items_are_all_known_does_not_wait_for_a_batch() -> None:
    shared = slow_scenario(E0, P0, D0, when="fixed", timeout_s=1.0, max_batch_items=1)
    shared.ask("r", "cat")
    shared.tell(finished(1), ev.Evicted(P0, ("cat",)))
    assert shared.ask("s", "cat") == [(E0, "cat", HELD)]


def test_an_embedding_that_only_another_prefill_engine_has_is_encoded_again() -> None:
    shared = slow_scenario(E0, P0, L0, D0, remote_share=0.0)
    shared.ask("r", "cat")
    shared.tell(finished(1), ev.Evicted(E0, ("cat",)))
    shared.tune(remote_share=1.0)
    assert shared.ask("s", "cat") == [(E0, "cat", "encoder idle")]


def test_one_who_comes_later_and_goes_elsewhere_has_it_sent_on() -> None:
    half = slow_scenario(E0, P0, L0, D0, remote_share=0.5)
    half.ask("r", "cat")
    assert half.ask("s", "cat") == []
    actions = half.tell(finished(1))
    assert sent(actions) == [(E0, "cat", HELD)]
    assert prefills(actions) == [start_prefill(S, L0, coming=True)]
    assert half.tell(finished(2)) == []


def test_what_is_sent_to_one_is_waited_for_by_another_who_goes_elsewhere() -> None:
    half = slow_scenario(E0, P0, L0, D0, remote_share=0.5)
    half.ask("r", "cat")
    half.tell(finished(1), ev.Evicted(P0, ("cat",)))
    assert half.ask("s", "cat") == [(E0, "cat", HELD)]
    assert half.ask("t", "cat") == []
    actions = half.tell(finished(2))
    assert (sent(actions), prefills(actions)) == (
        [(E0, "cat", HELD)],
        [start_prefill(T, P0, coming=True)],
    )


def test_what_is_queued_again_is_not_sent_to_others_meanwhile() -> None:
    failed = slow_scenario(E0, E1, P0, P1, D0, max_batch_items=1)
    failed.ask("r", "cat")
    failed.tell(finished(1), ev.Evicted(P0, ("cat",)))
    failed.ask("s", "cat")
    failed.ask("x", "x")
    failed.ask("y", "y")
    failed.tell(ev.EncodeFailed(B2, retryable=True))
    assert failed.ask("t", "cat") == []
    (batch,) = batches(failed.tell(finished(4)))
    assert batch.forward
    assert [waiter.request_id for waiter in batch.items[0].waiters] == [S, T]


def test_what_an_encoder_cannot_send_is_encoded_elsewhere() -> None:
    failed = slow_scenario(E0, E1, P0, D0)
    failed.ask("r", "cat")
    failed.tell(finished(1), ev.Evicted(P0, ("cat",)))
    failed.ask("s", "cat")
    assert sent(failed.tell(ev.EncodeFailed(B2, retryable=True))) == [(E1, "cat", "encoder idle")]


def test_an_encoder_that_failed_a_request_is_not_asked_to_send_to_it() -> None:
    failed = slow_scenario(E0, E1, P0, D0)
    failed.ask("r", "cat")
    failed.tell(finished(1), ev.Evicted(P0, ("cat",)))
    failed.ask("s", "dog", "cat")
    failed.tell(finished(3), ev.Evicted(P0, ("cat",)))
    again = sent(failed.tell(ev.EncodeFailed(B2, retryable=True)))
    assert again == [(E1, "dog", "encoder idle"), (E0, "cat", "encoder idle")]


def test_embeddings_of_a_cancelled_request_are_known_of() -> None:
    kept = slow_scenario()
    kept.ask("r", "cat", "dog")
    assert kept.tell(ev.ClientCancelled(R))[-1] == ev.CancelEncode(B1)
    assert kept.ask("s", "cat") == [(E0, "cat", "encoder idle")], "nobody waited for it"
    kept.tell(finished(2), ev.ClientCancelled(S))
    assert kept.ask("t", "cat") == []
    assert kept.core.queue_lengths()[Stage.PREFILL] == 0


# What is not where it should be -------------------------------------------------------------------


def test_a_prefill_is_told_which_of_its_embeddings_are_on_their_way() -> None:
    shared = slow_scenario()
    shared.ask("r", "cat")
    shared.tell(finished(1))
    shared.receive(S, num_items=2)
    (prefill,) = prefills(shared.tell(ev.Prepared(S, shape_of(picture("cat"), picture("dog")))))
    assert (prefill.coming, prefill.num_held) == ((1,), 1)


def test_what_is_late_costs_no_retry() -> None:
    late = Scenario(limits=replace(LIMITS, max_retries=0))
    late.start(num_items=1)
    for attempt in range(3):
        missing = ev.EmbeddingMissing(R, 0, attempt, ("r.0",))
        assert late.tell(missing) == [start_prefill(R, attempt=attempt + 1, coming=True)]


def test_where_embeddings_do_not_get_the_second_time_nothing_is_sent_any_more() -> None:
    broken = Scenario(E0, P0, P1, D0)
    broken.start(num_items=1)
    broken.tell(finished(1))
    missing = ev.EmbeddingMissing(R, 0, 0, ("r.0",))
    assert prefills(broken.tell(missing)) == [start_prefill(R, P0, attempt=1, coming=True)]
    broken.tell(finished(2))
    missing = ev.EmbeddingMissing(R, 0, 1, ("r.0",))
    assert prefills(broken.tell(missing)) == [start_prefill(R, P1, attempt=2, coming=True)]


def test_an_engine_that_comes_back_does_not_have_what_was_on_its_way_to_it() -> None:
    back = Scenario(E0, P0, D0)
    back.start(num_items=1)
    back.tell(ev.WorkerLost(P0))
    assert prefills(back.tell(joined(P0))) == []
    assert prefills(back.tell(finished(1))) == [start_prefill(R, attempt=1, coming=True)]


def test_an_item_that_is_on_the_way_to_where_a_request_is_placed_holds_nothing_back() -> None:
    shared = slow_scenario(max_batch_items=1, run_ahead=2)
    shared.ask("r", "cat")
    assert shared.ask("s", "cat", "dog") == [(E0, "dog", "full")]
    assert shared.core.queue_lengths()[Stage.PREFILL] == 0
    (waiting,) = (each for each in shared.core._requests.values() if each.request_id == S)
    assert waiting.state is RequestState.GENERATING
