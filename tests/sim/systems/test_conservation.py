"""What holds for every system and any load: requests end once, blocks come back, seeds repeat."""

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from easerve.costs.base import Media
from easerve.goodput import Record
from easerve.sim.bound import bound_per_s
from easerve.sim.config import SECTIONS
from easerve.sim.run import Request
from easerve.types import Modality

from .simulated import simulate, world

pytestmark = pytest.mark.long

TWO = {"replicas": 2}
STAGES: Mapping[str, Any] = {"encode": TWO, "prefill": TWO, "decode": TWO}
SYSTEMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "vllm": ("vllm", {"replicas": 2}),
    "vllm behind a proxy": ("vllm", {"replicas": 2, "routing": "round-robin"}),
    "vllm-epd": ("vllm-epd", STAGES),
    "vllm-epd, prefill with decode": ("vllm-epd", {**STAGES, "prefill": None}),
    "dynamo": ("dynamo", STAGES),
    "dynamo, prefill's token": ("dynamo", {**STAGES, "first_token_at": "prefill"}),
    "epdserve": ("epdserve", STAGES),
    "epdserve, roles": ("epdserve", {**STAGES, "role_switch": {}, "encode": {"replicas": 3}}),
    "epdserve, whole": ("epdserve", {**STAGES, "irp": False, "prefill": {"max_batch": 3}}),
    "hydrainfer": ("hydrainfer", {"e": {}, "p": TWO, "d": TWO}),
    "hydrainfer, ed": ("hydrainfer", {"ed": TWO, "p": TWO, "max_running": 3}),
    "hydrainfer, ep": ("hydrainfer", {"ep": TWO, "d": TWO, "max_running": 2}),
    "hydrainfer, epd": ("hydrainfer", {"epd": {"replicas": 3}}),
    "hydrainfer, pd": ("hydrainfer", {"e": TWO, "pd": TWO, "p": {}, "max_running": 4}),
}


def load(seed: int, num: int = 60) -> list[Request]:
    """In bursts, some at the same instant; up to three items of many sizes, or none."""
    rng = Random(seed)
    at_s, requests = 0.0, list[Request]()
    for _ in range(num):
        at_s += rng.choice((0, 0, 0.5, 2, 10))
        items = tuple(
            Media(Modality.IMAGE, rng.randint(1, 300)) for _ in range(rng.choice((0, 1, 1, 3)))
        )
        tokens = rng.choice((1, 2, 20, 100))
        requests.append(Request(at_s, items, rng.randint(1, 1500), tokens))
    return requests


def check(name: str, seed: int, kv_tokens: int) -> None:
    """``simulate`` has looked at the number of records and at the engines' blocks.

    HydraInfer's nodes have as little as 0.64 of what weights leave.
    """
    system, section = SYSTEMS[name]
    if system == "hydrainfer":
        kv_tokens = kv_tokens * 5 // 4
    done = simulate(system, section, load(seed), kv_tokens=kv_tokens)
    assert {record.outcome for record in done.run.records} == {"completed"}
    assert all(record.first_token_s is not None for record in done.run.records)
    assert done.run.num_items == sum(len(request.items) for request in load(seed))


@pytest.mark.parametrize("kv_tokens", [3200, 1 << 20])
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_request_ends_once_and_every_block_comes_back(name: str, kv_tokens: int) -> None:
    check(name, 0, kv_tokens)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("name", SYSTEMS)
def test_so_they_do_under_any_load(name: str, seed: int) -> None:
    for kv_tokens in (3200, 4000, 8000, 1 << 20):
        check(name, seed, kv_tokens)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_seed_repeats(name: str) -> None:
    system, section = SYSTEMS[name]

    def records() -> list[Record]:
        return simulate(system, section, load(1), kv_tokens=8000, seed=3).run.records

    assert records() == records()


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_run_exceeds_what_the_engines_can_do(name: str) -> None:
    system, section = SYSTEMS[name]
    requests = [Request(0.0, request.items, 200, 20) for request in load(2, num=100)]
    done = simulate(system, section, requests)
    bound = bound_per_s(SECTIONS[system].model_validate(section), world(requests))
    assert len(requests) / done.run.end_s <= bound * 1.001


@pytest.mark.parametrize("name", SYSTEMS)
def test_nothing_to_do_takes_no_time(name: str) -> None:
    system, section = SYSTEMS[name]
    assert simulate(system, section, []).run.end_s == 0
