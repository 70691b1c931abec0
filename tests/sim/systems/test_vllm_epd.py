from typing import Any

import pytest
from pydantic import ValidationError

from easerve.sim.config import VllmEpdSystem

from .simulated import NO_HOST, pictures, simulate, text


def section(encoders: int = 1, **over: Any) -> dict[str, Any]:
    encode = {"replicas": encoders, **NO_HOST}
    return {"encode": encode, "prefill": {}, "decode": {}, **over}


def test_the_items_of_a_request_are_encoded_at_once() -> None:
    done = simulate("vllm-epd", section(2), [pictures(2)])
    assert done.spans("e0", "encode") == done.spans("e1", "encode") == [(0, 2)]
    assert done.spans("p0", "prefill") == [(2.5, 3.5)]
    assert done.spans("d0", "transfer") == [(3.5, 3.75)]
    assert done.times_s == {"r0": (3.85, 4.05)}  # decode makes all three tokens


@pytest.mark.parametrize(
    ("merges", "encodes", "prefill_s"),
    [(True, [(0, 2), (2, 5)], 6), (False, [(0, 2), (2, 4), (4, 6)], 6.5)],
)
def test_calls_that_wait_share_a_forward(
    merges: bool, encodes: list[tuple[float, float]], prefill_s: float
) -> None:
    done = simulate("vllm-epd", section(merge_calls=merges), [pictures(3)])
    assert done.spans("e0", "encode") == encodes
    assert done.spans("p0", "prefill") == [(prefill_s, prefill_s + 1)]


def test_a_forward_holds_no_more_than_the_budget() -> None:
    encode = {**NO_HOST, "max_num_batched_tokens": 150}
    done = simulate("vllm-epd", {**section(), "encode": encode}, [pictures(3)])
    assert done.spans("e0", "encode") == [(0, 2), (2, 4), (4, 6)]


def test_encoders_go_on_in_turn_over_requests() -> None:
    done = simulate("vllm-epd", section(2), [pictures(), pictures()])
    assert done.spans("e0", "encode") == done.spans("e1", "encode") == [(0, 2)]


def test_prefill_holds_its_blocks_until_decode_has_pulled_them() -> None:
    one = {"kv_cache_tokens": 1008}  # holds one request
    requests = [text(num_tokens=2), text(num_tokens=2)]
    done = simulate("vllm-epd", section(prefill=one), requests)
    assert done.spans("p0", "prefill") == [(0, 1), (1.25, 2.25)]
    assert done.times_s == {"r0": (1.35, 1.45), "r1": (2.6, 2.7)}


def test_prefill_may_let_its_token_out() -> None:
    done = simulate("vllm-epd", section(first_token_at="prefill"), [text(), text(2, 1000, 1)])
    assert done.times_s == {"r0": (1, 1.45), "r1": (3, 3)}  # decode makes the other two


def test_blocks_that_come_back_within_a_step_begin_no_other() -> None:
    """The last two prompts share a step; the first of them lets go of its blocks at its end."""
    requests = [text(num_prompt=900, num_tokens=1) for _ in range(3)]
    done = simulate("vllm-epd", section(first_token_at="prefill"), requests)
    assert done.spans("p0", "prefill") == [(0, 0.9), (0.9, 2.7)]


def test_engines_are_drawn_or_take_turns() -> None:
    requests = [text(at_s=each * 10) for each in range(8)]
    two = section(prefill={"replicas": 2})

    def engines(seed: int, **over: Any) -> list[int]:
        done = simulate("vllm-epd", {**two, **over}, requests, seed=seed)
        begins = {begin for begin, _ in done.spans("p1", "prefill")}
        return [int(request.at_s in begins) for request in requests]

    assert engines(0, routing="round-robin") == [0, 1] * 4
    assert engines(1) == engines(1)
    assert len({tuple(engines(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_a_request_that_an_engine_cannot_hold_fails(small: str) -> None:
    done = simulate(
        "vllm-epd", section(1, **{small: {"kv_cache_tokens": 512}}), [pictures(), text()]
    )
    assert {each.outcome for each in done.run.records} == {"failed"}


def test_decode_engines_may_prefill_as_well() -> None:
    done = simulate("vllm-epd", section(2, prefill=None), [pictures(2), text(5)])
    assert done.spans("e0", "encode") == done.spans("e1", "encode") == [(0, 2)]
    assert done.spans("d0", "prefill") == [(2.5, 3.5), (5, 6)]
    assert not done.spans("d0", "transfer")  # nothing is handed over
    assert done.times_s == {"r0": (3.5, 3.7), "r1": (6, 6.2)}


def test_a_prompt_holds_up_the_decodes_of_its_engine() -> None:
    alone = simulate("vllm-epd", section(prefill=None), [text(num_tokens=30)])
    assert alone.times_s == {"r0": (1, 3.9)}
    beside = simulate("vllm-epd", section(prefill=None), [text(num_tokens=30), text(1.5, 1000, 1)])
    assert beside.times_s == {"r0": (1, 4.9), "r1": (2.6, 2.6)}


def test_an_answer_of_one_token_ends_with_its_prompt() -> None:
    done = simulate("vllm-epd", section(prefill=None), [text(num_tokens=1)])
    assert done.times_s == {"r0": (1, 1)}


def test_what_the_one_engine_cannot_hold_fails() -> None:
    small = {"kv_cache_tokens": 512}
    done = simulate("vllm-epd", section(prefill=None, decode=small), [pictures(), text()])
    assert {each.outcome for each in done.run.records} == {"failed"}


def test_prefills_token_needs_prefill_engines() -> None:
    with pytest.raises(ValidationError, match="first_token_at: prefill needs engines of prefill"):
        VllmEpdSystem.model_validate(section(prefill=None, first_token_at="prefill"))
