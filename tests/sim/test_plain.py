"""The core in virtual time: what a modelled engine takes, and what the policies make of it."""

import random
from dataclasses import replace
from statistics import fmean

import pytest

from easerve.cli.bench.flow import Plan, modelled
from easerve.config import Policy
from easerve.costs.linear import LinearCosts
from easerve.goodput import Record
from easerve.policy.admission import Admission
from easerve.policy.core import Core, Limits
from easerve.serve.admin import knobs_of
from easerve.sim import plain
from easerve.sim.oracle import best_mean_ttft_s
from easerve.sim.run import Request, Run
from easerve.types import NS_PER_S, WorkerId
from easerve.workload.arrivals import Arrivals

COSTS = LinearCosts(
    encode_base_s=0.1,
    encode_token_s=0.001,
    prefill_base_s=0.2,
    prefill_token_s=0.0,
    decode_token_s=0.01,
    decode_crowding=1.0,
)
WORKERS = ("e0", "p0", "d0")


def run(
    policy: Policy,
    requests: list[Request],
    costs: LinearCosts = COSTS,
    workers: tuple[str, ...] = WORKERS,
    num_slots: int = 256,
) -> Run:
    knobs = replace(knobs_of(policy), max_queue_s=1e9)
    limits = Limits(request_timeout_ns=10**6 * NS_PER_S)
    core = Core(knobs, Admission(10**9, 10**9), costs, limits)
    found = plain.simulate(core, costs, workers, requests, num_slots)
    assert core.num_open == 0
    assert len(found.records) == len(requests)
    return found


def picture(at_s: float, num_tokens: int = 1) -> Request:
    return plain.request(at_s, [20], 10, num_tokens)


def times(record: Record) -> tuple[float | None, float | None]:
    return record.ttft_s, record.tpot_s


def test_a_request_takes_what_its_stages_take() -> None:
    (record,) = run(Policy(), [picture(1.0, num_tokens=3)]).records
    ttft_s, tpot_s = times(record)
    assert ttft_s == pytest.approx(0.12 + 0.2 + 0.01)
    assert tpot_s == pytest.approx(0.01)


def test_the_only_token_is_prefills() -> None:
    (record,) = run(Policy(), [picture(0.0)]).records
    ttft_s, tpot_s = times(record)
    assert ttft_s == pytest.approx(0.32)
    assert tpot_s is None


def test_a_text_skips_encode() -> None:
    (record,) = run(Policy(), [plain.request(0.5, [], 10, 1)]).records
    assert record.ttft_s == pytest.approx(0.2)


def test_an_engine_takes_one_after_the_other() -> None:
    found = run(Policy(when="none"), [picture(0.0), picture(0.0)])
    assert [record.ttft_s for record in found.records] == pytest.approx([0.32, 0.52])
    assert found.busy_s == {WorkerId("e0"): 0.24, WorkerId("p0"): 0.4, WorkerId("d0"): 0.0}
    assert found.mean_batch == 1


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_the_prefills_is_remote(share: float) -> None:
    requests = [picture(float(number)) for number in range(20)]
    found = run(Policy(remote_share=share), requests, workers=("e0", "l0", "p0", "d0"))
    num_remote = round(20 * share)
    assert found.busy_s[WorkerId("p0")] == pytest.approx(0.2 * num_remote)
    assert found.busy_s[WorkerId("l0")] == pytest.approx(0.2 * (20 - num_remote))
    assert [record.ttft_s for record in found.records] == pytest.approx([0.32] * 20)


def test_a_batch_is_one_call() -> None:
    found = run(Policy(when="fixed", timeout_s=0.05), [picture(0.0), picture(0.02)])
    assert found.mean_batch == 2
    assert found.busy_s[WorkerId("e0")] == pytest.approx(0.14)
    assert found.records[0].ttft_s == pytest.approx(0.05 + 0.14 + 0.2)


def test_a_step_of_decode_is_longer_the_more_it_serves() -> None:
    found = run(Policy(), [plain.request(0.0, [], 1, 50), plain.request(0.0, [], 1, 50)])
    tpots_s = [record.tpot_s for record in found.records]
    assert all(tpot_s is not None and 0.01 < tpot_s < 0.02 for tpot_s in tpots_s)


def test_who_finds_no_slot_waits_for_one() -> None:
    texts = [plain.request(0.0, [], 1, 50), plain.request(0.0, [], 1, 50)]
    found = run(Policy(), texts, num_slots=1)
    assert [record.tpot_s for record in found.records] == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize("when", ["none", "greedy", "fixed", "fill", "gap", "slack"])
def test_no_rule_loses_a_request_and_the_same_run_has_the_same_end(when: str) -> None:
    rng = random.Random(3)
    requests = [picture(at_s, 2) for at_s in Arrivals("gamma", 8.0, 2.0).times(120, rng)]
    policy = Policy.model_validate({"when": when})
    first, second = run(policy, requests), run(policy, requests)
    assert {record.outcome for record in first.records} == {"completed"}
    assert first.records == second.records
    assert first.batches == second.batches


# What batching is worth ---------------------------------------------------------------------------


def best(arrivals_s: list[float], num_prefills: int = 1) -> float:
    return best_mean_ttft_s(arrivals_s, 0.1, 0.02, 4, 0.2, num_prefills)


def test_the_optimum_of_one_is_its_service_time() -> None:
    assert best([3.0]) == pytest.approx(0.32)


def test_the_optimum_shares_a_call_where_the_second_would_wait_for_its_own() -> None:
    alone, together = (0.32 + 0.44) / 2, 0.34
    assert best([0.0, 0.0], num_prefills=2) == pytest.approx(min(alone, together))


def test_the_optimum_makes_two_calls_where_the_second_would_wait_for_prefill() -> None:
    alone, together = (0.32 + 0.52) / 2, (0.34 + 0.54) / 2
    assert best([0.0, 0.0], num_prefills=1) == pytest.approx(min(alone, together))


@pytest.mark.parametrize("when", ["none", "greedy", "fixed", "fill", "gap", "slack"])
def test_no_rule_is_better_than_the_optimum(when: str) -> None:
    policy = Policy.model_validate({"when": when, "max_batch_items": 4, "flow": False})
    policy = policy.model_copy(update={"run_ahead": 0})
    ratios = []
    for seed in range(40):
        arrivals_s = Arrivals("poisson", 4.0).times(7, random.Random(seed))
        found = run(policy, [picture(at_s) for at_s in arrivals_s])
        mean_s = fmean(record.ttft_s for record in found.records if record.ttft_s is not None)
        ratios.append(mean_s / best(arrivals_s))
    assert min(ratios) > 1 - 1e-9
    if when == "slack":
        assert fmean(ratios) < 1.1


def test_a_fast_encode_floods_decode_and_credits_keep_the_promise() -> None:
    plan = Plan(Policy(), 200, 80.0, 48, promise=3.0, num_rounds=1, seed=0)
    result = modelled(plan)
    alone, passed, flooded, held = (row["tpot_s"] for row in result["systems"].values())
    assert alone["mean"] == pytest.approx(result["tpot_alone_s"])
    assert flooded["mean"] > 3 * passed["mean"]
    assert held["p99"] < 1.05 * result["tpot_promise_s"]
    assert held["mean"] < passed["mean"]
    assert {row["not_completed"] for row in result["systems"].values()} == {0}
