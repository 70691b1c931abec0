from dataclasses import replace
from typing import Any

import pytest

from easerve.policy.directory import Directory
from easerve.policy.estimates import Times
from easerve.policy.lifecycle import LegState
from easerve.policy.offload import ONLY
from easerve.policy.placing import BESIDE, HOLDS, LEAST, Placing
from easerve.policy.pool import Pool, Worker
from easerve.policy.state import Leg, Request
from easerve.types import Side, WorkerId

from .scenario import DEFAULTS, E0, E1, L0, L1, P0, P1, SLOW, joined, picture, request

ALL = (E0, E1, P0, P1, L0, L1)


def placing(*worker_ids: WorkerId, **knobs: Any) -> Placing:
    """Prefill takes 1 ms a token, a picture 330 ms."""
    pool = Pool()
    for worker_id in worker_ids:
        engine = joined(worker_id)
        pool.join(Worker(worker_id, engine.stage, beside=engine.beside))
    times = Times(SLOW)
    times.seen(picture("cat"))
    return Placing(replace(DEFAULTS, **knobs), pool, Directory(), times)


def sized(name: str, num_tokens: int) -> Request:
    made = request(name)
    made.shape = replace(made.shape, num_prompt_tokens=num_tokens)
    return made


def place(placing: Placing, *requests: Request, encoder_id: WorkerId | None = None) -> list[str]:
    """Where they go."""
    placing.place(requests, 0, encoder_id)
    return [str(each.destination) for each in requests]


def load(placing: Placing, worker_id: WorkerId, num_tokens: int) -> None:
    worker = placing._pool.get(worker_id)
    assert worker is not None
    worker.hold("other work", num_tokens)


def backlogs(placing: Placing) -> dict[WorkerId, int]:
    return {worker.worker_id: worker.backlog_tokens for worker in placing._pool}


def test_a_request_goes_to_the_least_backlog_of_its_side() -> None:
    remote = placing(*ALL)
    load(remote, P0, 10)
    assert place(remote, first := request("r")) == [P1]
    assert first.chosen == LEAST
    local = placing(*ALL, remote_share=0.0)
    load(local, L0, 10)
    assert place(local, request("r")) == [L1]


def test_a_request_keeps_its_destination_and_is_held_there_once() -> None:
    remote = placing(P0, P1)
    asked = request("r")
    assert place(remote, asked) == place(remote, asked) == [P0]
    assert backlogs(remote) == {P0: 100, P1: 0}


def test_a_request_that_is_prefilled_already_is_not_held() -> None:
    remote = placing(P0)
    asked = request("r")
    asked.legs = [Leg(0, LegState.PREFILLING)]
    assert place(remote, asked) == [P0]
    assert backlogs(remote) == {P0: 0}


def test_a_request_whose_destination_is_gone_is_drawn_anew() -> None:
    remote = placing(P0, P1)
    asked = request("r")
    place(remote, asked)
    remote._pool.lose(P0)
    assert place(remote, asked) == [P1]


def test_a_local_prefill_goes_beside_its_encoder() -> None:
    local = placing(*ALL, remote_share=0.0)
    load(local, L1, 1000)
    assert place(local, asked := request("r", "cat"), encoder_id=E1) == [L1]
    assert asked.chosen == BESIDE


def test_a_remote_prefill_does_not_care_which_encoder_it_comes_from() -> None:
    remote = placing(*ALL)
    load(remote, P0, 10)
    assert place(remote, asked := request("r", "cat"), encoder_id=E1) == [P1]
    assert asked.chosen == LEAST


def test_the_worker_that_has_the_embeddings_is_worth_a_wait_but_not_any() -> None:
    remote = placing(P0, P1)
    remote._directory.gained(P1, "cat")
    load(remote, P1, 320)
    assert place(remote, near := request("r", "cat", "cat")) == [P1]
    assert near.chosen == HOLDS
    assert place(remote, far := request("s", "cat")) == [P0], "420 tokens ahead, 330 ms saved"
    assert far.chosen == LEAST


def test_the_requests_of_a_batch_share_the_workers_out_the_longest_first() -> None:
    remote = placing(P0, P1)
    sizes = [10, 100, 90, 15]
    requests = [sized(str(index), size) for index, size in enumerate(sizes)]
    assert place(remote, *requests) == [P0, P0, P1, P1]
    assert backlogs(remote) == {P0: 110, P1: 105}


def test_the_sides_get_their_share() -> None:
    both = placing(*ALL, remote_share=0.25)
    requests = [request(str(index)) for index in range(8)]
    sides = [destination[0] for destination in place(both, *requests)]
    assert (sides.count("p"), sides.count("l")) == (2, 6)


def test_a_request_that_a_worker_failed_goes_elsewhere_and_to_the_other_side_if_it_must() -> None:
    both = placing(E0, E1, P0, L0, L1, remote_share=0.0)
    asked = request("r")
    asked.avoid = {L0}
    assert place(both, asked) == [L1]
    asked.destination, asked.avoid = None, {L0, L1}
    assert place(both, asked) == [P0]
    assert asked.placement is not None
    assert asked.placement.reason == ONLY
    asked.destination, asked.avoid = None, {L0, L1, P0}
    assert place(both, asked)[0] in {L0, L1}, "all failed it"


def test_only_the_backlogs_of_sides_that_get_prefills_count() -> None:
    both = placing(*ALL, remote_share=0.5)
    load(both, P0, 100)
    load(both, P1, 200)
    load(both, L0, 300)
    load(both, L1, 400)
    assert both.backlogs_s(0) == pytest.approx({Side.REMOTE: 0.1, Side.LOCAL: 0.3})
    assert both.least_and_most_s(0) == pytest.approx((0.1, 0.3))
    both.offload.retune(replace(DEFAULTS, remote_share=1.0))
    assert both.least_and_most_s(0) == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize("knobs", [{"where": "jsq"}, {"spill_guard_s": 1.0}])
def test_the_longer_side_holds_nothing_back_where_the_other_takes_what_comes(knobs: Any) -> None:
    both = placing(*ALL, remote_share=0.5, **knobs)
    load(both, P0, 500)
    load(both, P1, 500)
    assert both.least_and_most_s(0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("worker_ids", "remote_share", "worth"),
    [
        ((P0, P1), 0.3, 2),
        ((P0, P1, L0), 0.5, 2),  # the local one gets every other prefill
        ((P0, P1, L0), 2 / 3, 3),
        ((P0, P1, L0), 0.0, 1),
        ((), 0.5, 0),
    ],
)
def test_prefill_workers_are_worth_what_the_share_leaves_them(
    worker_ids: tuple[WorkerId, ...], remote_share: float, worth: float
) -> None:
    assert placing(*worker_ids, remote_share=remote_share).num_prefills == pytest.approx(worth)
