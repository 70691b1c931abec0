"""``easerve profile --parts capacity``: stages alone, on stand-ins for engines."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from easerve.bench.report import html
from easerve.cli import profile_capacity as capacity
from easerve.cli import profile_capacity_bench as bench_module
from easerve.cli import profile_capacity_sets as sets
from easerve.cli import profile_shown
from easerve.cli.profile_capacity_bench import CapacityBench, LeftOutError, Limits, Workload
from easerve.cli.profile_engines import Item
from easerve.cli.profile_service import Content
from easerve.config import ConfigError, Deployment
from easerve.costs.profile import Key as ProfileKey
from easerve.engines.protocol import Delta, Engine, EngineError
from easerve.engines.vllm import launch, memory, models
from easerve.engines.vllm.topology import members
from easerve.search.capacity import Cell, Row
from easerve.types import Stage

from .capacity_engines import (
    CALL_S,
    FRAME_TOKENS,
    ITEM_S,
    ITEM_TOKENS,
    KEY,
    PLACEHOLDER,
    STEP_S,
    WORKLOAD,
    StandIn,
    Starter,
    on_cpu,
    plan,
)
from .conftest import Easerve

ENCODE, PREFILL, DECODE = Stage
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/tiny-llava.yaml"
HERE = ProfileKey(device="A CPU", units=4, torch="2", vllm="0", model="tiny", dtype="float32")
CELLS = [
    *(Cell(ENCODE, 1, batch) for batch in (1, 4)),
    *(Cell(stage, 1, batch) for stage in (PREFILL, DECODE) for batch in (1, 4)),
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "UNDER_LOAD_S", 0.02)


def console() -> Console:
    return Console(record=True, quiet=True)


def bench_on(
    engines: Mapping[Stage, StandIn], workload: Workload = WORKLOAD, max_model_len: int = 1024
) -> CapacityBench:
    content = Content(
        Item("data:", PLACEHOLDER, ITEM_TOKENS), lambda key: {}, [7, 8, 9, 10, 11], FRAME_TOKENS
    )
    limits = Limits(max_model_len, 400, {PREFILL: 2000, DECODE: 1000})
    return CapacityBench(cast(Mapping[Stage, Engine], engines), content, limits, workload)


@pytest.fixture
def engines() -> dict[Stage, StandIn]:
    handles: set[int] = set()
    return {stage: StandIn(stage, handles) for stage in Stage}


# Rows -------------------------------------------------------------------------------------------


async def test_an_encoders_rate_is_of_requests_with_new_pictures(
    engines: dict[Stage, StandIn],
) -> None:
    bench = bench_on(engines, Workload(2, (60, 60), 24, 4))
    one, four = [await bench.row(Cell(ENCODE, 1, batch)) for batch in (1, 4)]
    keys = engines[ENCODE].keys
    assert len(set(keys)) == len(keys)
    for row, batch in ((one, 1), (four, 4)):
        assert CALL_S + batch * ITEM_S <= row.seconds < 10 * (CALL_S + batch * ITEM_S)
        assert 0 < row.per_s <= batch / 2 / (CALL_S + batch * ITEM_S)
    assert four.per_s > one.per_s


async def test_prefill_gets_new_texts_as_long_as_a_request(engines: dict[Stage, StandIn]) -> None:
    row = await bench_on(engines, Workload(2, (60, 60), 24, 4)).row(Cell(PREFILL, 1, 4))
    texts = engines[PREFILL].texts
    assert {len(text) for text in texts} == {FRAME_TOKENS + 2 * ITEM_TOKENS + 24}
    assert len(set(texts)) == len(texts)
    assert not engines[PREFILL].handles  # its own answers: nothing is kept
    assert row.per_s <= 1 / CALL_S
    assert row.seconds > 2 * CALL_S  # each waits for others


async def test_decode_is_measured_while_prefill_rests(engines: dict[Stage, StandIn]) -> None:
    row = await bench_on(engines).row(Cell(DECODE, 1, 4))
    assert engines[DECODE].most_at_once == 4
    assert not engines[PREFILL].handles  # each was pulled
    for begin, end in engines[DECODE].spans:
        assert all(last <= begin or end <= first for first, last in engines[PREFILL].spans)
    assert STEP_S <= row.seconds < 20 * STEP_S
    assert row.per_s <= 4 / (WORKLOAD.output_tokens * STEP_S)


async def test_more_at_once_are_decoded_quicker(engines: dict[Stage, StandIn]) -> None:
    one, four = [await bench_on(engines).row(Cell(DECODE, 1, batch)) for batch in (1, 4)]
    assert four.per_s > 1.5 * one.per_s


async def test_a_prefill_that_is_too_slow_for_decode_leaves_that_out(
    engines: dict[Stage, StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "KEEP_S", 9.5 * CALL_S)
    engines[PREFILL].num_slots = 1
    bench = bench_on(engines)
    with pytest.raises(LeftOutError, match=r"prefill made \d+ of 11 prompts for it"):
        await bench.row(Cell(DECODE, 1, 11))
    assert not engines[PREFILL].handles  # what there was is freed


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        (Cell(ENCODE, 1, 17), "a call of 425 tokens, it holds 400"),
        (Cell(DECODE, 1, 12), "the KV caches hold 11 requests"),  # of 71 of 800 tokens
    ],
)
async def test_what_engines_cannot_hold_is_not_measured(
    engines: dict[Stage, StandIn], cell: Cell, why: str
) -> None:
    with pytest.raises(LeftOutError, match=why):
        await bench_on(engines).row(cell)
    most = cell._replace(batch=cell.batch - 1)
    assert (await bench_on(engines).row(most)).cell == most


async def test_a_request_fits_into_the_model(engines: dict[Stage, StandIn]) -> None:
    for stage in (PREFILL, DECODE):
        with pytest.raises(LeftOutError, match="a request of 55 tokens, max_model_len is 54"):
            await bench_on(engines, max_model_len=54).row(Cell(stage, 1, 1))
        await bench_on(engines, max_model_len=55).row(Cell(stage, 1, 1))


# Sets -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 1 << 20))
def test_a_ladder_rises_to_the_most(most: int) -> None:
    steps = sets.ladder(most)
    assert steps[-1] == most
    assert steps[0] == 1
    assert all(low < high <= 4 * low for low, high in pairwise(steps))


def on_gpus(**over: Any) -> Deployment:
    return Deployment.model_validate({"model": "a/b", "device": "cuda", **over})


def test_a_file_is_measured_as_it_is() -> None:
    (only,) = sets.sets_of(on_cpu(), [4, 1], None, 0)
    assert list(only.cells) == CELLS
    assert only.deployment.local_prefill is None


def test_each_size_is_a_set_and_encoders_keep_theirs() -> None:
    given = on_gpus(prefill={"replicas": 2, "tensor_parallel_size": 4}, decode={"max_num_seqs": 4})
    one, two = sets.sets_of(given, [1], [1, 2], 8)
    assert [cell for cell in one.cells if cell.stage is ENCODE] == [Cell(ENCODE, 1, 1)]
    assert {cell.stage for cell in two.cells} == {PREFILL, DECODE}
    for size, each in ((1, one), (2, two)):
        made = {member.stage: member for member in members(each.deployment)}
        assert {cell.tp for cell in each.cells if cell.stage is not ENCODE} == {size}
        assert [len(made[stage].devices) for stage in Stage] == [1, size, size]
        used = [gpu for member in made.values() for gpu in member.devices]
        assert len(set(used)) == len(used) == 1 + 2 * size


def test_sizes_and_devices_go_into_the_launch_lines(model: Path, tmp_path: Path) -> None:
    given = on_gpus(model=str(model), gpu_memory="80GiB")
    (_, two) = sets.sets_of(given, [1], [1, 2], 8)
    info = models.inspect(str(model))
    made = memory.plan(two.deployment, info)
    specs = launch.engine_specs(two.deployment, made, tmp_path, tmp_path, "t")
    lines = {spec.stage: spec.argv for spec in specs}
    assert [_after(lines[stage], "--tensor-parallel-size") for stage in Stage] == ["1", "2", "2"]
    visible = [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs]
    assert len({gpu for each in visible for gpu in each.split(",")}) == 5


def _after(words: Sequence[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_a_file_that_names_devices_is_followed() -> None:
    names = {
        stage.value: {"devices": [[number]], "gpu_memory_utilization": 0.3}
        for number, stage in enumerate(Stage, 3)
    }
    (only,) = sets.sets_of(on_gpus(**names), [1], [1], 2)
    assert [member.devices for member in members(only.deployment)] == [(3,), (4,), (5,)]
    assert only.deployment.encode.gpu_memory_utilization == 0.3


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 12))
def test_engines_are_on_gpus_that_there_are(
    encode: int, prefill: int, decode: int, num_gpus: int
) -> None:
    sizes = dict(zip(Stage, (encode, prefill, decode), strict=True))
    given = on_gpus(**{stage.value: {"tensor_parallel_size": n} for stage, n in sizes.items()})
    if max(sizes.values()) > num_gpus:
        with pytest.raises(ConfigError, match=f"this machine has {num_gpus}"):
            sets.placed(given, num_gpus)
        return
    placed = sets.placed(given, num_gpus)
    taken = dict.fromkeys(range(num_gpus), 0.0)
    for member in members(placed):
        assert len(set(member.devices)) == sizes[member.stage]
        for gpu in member.devices:
            taken[gpu] += member.section.gpu_memory_utilization or 0
    assert max(taken.values()) <= 0.9 + 1e-9
    apart = sets.lanes(placed)
    assert (len(apart) == 3) is (sum(sizes.values()) <= num_gpus)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=3, max_size=3))
def test_lanes_are_stages_that_share_gpus_somehow(groups: list[set[int]]) -> None:
    given = on_gpus(
        **{
            stage.value: {"devices": [sorted(group)], "tensor_parallel_size": len(group)}
            for stage, group in zip(Stage, groups, strict=True)
        }
    )
    devices = dict(zip(Stage, groups, strict=True))
    found = sets.lanes(given)
    for one in Stage:
        for other in Stage:
            reached = {one}
            for _ in Stage:  # the dumb way: as far as there is a way at all
                reached |= {
                    each for each in Stage for near in reached if devices[each] & devices[near]
                }
            assert any({one, other} <= lane for lane in found) is (other in reached)


# Measuring --------------------------------------------------------------------------------------


async def test_a_cpu_measures_one_stage_after_another(tmp_path: Path) -> None:
    starter = Starter()
    found = await capacity.measure(plan(tmp_path / "c.jsonl"), console(), starter)
    assert [row.cell for row in found.rows] == CELLS
    assert found.prompt_tokens == FRAME_TOKENS + ITEM_TOKENS + WORKLOAD.text_tokens
    (engines,) = starter.engines
    assert not _overlap(engines[ENCODE], engines[PREFILL])
    assert not _overlap(engines[ENCODE], engines[DECODE])


async def test_gpus_of_their_own_are_measured_at_once(tmp_path: Path) -> None:
    starter, few = Starter(), {"max_num_seqs": 4}
    given = on_gpus(prefill=few, decode=few)
    found = await capacity.measure(
        plan(tmp_path / "c.jsonl", given, sizes=[1, 2], num_gpus=8), console(), starter
    )
    assert {row.cell for row in found.rows} == {
        *CELLS,
        *(cell._replace(tp=2) for cell in CELLS if cell.stage is not ENCODE),
    }
    first, second = starter.engines
    assert _overlap(first[ENCODE], first[PREFILL])
    assert not second[ENCODE].spans
    assert [each.decode.tensor_parallel_size for each in starter.deployments] == [1, 2]


async def test_gpus_that_are_shared_are_not(tmp_path: Path) -> None:
    starter, few = Starter(), {"max_num_seqs": 4}
    given = on_gpus(prefill=few, decode=few)
    await capacity.measure(plan(tmp_path / "c.jsonl", given, num_gpus=1), console(), starter)
    (engines,) = starter.engines
    assert not _overlap(engines[ENCODE], engines[PREFILL])
    assert starter.deployments[0].decode.gpu_memory_utilization == 0.3


def _overlap(one: StandIn, other: StandIn) -> bool:
    begin = max(each.spans[0][0] for each in (one, other))
    return begin < min(each.spans[-1][1] for each in (one, other))


async def test_what_is_in_the_file_is_not_measured_again(tmp_path: Path) -> None:
    file, starter = tmp_path / "c.jsonl", Starter()
    first = await capacity.measure(plan(file, batches=[1]), console(), starter)
    more = await capacity.measure(plan(file, batches=[1, 4]), console(), starter)
    assert set(first.rows) < set(more.rows)
    assert not starter.engines[1][PREFILL].spans
    again = await capacity.measure(plan(file, batches=[1, 4]), console(), starter)
    assert again.rows == more.rows
    assert again.prompt_tokens is None
    assert len(starter.engines) == 2  # the last time there were none


async def test_all_is_measured_anew_if_wanted(tmp_path: Path) -> None:
    file, starter = tmp_path / "c.jsonl", Starter()
    await capacity.measure(plan(file), console(), starter)
    found = await capacity.measure(plan(file, fresh=True), console(), starter)
    assert [row.cell for row in found.rows] == CELLS
    assert all(engines[ENCODE].spans for engines in starter.engines)


async def test_an_error_leaves_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"

    def break_decode(engines: dict[Stage, StandIn]) -> None:
        def decode(*_: object) -> AsyncIterator[Delta]:
            raise EngineError("decode is gone")

        engines[DECODE].decode = decode  # type: ignore[method-assign, assignment]

    with pytest.raises(EngineError, match="decode is gone"):
        await capacity.measure(plan(file), console(), Starter(change=break_decode))
    starter = Starter()
    found = await capacity.measure(plan(file), console(), starter)
    assert [row.cell for row in found.rows] == CELLS
    assert not starter.engines[0][ENCODE].spans
    assert starter.engines[0][DECODE].spans


async def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    said = Console(record=True, file=(tmp_path / "said").open("w"), width=200)
    found = await capacity.measure(plan(tmp_path / "c.jsonl", batches=[1, 17]), said, Starter())
    why = "encode on 1, batch 17: a call of 425 tokens, it holds 400"
    assert found.left_out == [why]
    assert "batch 17 is left out" in said.export_text()
    said.file.close()
    assert len(found.rows) == 5


async def test_requests_without_pictures_ask_nothing_of_an_encoder(tmp_path: Path) -> None:
    starter, texts = Starter(), Workload(0, (60, 60), 24, 1)
    given = plan(tmp_path / "c.jsonl", workload=texts)
    found = await capacity.measure(given, console(), starter)
    rates = {row.cell: row.per_s for row in found.rows}
    assert all(math.isinf(rates[cell]) for cell in CELLS if cell.stage is not PREFILL)
    assert not starter.engines[0][ENCODE].spans
    result = capacity.result_of(found, given)
    assert result["capacity_requests_per_s"]["encode"] is None
    assert result["capacity_per_s"]["decode"] is None
    json.dumps(result, allow_nan=False)


@pytest.mark.long
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    words = [sys.executable, "-m", "tests.cli.capacity_engines", str(file)]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not file.exists() or file.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert 3 <= len(before) < len(CELLS)
    starter = Starter()
    found = asyncio.run(capacity.measure(plan(file), console(), starter))
    assert [row.cell for row in found.rows] == CELLS
    assert not starter.engines[0][ENCODE].spans  # its rows came first
    assert found.rows[0].per_s == before[0]["per_s"]


# Key and result -----------------------------------------------------------------------------------


def test_another_setting_or_workload_is_another_key() -> None:
    def key(workload: Workload = WORKLOAD, **over: Any) -> str:
        given = Deployment.model_validate({"model": "a/b", **over})
        return capacity.key_of(given, HERE, workload).digest

    same: list[dict[str, Any]] = [
        {"prefill": {"replicas": 3}},
        {"local_prefill": {}, "policy": {"remote_share": 0.5}},
        {"server": {"port": 1}},
    ]
    others: list[dict[str, Any]] = [
        {"engine": {"cpu_threads": 2}},
        {"prefill": {"max_num_batched_tokens": 64}},
    ]
    assert {key(**over) for over in same} == {key()}
    assert key() not in {key(**over) for over in others}
    assert key(Workload(1, (60, 60), 25, 4)) != key()


def found_rows() -> capacity.Found:
    rows = (
        Row(ENCODE, 1, 1, 100.0, 0.01),
        Row(ENCODE, 1, 4, 250.0, 0.016),
        Row(PREFILL, 1, 1, 50.0, 0.02),
        Row(PREFILL, 2, 1, 90.0, 0.011),
        Row(DECODE, 2, 4, 8.0, 0.005),
    )
    return capacity.Found(rows, ["decode on 2, batch 16: why"], 51, 0.25)


def test_rates_are_the_best_of_the_smallest_engine(tmp_path: Path) -> None:
    result = capacity.result_of(found_rows(), plan(tmp_path / "c.jsonl"))
    assert result["capacity_requests_per_s"] == {"encode": 250, "prefill": 50, "decode": 8}
    assert result["capacity_per_s"] == {"encode": 250, "prefill": 50 * 51, "decode": 8 * 4}
    assert len(result["capacity_rows"]) == 5


def test_what_other_parts_measured_of_a_rate_stays(tmp_path: Path) -> None:
    more = capacity.result_of(found_rows(), plan(tmp_path / "c.jsonl"))
    before = {
        "capacity_per_s": {"encode": 70.0, "prefill": 900.0, "decode": None},
        "others_cores": 0.5,
        "device": "A CPU",
    }
    result = capacity.merged(before, more)
    assert result["capacity_per_s"] == {"encode": 70, "prefill": 900, "decode": 32}
    assert result["others_cores"] == 0.5
    assert result["device"] == "A CPU"
    assert result["capacity_workload"] == KEY.workload


def test_capacities_go_onto_a_page(tmp_path: Path) -> None:
    found = found_rows()
    found.rows = [*found.rows, Row(DECODE, 1, 1, math.inf, 0.0)]
    more = capacity.result_of(found, plan(tmp_path / "c.jsonl"))
    result = capacity.merged(capacity.head(HERE, "core"), more)
    page = html("profile", profile_shown.of_profile(json.loads(json.dumps(result))))
    assert "Capacity of an engine" in page
    assert "2 devices" in page
    assert "batch 16: why" in page


# The command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tensor-parallel-sizes", "2"), "--tensor-parallel-sizes: more than 1 needs device"),
        (("--tensor-parallel-sizes", "0"), "--tensor-parallel-sizes: 0 is not from 1"),
        (("--output-tokens", "0"), "Invalid value for '--output-tokens'"),
        (("--parts", "capacities"), "is none of surface, stages, capacity"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    easerve: Easerve, options: tuple[str, ...], message: str
) -> None:
    ended = easerve("profile", EXAMPLE, "--parts", "capacity", *options)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err


def test_the_part_alone_writes_no_profile(
    easerve: Easerve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = Starter()

    @asynccontextmanager
    async def started(deployment: Deployment, progress: Any) -> AsyncIterator[capacity.Running]:
        progress("encode-0", "ready")
        async with starter(deployment, progress) as running:
            yield running

    monkeypatch.setattr(capacity, "running", started)
    words = ("profile", EXAMPLE, "--parts", "capacity", "--out", tmp_path, "--batches", "1,2")
    ended = easerve(*words, "--output-tokens", "4", "--json")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert result["kind"] == "profile"
    assert result["capacity_workload"].endswith("24 tokens of text, 4 of an answer")
    assert [row["batch"] for row in result["capacity_rows"]] == [1, 2, 1, 4, 16, 1, 4, 16]
    assert [path.suffixes for path in tmp_path.glob("*/*")] == [[".capacity", ".jsonl"]]
    again = easerve(*words, "--output-tokens", "4")
    assert "8 of 8 capacities are in" in again.out
    assert "Stages alone" in again.out or "Capacity of an engine" in again.out
