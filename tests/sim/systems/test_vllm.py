import pytest

from .simulated import pictures, simulate, text

ONE = {"replicas": 1, "tensor_parallel_size": 1, "item_s": 0.5}
TWO = {"replicas": 2, "tensor_parallel_size": 1, "item_s": 0}


def test_a_request_is_processed_then_encoded_in_the_step_of_its_prompt() -> None:
    done = simulate("vllm", ONE, [pictures()])
    assert done.times_s == {"r0": (3.5, 3.7)}  # 0.5 host, 2 encode, 1 prefill, 2 steps
    assert done.spans("v0", "preprocess") == [(0, 0.5)]
    assert done.run.num_items == done.run.num_calls == 1


def test_text_goes_to_an_engine_at_once() -> None:
    assert simulate("vllm", ONE, [text()]).times_s == {"r0": (1, 1.2)}


@pytest.mark.parametrize(("workers", "second_s"), [(1, 1.0), (2, 0.5)])
def test_an_api_server_processes_as_many_items_as_it_has_workers(
    workers: int, second_s: float
) -> None:
    section = {**ONE, "api_server_workers": workers}
    done = simulate("vllm", section, [pictures(), pictures()])
    assert done.spans("v0", "preprocess") == [(0, 0.5), (second_s - 0.5, second_s)]


@pytest.mark.parametrize(("budget", "first_s"), [(None, 4.0), (200, 4.0), (100, 5.0)])
def test_a_step_encodes_no_more_than_its_budget(budget: int | None, first_s: float) -> None:
    """Two items together take 3 s, apart 4 s."""
    section = {**ONE, "item_s": 0, "max_num_encoder_input_tokens": budget}
    assert simulate("vllm", section, [pictures(2)]).times_s["r0"][0] == first_s


def test_the_least_loaded_engine_gets_a_request_and_a_proxy_takes_turns() -> None:
    requests = [text(num_tokens=50), text(), text(at_s=2)]
    balanced = simulate("vllm", TWO, requests)
    assert balanced.times_s["r2"] == (3.0, 3.2)  # nobody else is there
    turns = simulate("vllm", {**TWO, "routing": "round-robin"}, requests)
    # r0's decode step ends at 2.0, or 2.1, and goes along with the prompt.
    first_s, _ = turns.times_s["r2"]
    assert first_s is not None
    assert first_s > 3


def test_equal_engines_take_turns() -> None:
    done = simulate("vllm", TWO, [text(), text()])
    assert done.times_s["r0"] == done.times_s["r1"] == (1, 1.2)


def test_a_request_that_waits_for_blocks_counts_more() -> None:
    """r0 fills v0's blocks and r2 waits there: v0 has fewer requests than v1, but r5 avoids it."""
    requests = [
        text(num_prompt=140, num_tokens=15),
        text(num_prompt=10, num_tokens=1),
        text(num_prompt=100, num_tokens=1),
        *[text(num_prompt=10, num_tokens=1) for _ in range(3)],
    ]
    done = simulate("vllm", TWO, requests, kv_tokens=160)
    assert done.times_s["r2"][1] > 1.5
    assert done.times_s["r5"][1] == 0.04


def test_a_request_that_no_cache_can_hold_fails() -> None:
    done = simulate("vllm", ONE, [text(num_prompt=2000), text(num_prompt=100)], kv_tokens=160)
    outcomes = dict(zip(done.run.ids, (each.outcome for each in done.run.records), strict=True))
    assert outcomes == {"r0": "failed", "r1": "completed"}
