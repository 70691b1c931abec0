from typing import Any

import pytest

from .simulated import NO_HOST, pictures, simulate, text


def section(encoders: int = 1, **over: Any) -> dict[str, Any]:
    encode = {"replicas": encoders, **NO_HOST}
    return {"encode": encode, "prefill": {}, "decode": {}, **over}


def test_items_are_split_over_the_encoders_and_a_call_is_one_forward() -> None:
    """Five items over two encoders: calls of two, two and one. Each item travels by itself."""
    done = simulate("dynamo", section(2), [pictures(5)])
    assert done.spans("e0", "encode") == [(0, 3), (3, 5)]
    assert done.spans("e1", "encode") == [(0, 3)]
    assert done.spans("e0", "transfer") == [(3, 3.5), (3.5, 4), (5, 5.5)]
    assert done.times_s == {"r0": (6.85, 7.05)}  # 5.5, 1 prefill, 0.25 pull, 3 steps


def test_calls_never_share_a_forward() -> None:
    done = simulate("dynamo", section(), [pictures(), pictures(), pictures()])
    assert done.spans("e0", "encode") == [(0, 2), (2, 4), (4, 6)]


def test_every_prefill_worker_takes_its_own_turns() -> None:
    """The first request of each goes to the first encoder, the second one to the second."""
    done = simulate("dynamo", section(2, prefill={"replicas": 2}), [pictures()] * 3)
    assert done.spans("e0", "encode") == [(0, 2), (2, 4)]
    assert done.spans("e1", "encode") == [(0, 2)]
    assert len(done.spans("p0", "prefill")) == 2


@pytest.mark.parametrize(("holds", "second_s"), [(True, 1.25), (False, 1.0)])
def test_prefill_holds_its_blocks_if_it_should(holds: bool, second_s: float) -> None:
    over = section(hold_kv=holds, prefill={"kv_cache_tokens": 1008})
    done = simulate("dynamo", over, [text(), text()])
    assert done.spans("p0", "prefill") == [(0, 1), (second_s, second_s + 1)]


def test_decode_slots_bound_what_is_decoded_at_once() -> None:
    requests = [text(num_tokens=5), text(num_tokens=5)]
    done = simulate("dynamo", section(decode={"max_num_seqs": 1}), requests)
    assert done.times_s["r0"] == (1.35, 1.75)
    assert done.times_s["r1"] == (2.35, 2.75)  # prefilled at 2, pulled at 2.25
    crowded = [text(num_tokens=20), text(num_tokens=5)]
    done = simulate("dynamo", section(decode={"max_num_seqs": 1}), crowded)
    assert done.times_s["r0"] == (1.35, 3.25)
    assert done.times_s["r1"] == (3.6, 4.0)  # pulled when the slot is free


@pytest.mark.parametrize(
    ("first_at", "times_s"), [("decode", (1.35, 1.55)), ("prefill", (1.0, 1.45))]
)
def test_the_client_sees_the_first_token_of_prefill_or_of_decode(
    first_at: str, times_s: tuple[float, float]
) -> None:
    done = simulate("dynamo", section(first_token_at=first_at), [text()])
    assert done.times_s == {"r0": times_s}


def test_a_request_that_decode_cannot_hold_fails_and_prefill_lets_go_of_it() -> None:
    done = simulate("dynamo", section(decode={"kv_cache_tokens": 512}), [pictures(), text(0, 100)])
    outcomes = dict(zip(done.run.ids, (each.outcome for each in done.run.records), strict=True))
    assert outcomes == {"r0": "failed", "r1": "completed"}
