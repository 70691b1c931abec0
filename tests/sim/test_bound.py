from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from easerve.costs.base import Costs, Forward, Media
from easerve.sim.bound import SLACK, bound_per_s, sizes
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
        kv_tokens=lambda tp, utilization, with_encoder, with_activations=True: kv_tokens,
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
    assert bound_per_s(config, world()) == pytest.approx(SLACK * expected)


def test_a_small_kv_cache_bounds_decode() -> None:
    config = section(
        "easerve", **EASERVE | {"prefill": {"replicas": 99}, "encode": {"replicas": 99}}
    )
    # Of 1005 tokens on average two sequences fit; ten steps of 0.2 s for each two.
    assert bound_per_s(config, world(kv_tokens=2010)) == pytest.approx(SLACK * 3 * 2 / 2.0)


def test_prefill_and_decode_in_one_engine_add_up() -> None:
    together = EASERVE | {"prefill": None, "decode": {"max_num_batched_tokens": 1010}}
    seconds = 1.0 + 10 * 0.2 / 256
    assert bound_per_s(section("vllm-epd", **together), world()) == pytest.approx(SLACK / seconds)
    slow = section(
        "vllm-epd", **together | {"decode": {"replicas": 9}, "encode": {"dispatch_s": 9}}
    )
    assert bound_per_s(slow, world()) == pytest.approx(SLACK / (9 / 10 + 0.41))


def test_whole_engines_add_their_stages_up() -> None:
    config = section("vllm", replicas=1, max_num_batched_tokens=1010)
    # A step of decodes costs the same whatever their number, 256 at most; ten pictures of 100
    # tokens go together.
    assert bound_per_s(config, world()) == pytest.approx(SLACK / (0.41 + 1.0 + 10 * 0.2 / 256))


class Crowded(Linear):
    """A step of decodes beside prompts takes a second more."""

    def forward(self, step: Forward, share: float = 1.0) -> float:
        return super().forward(step) + (1.0 if step.prefill_tokens and step.num_decodes else 0.0)


def test_whole_engines_may_keep_prompts_and_decodes_apart() -> None:
    apart = replace(world(), costs_of=lambda tp, step_overhead_s=None: Crowded())
    config = section("vllm", replicas=1, max_num_seqs=1, max_num_batched_tokens=1010)
    assert bound_per_s(config, apart) == pytest.approx(SLACK / (0.41 + 1.0 + 10 * 0.2))


def test_all_small_sizes_are_looked_at_and_the_last_ones() -> None:
    assert sizes(40, 64) == [*range(1, 41)]
    assert sizes(7.2, 2) == [1, 2, 3, 4, 6, 7, 8]
    many = sizes(5000, 64)
    assert {4999, 5000, *(1 << power for power in range(13))} <= {*many}
    assert len(many) < 500
    assert sizes(0.3, 8) == [1]


def test_without_requests_there_is_no_bound() -> None:
    empty = world()
    nothing = World(empty.costs_of, empty.kv_tokens, 1, 1, (), empty.run, empty.rng, empty.machine)
    assert bound_per_s(section("easerve", **EASERVE), nothing) == float("inf")


def test_answers_of_one_token_take_no_decode() -> None:
    config = section("easerve", **EASERVE | {"decode": {"max_num_seqs": 1}})
    assert bound_per_s(config, world(num_tokens=1)) == pytest.approx(SLACK)


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


BEYOND = [
    ("vllm", ["workload.output_tokens=500", "systems.vllm.max_num_seqs=1"]),
    ("vllm", ["workload.output_tokens=500", "systems.vllm.max_num_seqs=4"]),
    (
        "dynamo",
        [
            "workload.text_tokens=6000",
            "workload.output_tokens=1",
            "systems.dynamo.prefill.max_num_batched_tokens=512",
        ],
    ),
    (
        "epdserve",
        [
            "workload.text_tokens=17",
            "workload.output_tokens=500",
            "systems.epdserve.decode.max_batch=1",
        ],
    ),
]


def share_of_bound(system: str, over: Sequence[str]) -> float:
    """Of a run in which all requests come at once."""
    at_once = ["workload.rate_per_s=1000", *over]
    scenario = read(SCENARIOS / "llava-34b-rtx6000ada.yaml", over=at_once)
    run = simulate(scenario, system)
    assert all(record.outcome == "completed" for record in run.records)
    bound = bound_per_s(scenario.configs[system], make_world(scenario, Run()))
    return len(run.records) / run.end_s / bound


@pytest.mark.long
@pytest.mark.parametrize(("system", "over"), BEYOND)
def test_runs_that_come_near_it_are_not_beyond_it(system: str, over: Sequence[str]) -> None:
    assert 0.85 < share_of_bound(system, ["workload.num_requests=100", *over]) <= 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_no_run_is_beyond_it_whatever_it_is_of(seed: int) -> None:
    rng = Random(seed)
    system = rng.choice(["vllm", "vllm", "dynamo", "vllm-epd", "epdserve"])
    budget = rng.choice([64, 512, 2048, 8192])
    seqs = rng.choice([1, 2, 4, 8, 256])
    over = {
        "workload.seed": rng.randint(1, 9),
        "workload.num_requests": rng.choice([30, 100, 200]),
        "workload.output_tokens": rng.choice([1, 2, [1, 3], 16, 17, [1, 300], 500]),
        "workload.text_tokens": rng.choice([1, 15, 17, [1, 3000], 1024, 6000]),
        "workload.items": rng.choice(["[{}]", "[{}, {image: 256x256}]", "[{image: 1280x720}]"]),
        "systems.vllm.max_num_batched_tokens": budget,
        "systems.vllm.max_num_seqs": seqs,
        "systems.dynamo.prefill.max_num_batched_tokens": budget,
        "systems.dynamo.decode.max_num_seqs": seqs,
        "systems.epdserve.decode.max_batch": seqs,
        "systems.vllm.kv_cache_tokens": rng.choice(["null", 16000, 24000]),
    }
    assert share_of_bound(system, [f"{key}={value}" for key, value in over.items()]) <= 1
