from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from easerve.costs.base import Costs, Forward, Media
from easerve.sim.bound import bound_per_s
from easerve.sim.config import SECTIONS, SystemConfig
from easerve.sim.run import Request, Run
from easerve.sim.scenario import read
from easerve.sim.simulate import make_world, simulate
from easerve.sim.world import World
from easerve.types import Modality

from .scenarios import SCENARIOS, write

PICTURE = Media(Modality.IMAGE, 100)
EASERVE = {"encode": {"replicas": 2, "dispatch_s": 0}, "prefill": {}, "decode": {"replicas": 3}}


class Linear(Costs):
    """0.1 s a call and 0.4 s an item; 1 ms a prompt token and 0.2 s a step of decodes."""

    def encode(self, items: Sequence[Media], share: float = 1.0) -> float:
        return 0.1 + 0.4 * len(items)

    def forward(self, step: Forward, share: float = 1.0) -> float:
        return 0.001 * step.prefill_tokens + (0.2 if step.num_decodes else 0.0)

    def embedding_transfer(self, num_tokens: int) -> float:
        return 0.0

    def kv_transfer(self, num_tokens: int) -> float:
        return 0.0


def world(num_text_tokens: int = 900, num_tokens: int = 11, kv_tokens: int = 1 << 20) -> World:
    """Ten requests with a picture each."""
    requests = [Request(0.0, (PICTURE,), num_text_tokens, num_tokens)] * 10
    return World(
        costs_of=lambda tp, step_overhead_s=None: Linear(),
        kv_tokens=lambda tp, utilization, with_encoder: kv_tokens,
        num_units=1,
        granule=1,
        requests=requests,
        run=Run(),
        rng=Random(0),
    )


def section(system: str, **content: Any) -> SystemConfig:
    return SECTIONS[system].model_validate(content)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # One prefill engine does 1 prompt of 1000 tokens a second; encode in fives 2 / 0.42.
        (section("easerve", **EASERVE, policy={"max_batch_items": 5}), 1.0),
        (section("easerve", **EASERVE | {"prefill": {"replicas": 9}}), 2 / 0.41),
        (
            section(
                "easerve",
                **EASERVE | {"prefill": {"replicas": 9}},
                policy={"max_batch_items": 1},
            ),
            2 / 0.5,
        ),
        (
            section(
                "easerve",
                **EASERVE,
                local_prefill={"tensor_parallel_size": 1},
                policy={"remote_share": 0.5},
            ),
            3.0,
        ),
        # Ten steps of 0.2 s for two at a time.
        (section("easerve", **EASERVE | {"decode": {"max_num_seqs": 1}}), 0.5),
        (section("dynamo", **EASERVE | {"prefill": {"replicas": 9}}), 2 / 0.5),
        (section("vllm-epd", **EASERVE | {"prefill": {"replicas": 9}}), 2 / 0.41),
        (
            section(
                "epdserve",
                encode={"replicas": 2},
                prefill={"replicas": 9},
                decode={"max_batch": 2},
                dispatch_s=0,
                role_switch=None,
            ),
            1.0,
        ),
        # 0.5 + 1 + 1 s of any engine.
        (
            section(
                "epdserve",
                encode={"replicas": 8},
                prefill={},
                decode={"max_batch": 2},
                dispatch_s=0,
                role_switch={},
            ),
            10 / 2.5,
        ),
        (section("hydrainfer", ed={"replicas": 2}, p={"replicas": 3}), 3.0),
    ],
)
def test_a_stage_bounds_what_its_engines_can_do(config: SystemConfig, expected: float) -> None:
    assert bound_per_s(config, world()) == pytest.approx(expected)


def test_a_small_kv_cache_bounds_decode() -> None:
    config = section(
        "easerve", **EASERVE | {"prefill": {"replicas": 99}, "encode": {"replicas": 99}}
    )
    # Of 1005 tokens on average two sequences fit.
    assert bound_per_s(config, world(kv_tokens=2010)) == pytest.approx(3 * 2 / (10 * 0.2))


def test_whole_engines_add_their_stages_up() -> None:
    config = section("vllm", replicas=1, max_num_batched_tokens=1010)
    # In a step one prompt and ten decodes; ten pictures of 100 tokens go together.
    assert bound_per_s(config, world()) == pytest.approx(1 / (0.41 + 1.0 + 0.2))


def test_without_requests_there_is_no_bound() -> None:
    empty = world()
    nothing = World(empty.costs_of, empty.kv_tokens, 1, 1, (), empty.run, empty.rng, empty.machine)
    assert bound_per_s(section("easerve", **EASERVE), nothing) == float("inf")


def test_answers_of_one_token_take_no_decode() -> None:
    config = section("easerve", **EASERVE | {"decode": {"max_num_seqs": 1}})
    assert bound_per_s(config, world(num_tokens=1)) == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_no_run_of_ours_is_beyond_it(tmp_path: Path, share: float) -> None:
    over = {"easerve": {"policy": {"remote_share": share, "max_queue_s": 1e9}}}
    load = {"rate_per_s": 100, "num_requests": 150}
    scenario = read(write(tmp_path / "scenario.yaml", systems=over, workload=load))
    run = simulate(scenario, "easerve")
    throughput = sum(record.outcome == "completed" for record in run.records) / run.end_s
    bound = bound_per_s(scenario.configs["easerve"], make_world(scenario, Run()))
    assert 0.2 * bound < throughput < bound


PAPER = [
    "llava-34b-rtx6000ada",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("qwen2.5-vl-32b-rtx6000ada", "ultravox-27b-rtx6000ada", "ultravox-27b-a100")
    ),
]


@pytest.mark.parametrize("system", SECTIONS)
@pytest.mark.parametrize("name", PAPER)
def test_no_run_of_any_system_is_beyond_it(name: str, system: str) -> None:
    over = ["workload.num_requests=100", "workload.rate_per_s=100"]
    scenario = read(SCENARIOS / f"{name}.yaml", over=over)
    run = simulate(scenario, system)
    assert sum(record.outcome == "completed" for record in run.records) == 100
    bound = bound_per_s(scenario.configs[system], make_world(scenario, Run()))
    assert 0.15 * bound < 100 / run.end_s < bound
