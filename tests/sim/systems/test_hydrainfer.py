from collections import deque
from typing import Any

import pytest

from easerve.costs.linear import LinearCosts
from easerve.sim.config import HydraInferSystem
from easerve.sim.systems.handover import Gate
from easerve.sim.systems.hydra_node import Job, Node, Streams, image_budget, token_budget
from easerve.sim.systems.hydrainfer import HydraInfer, build
from easerve.types import Stage

from .simulated import NO_HOST, PICTURE, ByHand, pictures, simulate, text, world

LONG = {"tpot_slo_s": 100, "prefill_tpot_slo_s": 100}
"""Budgets are as large as they may be."""


def section(*kinds: str, **over: Any) -> dict[str, Any]:
    nodes = {
        kind.strip("23"): {"replicas": int(kind[-1]) if kind[-1] in "23" else 1} for kind in kinds
    }
    return {**nodes, **NO_HOST, **LONG, **over}


def test_a_request_moves_from_node_to_node() -> None:
    done = simulate("hydrainfer", section("e", "p", "d", item_s=0.5), [pictures()])
    assert done.spans("e0.encode", "preprocess") == [(0, 0.5)]
    assert done.spans("e0.encode", "encode") == [(0.5, 2.5)]
    assert done.spans("p0", "transfer") == [(2.5, 3)]
    assert done.spans("p0", "prefill") == [(3, 4)]
    assert done.spans("d0", "transfer") == [(4, 4.25)]
    assert done.times_s == {"r0": (4, 4.45)}


def test_a_node_that_does_everything_moves_nothing() -> None:
    done = simulate("hydrainfer", section("epd"), [pictures(), text(at_s=10)])
    assert done.times_s == {"r0": (3, 3.2), "r1": (11, 11.2)}
    assert not done.spans("epd0", "transfer")


def test_text_begins_at_a_node_that_prefills() -> None:
    done = simulate("hydrainfer", section("ed", "p"), [text()])
    assert done.times_s == {"r0": (1, 1.45)}  # a pull, then two steps at ed0


def test_an_answer_of_one_token_ends_where_it_is_prefilled() -> None:
    done = simulate("hydrainfer", section("p", "ed"), [text(num_tokens=1)])
    assert done.times_s == {"r0": (1, 1)}
    assert not done.spans("ed0", "transfer")


def test_its_first_token_may_be_decodes() -> None:
    for kinds, times_s in ((("e", "p", "d"), (1.35, 1.55)), (("epd",), (1, 1.2))):
        done = simulate("hydrainfer", section(*kinds, first_token_at="decode"), [text()])
        assert done.times_s == {"r0": times_s}


def test_nodes_take_turns_at_every_hop() -> None:
    done = simulate("hydrainfer", section("e2", "p2", "d2"), [pictures(at_s=0)] * 4)
    for node, kind in (("e0.encode", "encode"), ("e1.encode", "encode")):
        assert done.spans(node, kind) == [(0, 3)]  # two requests in one forward
    # e0 and e1 each count for themselves: p0 gets the first of both.
    assert len(done.spans("p0", "transfer")) == len(done.spans("p1", "transfer")) == 2


def test_encode_and_decode_slow_each_other_down_and_the_step_ends_with_both() -> None:
    """r0 is prefilled until 1.0 and decoded at 1.1. Then r1, which came at 1.05, is encoded beside
    the next decode step, both at half speed: the decode takes 0.2 s, the encode 0.1 s longer than
    alone. The step after that has r1's prompt and r0's token.
    """
    requests = [text(num_tokens=11), pictures(at_s=1.05)]
    done = simulate("hydrainfer", section("epd"), requests)
    assert done.spans("epd0.encode", "encode") == [(1.1, 3.2)]
    assert done.spans("epd0", "decode")[:2] == [(1, 1.1), (1.1, 1.3)]
    assert done.spans("epd0", "mixed") == [(3.2, 4.3)]
    assert done.times_s == {"r0": (1, 5), "r1": (4.3, 4.5)}


def test_who_has_less_of_the_device_is_slowed_down_more() -> None:
    streams = Streams(LinearCosts(), encode_share=0.25)
    device = streams.device("encoder")
    assert streams.encode([PICTURE]) == LinearCosts().encode([PICTURE])
    assert streams.decode_step(1, 100) == LinearCosts().decode_step(1, 100)
    assert device._speeds({"encoder": 1.0}) == {"encoder": 1.0}
    both = device._speeds({"encoder": 1.0, "engine": 1.0})
    assert both == {"encoder": pytest.approx(0.25), "engine": pytest.approx(0.75)}
    assert streams.embedding_transfer(1) == streams.kv_transfer(1) == 0


@pytest.mark.parametrize(
    ("budget", "encodes"), [(1, [(0, 2), (2, 4), (4, 6)]), (2, [(0, 3), (3, 5)]), (8, [(0, 4)])]
)
def test_a_step_encodes_items_up_to_its_budget(
    budget: int, encodes: list[tuple[float, float]]
) -> None:
    over = section("e", "p", "d", image_budget=budget)
    done = simulate("hydrainfer", over, [pictures()] * 3)
    assert done.spans("e0.encode", "encode") == encodes


def test_a_request_of_more_items_than_the_budget_is_encoded_alone() -> None:
    over = section("e", "p", "d", image_budget=2)
    done = simulate("hydrainfer", over, [pictures(3), pictures()])
    assert done.spans("e0.encode", "encode") == [(0, 4), (4, 6)]


def test_a_step_prefills_tokens_up_to_its_budget() -> None:
    done = simulate("hydrainfer", section("e", "p", "d", token_budget=400), [text()])
    assert done.spans("p0", "prefill") == [(0, 0.4), (0.4, 0.8), (0.8, 1.0)]


@pytest.mark.parametrize(("slo_s", "budget"), [(4.5, 3), (4.01, 2), (1.5, 1), (100, 8)])
def test_the_image_budget_is_the_largest_below_the_objective(slo_s: float, budget: int) -> None:
    """So many items take a second more than their number; it has to be 10 ms less."""
    config = HydraInferSystem.model_validate(section("epd"))
    assert image_budget(ByHand(), slo_s, config, world([pictures(3)])) == budget
    assert image_budget(ByHand(), slo_s, config, world([text()])) == 8


@pytest.mark.parametrize(("slo_s", "budget"), [(0.4, 399), (0.02, 15), (0.001, 15), (100, 2048)])
def test_the_token_budget_is_the_largest_below_the_objective(slo_s: float, budget: int) -> None:
    """Prompts of 16 tokens, 1 ms a token; less than a prompt is nothing."""
    config = HydraInferSystem.model_validate(section("epd"))
    assert token_budget(ByHand(), slo_s, config) == (budget if slo_s > 0.01 else 1)


def test_nodes_that_decode_have_another_objective() -> None:
    over = {"tpot_slo_s": 0.4, "prefill_tpot_slo_s": 1.0}
    system = simulate("hydrainfer", section("ed", "p", **over), [text()]).system
    assert isinstance(system, HydraInfer)
    budgets = {node.name: node.llm.limits.token_budget for node in system.nodes if node.llm}
    assert budgets == {"p0": 991, "ed0": 399}


# What a node admits ---------------------------------------------------------------------------


def node(*, is_decoder: bool = True, **over: Any) -> Node:
    return Node("d0", 2, 8, None, None, Gate(), is_decoder, **over)


def test_a_node_admits_less_while_others_have_to_pull_from_it() -> None:
    jobs = deque(Job(f"r{each}", Stage.ENCODE) for each in range(3))
    assert [job.name for job in node(waiting=jobs, num_migrating=1).admit()] == ["r0"]
    assert not list(node(waiting=jobs, num_migrating=2).admit())
    assert [job.name for job in node(waiting=jobs).admit()] == ["r1", "r2"]


def test_what_is_to_be_pulled_is_admitted_beyond_the_limit() -> None:
    source = node()
    jobs = deque(Job(f"r{each}", Stage.DECODE, source) for each in range(9))
    full = node(waiting=jobs, num_running=2)
    assert len(list(full.admit())) == 2
    assert full.num_running == 4
    assert not list(full.admit())


@pytest.mark.parametrize(("is_decoder", "names"), [(True, ["r0", "r3"]), (False, ["r0", "r1"])])
def test_where_requests_end_they_have_room_before_those_that_move_on(
    is_decoder: bool, names: list[str]
) -> None:
    source = node()
    stages = (Stage.PREFILL, Stage.PREFILL, Stage.PREFILL, Stage.DECODE, Stage.DECODE)
    jobs = deque(Job(f"r{number}", stage, source) for number, stage in enumerate(stages))
    full = node(is_decoder=is_decoder, waiting=jobs, num_running=1, num_migrating=1)
    assert [job.name for job in full.admit()] == names
    assert len(full.waiting) == 3


@pytest.mark.parametrize("max_running", [1, 2, 3, 24])
@pytest.mark.parametrize(
    "kinds",
    [("e2", "pd3"), ("e", "p", "pd2"), ("epd3",), ("epd2", "e2"), ("ed2", "ep2"), ("ed", "pd2")],
)
def test_full_nodes_do_not_wait_for_each_other(kinds: tuple[str, ...], max_running: int) -> None:
    """``simulate`` has looked at what has ended."""
    over = section(*kinds, max_running=max_running)
    requests = [pictures(num_tokens=3), text(num_tokens=9)] * 20
    for kv_tokens in (1024 * 5, 1 << 20):
        done = simulate("hydrainfer", over, requests, kv_tokens=kv_tokens)
        assert {record.outcome for record in done.run.records} == {"completed"}


def test_the_last_to_be_pulled_is_admitted_first() -> None:
    system = build(HydraInferSystem.model_validate(section("e", "p", "d")), world([]))
    _, source, target = system.nodes
    jobs = [
        Job("r0", Stage.ENCODE),
        Job("r1", Stage.DECODE, source),
        Job("r2", Stage.DECODE, source),
    ]
    for job in jobs:
        system.enqueue(target, job, 0)
    assert [job.name for job in target.waiting] == ["r2", "r1", "r0"]


def test_encoders_alone_have_their_own_limit() -> None:
    over = section("e", "p", "d", encode_max_running=2, image_budget=1)
    done = simulate("hydrainfer", over, [pictures(num_tokens=1)] * 4)
    system = done.system
    assert isinstance(system, HydraInfer)
    assert [each.max_running for each in system.nodes] == [2, 24, 24]


def test_nodes_with_a_shared_cache_admit_what_it_holds() -> None:
    """Blocks that wait to be pulled and blocks for what is pulled are the same blocks."""
    requests = [text(num_prompt=1000, num_tokens=100) for _ in range(40)]
    done = simulate("hydrainfer", section("epd2"), requests, kv_tokens=8000)
    system = done.system
    assert isinstance(system, HydraInfer)
    assert [node.max_running for node in system.nodes] == [2, 2]  # 320 blocks, 69 a request
    assert done.run.num_preempted == 0


def test_a_node_whose_cache_holds_one_request_keeps_it() -> None:
    requests = [text(num_prompt=1000, num_tokens=100) for _ in range(10)]
    done = simulate("hydrainfer", section("epd2"), requests, kv_tokens=2000)
    assert not done.spans("epd0", "transfer") + done.spans("epd1", "transfer")
    assert {record.outcome for record in done.run.records} == {"completed"}


@pytest.mark.parametrize("kinds", [("e", "p", "d"), ("epd",), ("ed", "p"), ("ep", "d")])
def test_a_request_that_no_cache_can_hold_fails(kinds: tuple[str, ...]) -> None:
    requests = [pictures(num_prompt=2000), text(num_prompt=2000), text(num_prompt=100)]
    done = simulate("hydrainfer", section(*kinds), requests, kv_tokens=1000)
    outcomes = dict(zip(done.run.ids, (each.outcome for each in done.run.records), strict=True))
    assert outcomes == {"r0": "failed", "r1": "failed", "r2": "completed"}


def test_a_cache_of_decode_that_is_too_small_fails_what_prefill_has_done() -> None:
    """d0 has 0.9 of what weights leave, and p0 0.8 of that, as it holds embeddings too."""
    requests = [text(num_prompt=790, num_tokens=300), text(num_prompt=790, num_tokens=3)]
    done = simulate("hydrainfer", section("e", "p", "d"), requests, kv_tokens=1120)
    outcomes = dict(zip(done.run.ids, (each.outcome for each in done.run.records), strict=True))
    assert outcomes == {"r0": "failed", "r1": "completed"}
