"""``easerve profile``: what is asked wrongly, the sweep on a stand-in, what comes of the times."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from easerve.bench.report import html
from easerve.cli import profile, profile_here, profile_shown
from easerve.cli.profile_engines import EnginesBench, Item
from easerve.cli.profile_sweep import NUM_WARM_UPS, Plan, Sample, levels, sweep
from easerve.config import ConfigError, Deployment
from easerve.costs.base import Media
from easerve.costs.profile import Capacity, Key, Peak, Profile, Runs, read, write
from easerve.costs.profiled import costs_of, host_of
from easerve.costs.roofline import encoder
from easerve.engines.partition.facts import Facts, Gpu
from easerve.engines.protocol import (
    Division,
    Driven,
    EncodeCall,
    Encoded,
    Engine,
    EngineError,
    Prefilled,
    Prompt,
)
from easerve.policy.partition import ALL, Demand
from easerve.types import Modality

from ..costs import stages
from .conftest import Easerve

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/tiny-llava.yaml"
TINY = json.loads((ROOT / "models/tiny-llava/config.json").read_text())
FACTS = Facts(cpu="A CPU", cores=(0, 1, 2, 3), features=(), environment={}, shm=True, uid=0)
GPU = Gpu("NVIDIA H200", "GPU-1", (9, 0), 132, 8)
KEY = Key(device="A CPU", units=4, torch="2", vllm="0", model="tiny", dtype="float32")


# Asked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batches", "1,x"), "--batches: '1,x' is not a list of numbers"),
        (("--parts", "surfaces"), "--parts: 'surfaces' is none of surface, stages"),
        (("--parts", "stages", "--out", "/no/such"), "tiny-llava.yaml: No such file"),
        (("--units", "0"), "--units: 0 is not from 1"),
        (("--runs", "19"), "Invalid value for '--runs'"),
        (("--size", "336"), "--size: '336' is not e.g. 336x336"),
        (("--size", "336x99999"), "--size: '336x99999' is not"),
        (("--out", EXAMPLE), "tiny-llava.yaml is not a folder"),
        (("--html", "/no/such.html"), "such.html: No such file"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    easerve: Easerve, options: tuple[str, ...], message: str
) -> None:
    ended = easerve("profile", EXAMPLE, *options)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err


def test_a_deployment_gets_what_the_profile_needs(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("model: a/b\ndevice: cuda\nencode: {gpu_memory_utilization: 0.5}\n")
    made = profile.read(path)
    assert made.local_prefill is not None
    assert made.partition is not None
    assert "gpu_memory_utilization" not in made.encode.model_fields_set


def test_what_a_deployment_says_of_it_stays(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(
        "model: a/b\nlocal_prefill: {max_num_seqs: 7}\n"
        "partition: {min_prefill_units: 2, profile: not/there.yaml}\n"
    )
    made = profile.read(path)
    assert made.local_prefill is not None
    assert made.local_prefill.max_num_seqs == 7
    assert made.partition is not None
    assert (made.partition.min_prefill_units, made.partition.profile) == (2, None)


# Here -------------------------------------------------------------------------------------------


def test_a_cpu_is_known_by_its_name_and_cores(model: Path) -> None:
    made = profile_here.here(Deployment(model=str(model)), FACTS)
    assert (made.device, made.units, made.driver) == ("A CPU", 4, None)
    assert (made.model, made.dtype) == ("model", "float16")
    cores = Deployment.model_validate({"model": str(model), "encode": {"cores": [[0, 3]]}})
    assert profile_here.here(cores, FACTS).units == 2


def test_a_gpu_is_known_by_what_its_driver_says() -> None:
    facts = replace(FACTS, cuda=13000, driver="580.1", gpus=(GPU,))
    made = profile_here.here(Deployment(model="a/b", device="cuda"), facts)
    assert (made.device, made.units, made.driver) == ("NVIDIA H200", 132, "580.1")
    assert profile_here.path_of(made, "SM") == Path("nvidia-h200-132-sms/b.yaml")
    with pytest.raises(ConfigError, match="no GPU"):
        profile_here.here(Deployment(model="a/b", device="cuda"), FACTS)


@pytest.mark.parametrize(
    ("asked", "config", "expected"),
    [
        ("half", {}, "float16"),
        ("float32", {"dtype": "bfloat16"}, "float32"),
        ("auto", {"torch_dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ("auto", {"dtype": "float32"}, "float16"),
    ],
)
def test_the_type_of_values_is_the_one_that_vllm_takes(
    tmp_path: Path, asked: str, config: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    deployment = Deployment.model_validate({"model": str(tmp_path), "engine": {"dtype": asked}})
    assert profile_here.dtype(deployment) == expected


# Sweep ------------------------------------------------------------------------------------------


@dataclass
class StandIn:
    """A device on which a forward takes ``batch / units`` ms; twice that beside prefill."""

    total: int = 4
    busy: bool = False
    calls: list[tuple[int, int, bool]] = field(default_factory=list)

    async def encode(self, units: int, batch: int) -> Sample:
        self.calls.append((units, batch, self.busy))
        seconds = batch / units / 1e3 * (1 + self.busy)
        return Sample(seconds, 2 * seconds, late=self.busy)

    @asynccontextmanager
    async def prefilling(self) -> AsyncIterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy = False


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((), []),
        ((1,), [1]),
        ((8, 24, 40, 72), [8, 24, 40, 72]),
        (range(8, 129, 8), [8 * number for number in range(1, 17)]),
        (range(1, 64), [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 63]),
    ],
)
def test_levels_are_parts_that_there_are_up_to_the_largest(
    parts: Sequence[int], expected: list[int]
) -> None:
    assert levels(parts) == expected


async def test_every_level_is_measured_alone_and_beside_prefill() -> None:
    bench, plan, ticks = StandIn(), Plan([1, 8], [1, 2], 20), list[str]()
    found = await sweep(bench, plan, ticks.append)
    assert [(each.batch, each.units, each.contended) for each in found] == [
        (batch, units, contended)
        for batch in (1, 8)
        for units, contended in ((1, 0), (2, 0), (4, 0), (1, 1), (2, 1))
    ]
    assert all(len(each.forward_s) == len(each.wall_s) == 20 for each in found)
    assert [each.num_late for each in found] == [0, 0, 0, 20, 20] * 2
    assert found[5].p95_s == pytest.approx(0.008)
    assert len(ticks) == plan.num_rounds == 2 * 2 * (20 + NUM_WARM_UPS)
    rounds = [bench.calls[begin : begin + 3] for begin in range(0, 3 * 23, 3)]
    assert {tuple(sorted(units for units, _, _ in turn)) for turn in rounds} == {(1, 2, 4)}
    assert len({turn[0] for turn in rounds}) > 1  # not always the same goes first


async def test_a_device_that_is_not_divided_is_measured_alone() -> None:
    bench, plan = StandIn(), Plan([2], [], 20)
    (found,) = await sweep(bench, plan, lambda _: None)
    assert (found.units, found.contended) == (4, False)
    assert len(bench.calls) == plan.num_rounds == 23


# Engines ----------------------------------------------------------------------------------------


class StandInEngine:
    """Both engines of a device. ``units``: that the first forwards get, as many as ``wrong``."""

    max_batch_tokens = 100

    def __init__(self, units: int = 0, wrong: int = 0, failed: bool = False) -> None:
        self.units, self.wrong, self.failed = units, wrong, failed
        self.demands: list[Demand] = []
        self.keys: list[str] = []
        self.prompts: list[Sequence[int]] = []
        self.counts: dict[str, Any] = {"forwards": 0, "encode_units": 0, "encode_s": 0, "late": 0}

    async def encode(self, calls: Sequence[EncodeCall], demand: Demand) -> Encoded:
        assert all(call.destinations == () for call in calls)
        self.demands.append(demand)
        self.keys += [call.media.key for call in calls]
        units = 4 if demand.units == ALL else demand.units
        self.counts["forwards"] += 1
        units = self.units if self.counts["forwards"] <= self.wrong else units
        self.counts |= {"encode_units": units, "encode_s": 0.001 * len(calls)}
        return Encoded()

    async def division(self) -> Division | None:
        failed = {"encode_failed": self.failed, "prefill_failed": False}
        return Division(None, None, self.counts | failed)

    async def prefill(self, prompt: Prompt, coming: object) -> Prefilled:
        self.prompts.append(prompt.token_ids)
        await asyncio.sleep(0)
        if self.failed:
            raise EngineError("it broke")
        return Prefilled()


def bench_on(engine: StandInEngine) -> EnginesBench:
    driven = Driven("cpu", "", 4, (1, 2, 3))
    both = cast(Engine, engine)
    return EnginesBench(both, both, driven, Item("data:", 3, 25), [7, 8, 9], 64)


async def test_a_forward_is_timed_by_its_engine() -> None:
    engine = StandInEngine()
    bench = bench_on(engine)
    first, second = await bench.encode(2, 3), await bench.encode(4, 1)
    assert (first.forward_s, second.forward_s) == (0.003, 0.001)
    assert first.wall_s > 0
    assert [demand.units for demand in engine.demands] == [2, ALL]
    assert len(set(engine.keys)) == 4
    assert bench.most_items == 4


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (StandInEngine(1, 2), "a call of 1 items on 2 units was 1 forwards, the last on 1 units"),
        (StandInEngine(failed=True), "the device is not divided any more"),
    ],
)
async def test_a_forward_on_other_units_is_an_error(engine: StandInEngine, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        await bench_on(engine).encode(2, 1)


async def test_a_forward_that_did_not_get_its_units_is_measured_once_more() -> None:
    engine = StandInEngine(1, 1)
    sample = await bench_on(engine).encode(2, 3)
    assert (sample.forward_s, sample.late) == (0.003, False)
    assert [demand.units for demand in engine.demands] == [2, 2]
    assert len(set(engine.keys)) == 6


async def test_prefill_is_busy_with_texts_that_no_cache_knows() -> None:
    engine = StandInEngine()
    async with bench_on(engine).prefilling():
        for _ in range(8):
            await asyncio.sleep(0)
    assert len(engine.prompts) >= 8
    assert {len(prompt) for prompt in engine.prompts} == {64}
    assert len({tuple(prompt) for prompt in engine.prompts}) == len(engine.prompts)


async def test_a_prefill_that_failed_is_heard_of() -> None:
    with pytest.raises(EngineError, match="it broke"):
        async with bench_on(StandInEngine(failed=True)).prefilling():
            await asyncio.sleep(0.001)


# Results ----------------------------------------------------------------------------------------


def asked(batches: Sequence[int], units: Sequence[int] | None = None) -> profile.Asked:
    return profile.Asked(profile.PARTS, batches, units, 20, 0.025, None, Path("profiles"))


def test_batches_that_a_call_does_not_hold_are_left_out() -> None:
    console = Console(record=True, width=100)
    plan = profile.plan_of(asked([4, 1, 16]), bench_on(StandInEngine()), console)
    assert plan == Plan([1, 4], [1, 2, 3], 20)
    assert "batches 16 are left out: a call holds 4 items" in console.export_text()
    with pytest.raises(ConfigError, match="--batches: a call holds 4 items of 25 tokens"):
        profile.plan_of(asked([5]), bench_on(StandInEngine()), console)


def test_units_are_those_that_the_driver_can_give() -> None:
    bench = bench_on(StandInEngine())
    assert profile.plan_of(asked([1], [3, 1]), bench, Console()).levels == [1, 3]
    said = "--units: 4 is no part that cpu can give an encoder here: 1, 2, 3"
    with pytest.raises(ConfigError, match=said):
        profile.plan_of(asked([1], [1, 4]), bench, Console())
    bench.driven = Driven("gate", "one core", 1, ())
    assert profile.plan_of(asked([1]), bench, Console()).levels == []
    with pytest.raises(ConfigError, match="gate can give an encoder here: none"):
        profile.plan_of(asked([1], [1]), bench, Console())


async def measured() -> Profile:
    runs: list[Runs] = await sweep(StandIn(), Plan([1, 8, 64], [1, 2, 3], 20), lambda _: None)
    return Profile(
        made=datetime(2026, 1, 2, tzinfo=UTC),
        easerve="0",
        key=KEY,
        unit="core",
        partition="cpu",
        picture=(60, 60),
        item_tokens=25,
        others_cores=0.5,
        capacity=Capacity(encode_items_per_s=100, prefill_tokens_per_s=1000),
        peak=Peak(flops_per_s=1e11, bytes_per_s=2e9, how="a product"),
        runs=tuple(runs),
    )


async def test_a_batch_gets_the_fewest_units_that_meet_the_target_beside_prefill() -> None:
    result = profile.result_of(await measured(), 0.008, None)
    assert result["min_units"] == {"1": 1, "8": 2, "64": 3}
    assert result["over_target"] == ["64"]
    assert result["capacity_per_s"] == {"encode": 100, "prefill": 1000, "decode": None}
    assert result["roofline"] == []
    assert result["stages"] is None


async def test_a_forwards_place_under_the_roof() -> None:
    work = encoder(TINY, 60, 60)
    assert work is not None
    one, *_ = profile.result_of(await measured(), 0.025, work)["roofline"]
    assert one["batch"] == 1
    assert one["flops"] == work.item_flops
    assert one["flops_per_s"] == pytest.approx(work.item_flops / 0.00025)
    assert one["share_of_peak"] == pytest.approx(one["flops_per_s"] / 1e11)
    assert one["bound"] == "memory"  # 8 FLOPs a byte, and the device does 50 in its time
    assert one["share_of_roof"] == pytest.approx(one["flops_per_s"] / (one["intensity"] * 2e9))


@pytest.mark.parametrize("counted", [True, False])
async def test_everything_goes_onto_a_page(counted: bool) -> None:
    result = profile.result_of(await measured(), 0.025, encoder(TINY, 60, 60) if counted else None)
    page = html("profile", profile_shown.of_profile(json.loads(json.dumps(result))))
    assert "8 beside prefill" in page
    assert ("are not counted" in page) is not counted


async def test_a_file_keeps_what_is_not_measured_if_it_is_of_this_device(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    both, surface = asked([1]), replace(asked([1]), parts=["surface"])
    assert profile._kept(surface, file, KEY) is None
    write((await measured()).model_copy(update={"stages": stages.made()}), file)
    kept = profile._kept(surface, file, KEY)
    assert kept is not None
    assert kept.stages == stages.made()
    assert profile._kept(both, file, KEY) is None
    with pytest.raises(ConfigError, match=r"--parts surface: .*: the profile was made with"):
        profile._kept(surface, file, KEY.model_copy(update={"units": 8}))


async def test_stages_are_told_in_rows_and_go_onto_the_page() -> None:
    rate = profile.decode_rate(stages.made())
    assert rate == pytest.approx(8 / 0.002)
    whole = (await measured()).model_copy(update={"stages": stages.made()})
    whole = whole.model_copy(
        update={"capacity": whole.capacity.model_copy(update={"decode_tokens_per_s": rate})}
    )
    result = profile.result_of(whole, 0.025, None)
    assert result["capacity_per_s"]["decode"] == rate
    told = result["stages"]
    assert told["encode"][0] == {
        "batch": 1,
        "wall_p50_s": pytest.approx(0.009),
        "engine_s": pytest.approx(0.003),
        "api_s": pytest.approx(0.0045),
    }
    assert told["decode"][0]["step_p50_s"] == 0.002
    assert told["pushes"][0]["usable_p50_s"] == 0.0004
    assert told["host"]["handover_s"] == pytest.approx(0.0007)
    page = html("profile", profile_shown.of_profile(json.loads(json.dumps(result))))
    assert "8 of 512 tokens" in page
    assert "Decode does 4,000 tokens/s" in page


@pytest.mark.engines
def test_the_tiny_model_is_profiled(easerve: Easerve, tmp_path: Path) -> None:
    ended = easerve("profile", EXAMPLE, "--batches", "1,2", "--out", tmp_path, "--json")
    assert ended.code == 0
    result = json.loads(ended.out)
    made = read(Path(result["file"]))
    assert list(result["min_units"]) == ["1", "2"]
    assert {row["units"] for row in result["surface"]} >= {1, made.key.units}
    assert all(len(runs.forward_s) == 20 for runs in made.runs)
    assert min(*result["capacity_per_s"].values(), *made.peak.model_dump(exclude={"how"}).values())
    costs, item = costs_of(Path(result["file"])), Media(Modality.IMAGE, made.item_tokens)
    assert 0 < costs.encode([item]) < 1
    assert 0 < costs.decode_step(1, 64) < costs.decode_step(16, 16 * 64) + costs.prefill(64)
    assert made.stages is not None
    assert min(host_of(made.stages).router_request_s, made.stages.render.api_s) > 0
