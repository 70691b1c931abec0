"""The stages' half of ``easerve profile``: what is measured of whom, on stand-ins for engines."""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import pytest

from easerve.bench.cpu import scheduled_s
from easerve.cli import profile_cpu, profile_service, profile_stages
from easerve.cli.profile_engines import Item
from easerve.cli.profile_stages import NUM_RUNS, NUM_STEPS, StagesBench, cells, kv_tokens_of
from easerve.config import Deployment
from easerve.engines.protocol import (
    Bundle,
    Delta,
    EncodeCall,
    Encoded,
    Engine,
    EngineError,
    Prefilled,
    Prompt,
)
from easerve.policy.events import Complete, PrefillFinished, RequestReceived
from easerve.types import Modality, RequestId, Stage, WorkerId

METRICS = """\
# HELP vllm:request_queue_time_seconds Histogram
vllm:request_queue_time_seconds_bucket{le="0.3",model_name="m"} 4.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1.5
vllm:request_queue_time_seconds_sum{engine="1",model_name="m"} 2.5e-1
vllm:generation_tokens_total{engine="0"} 7.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100"} 1.0
process_cpu_seconds_total 9.0
"""


# What engines say -------------------------------------------------------------------------------


def test_metrics_are_summed_over_their_labels() -> None:
    found = cells(METRICS)
    assert found["request_queue_time_seconds_sum"] == 1.75
    assert found["generation_tokens"] == 7
    assert "process_cpu_seconds" not in found


def test_an_engine_says_what_its_kv_cache_holds() -> None:
    assert kv_tokens_of(METRICS) == 1600
    with pytest.raises(EngineError, match="does not say how much its KV cache holds"):
        kv_tokens_of("vllm:generation_tokens_total 7.0\n")


# Sizes ------------------------------------------------------------------------------------------


def test_what_is_measured_fits_the_engines() -> None:
    sizes = profile_stages.sizes_of([4, 1], 1024, 16, 10_000)
    assert sizes.batches == [1, 4]
    assert sizes.prefill == [16, 64, 128, 256, 512]
    assert sizes.contexts == [64, 512]
    assert sizes.sequences == [1, 2, 4, 8, 16]
    assert (16, 64) in sizes.decodes
    assert (8, 512) in sizes.decodes
    assert (16, 512) not in sizes.decodes  # 16 * 600 tokens of at most 8,000


@pytest.mark.parametrize(
    ("max_model_len", "num_slots"), [(32, 256), (64, 256), (128, 1), (200, 256), (4096, 64)]
)
def test_every_answer_fits_into_the_model(max_model_len: int, num_slots: int) -> None:
    sizes = profile_stages.sizes_of([1], max_model_len, num_slots, 1 << 20)
    assert all(tokens < max_model_len for tokens in sizes.prefill)
    assert all(sequences <= num_slots for sequences in sizes.sequences)
    if max_model_len >= 64:
        assert sizes.decodes
        for sequences, context in sizes.decodes:
            assert context + profile_stages.num_tokens(sequences) < max_model_len


# Calls ------------------------------------------------------------------------------------------


@dataclass
class World:
    """CPU that stand-ins have used, and metrics that they show."""

    used: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    queued: float = 0.0
    prefilled: float = 0.0
    gaps: list[float] = field(default_factory=list)
    pushed: list[Bundle] = field(default_factory=list)

    def snapshot(self) -> Mapping[str, float]:
        return dict(self.used)


class StandIn:
    """All three engines; a call uses what its stage is said to use."""

    max_batch_tokens, num_slots = 400, 16

    def __init__(self, stage: Stage, world: World) -> None:
        self.worker_id, self.stage, self._world = WorkerId(f"{stage}-0"), stage, world
        self.seen: list[Any] = []
        self.late = 0.0

    def _use(self, api: float, core: float) -> None:
        self._world.used[self.worker_id] += api
        self._world.used[profile_cpu.core(self.worker_id)] += core

    async def metrics(self) -> str:
        return (
            f"vllm:request_queue_time_seconds_sum {self._world.queued}\n"
            f"vllm:request_prefill_time_seconds_sum {self._world.prefilled}\n"
            f"vllm:inter_token_latency_seconds_sum {sum(self._world.gaps)}\n"
            f"vllm:inter_token_latency_seconds_count {len(self._world.gaps)}\n"
        )

    async def render(self, body: Mapping[str, Any]) -> Prompt:
        self.seen.append(body["key"])
        self._use(0.25, 0)
        return Prompt([1], {})

    async def encode(self, calls: Sequence[EncodeCall]) -> Encoded:
        self.seen += [call.media.key for call in calls]
        self._use(0.5, 0.125 * len(calls))
        if calls[0].destinations:
            self._world.pushed.append(Bundle(len(calls), 100, 0.03125))
        return Encoded()

    async def prefill(self, prompt: Prompt, coming: object) -> Prefilled:
        self.seen.append(tuple(prompt.token_ids))
        self._use(0.25, len(prompt.token_ids) / 64)
        self._world.prefilled += 0.5
        bundles, self._world.pushed = tuple(self._world.pushed), []
        return Prefilled(handle={"tokens": prompt.max_new_tokens}, bundles=bundles)

    async def decode(self, prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        assert handle["tokens"] == prompt.max_new_tokens + 1  # else prefill would have answered
        self._world.queued += 0.125
        self._world.used[profile_cpu.core("prefill-0")] += 0.0625
        for _ in range(prompt.max_new_tokens):
            await asyncio.sleep(0)
            self._use(0.0625, 0.25)
            self._world.gaps.append(1e-9)
            yield Delta("", (1,))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(profile_stages, "PAUSE_S", 0.0)
    return World()


@pytest.fixture
def engines(world: World) -> dict[Stage, StandIn]:
    return {stage: StandIn(stage, world) for stage in Stage}


def bench_on(engines: dict[Stage, StandIn], world: World, on_cpu: bool = True) -> StagesBench:
    return StagesBench(
        cast(dict[Stage, Engine], engines),
        Item("data:", 3, 25),
        lambda key: {"key": key},
        [7, 8, 9],
        world.snapshot,
        on_cpu,
    )


async def test_an_encoder_is_measured_with_new_items(
    engines: dict[Stage, StandIn], world: World
) -> None:
    bench = bench_on(engines, world)
    found = await bench.encode(4)
    assert (found.batch, found.engine_s, found.api_s) == (4, 0.5, 0.5)
    assert len(found.wall_s) == NUM_RUNS
    rendered = await bench.render()
    assert rendered.api_s == 0.25
    keys = engines[Stage.ENCODE].seen
    assert len(set(keys)) == len(keys)


async def test_prefill_is_measured_with_new_texts(
    engines: dict[Stage, StandIn], world: World
) -> None:
    found = await bench_on(engines, world).prefill(64)
    assert (found.tokens, found.engine_s, found.api_s) == (64, 1.0, 0.25)
    texts = engines[Stage.PREFILL].seen
    assert {len(text) for text in texts} == {64}
    assert len(set(texts)) == len(texts)


async def test_on_a_gpu_the_engines_clock_counts(
    engines: dict[Stage, StandIn], world: World
) -> None:
    found = await bench_on(engines, world, on_cpu=False).prefill(64)
    assert (found.engine_s, found.api_s) == (0.5, 0.25)


async def test_a_pull_is_told_apart_from_its_prefill(
    engines: dict[Stage, StandIn], world: World
) -> None:
    bench = bench_on(engines, world)
    alone = await bench.prefill(64)
    found = await bench.pull(alone)
    assert (found.tokens, found.pull_s, found.handover_s) == (64, 0.125, 0.0625)
    assert (found.engine_s, found.api_s) == (0.25, 0.0625)
    assert len(found.wall_s) == NUM_RUNS


async def test_pushes_are_told_by_prefill(engines: dict[Stage, StandIn], world: World) -> None:
    found = await bench_on(engines, world).push(4)
    assert (found.items, found.tokens) == (4, 100)
    assert set(found.usable_s) == {0.03125}


async def test_a_prefill_engine_that_hears_of_no_push_is_an_error(
    engines: dict[Stage, StandIn], world: World
) -> None:
    async def prefill(prompt: Prompt, coming: object) -> Prefilled:
        return Prefilled()

    engines[Stage.PREFILL].prefill = prefill  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="does not say what was pushed"):
        await bench_on(engines, world).push(1)


async def test_crowding_is_of_prefill_beside_an_encoder_that_never_rests(
    engines: dict[Stage, StandIn], world: World
) -> None:
    bench = bench_on(engines, world)
    alone = await bench.prefill(64)

    async def encode(calls: Sequence[EncodeCall]) -> Encoded:
        await asyncio.sleep(0)
        return Encoded()

    async def prefill(prompt: Prompt, coming: object) -> Prefilled:
        await asyncio.sleep(0)
        world.used[profile_cpu.core("prefill-0")] += 1.5
        return Prefilled()

    engines[Stage.ENCODE].encode = encode  # type: ignore[method-assign]
    engines[Stage.PREFILL].prefill = prefill  # type: ignore[method-assign]
    assert await bench.crowding(alone) == 0.5


async def test_decode_is_measured_while_all_sequences_run(
    engines: dict[Stage, StandIn], world: World
) -> None:
    found = await bench_on(engines, world).decode(3, 512)
    assert (found.sequences, found.context) == (3, 512)
    assert found.engine_s == pytest.approx(3 * 0.25)  # of a step, in which each has made a token
    assert found.api_s == pytest.approx(3 * 0.0625)
    assert {len(text) for text in engines[Stage.PREFILL].seen} == {512 - NUM_STEPS // 2}


async def test_sequences_that_never_run_together_are_an_error(
    engines: dict[Stage, StandIn], world: World
) -> None:
    numbers = count()

    async def decode(prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        if next(numbers) % 2:
            for _ in range(200):
                await asyncio.sleep(0)
        for _ in range(prompt.max_new_tokens):
            await asyncio.sleep(0)
            yield Delta("", (1,))

    engines[Stage.DECODE].decode = decode  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="2 sequences did not run together"):
        await bench_on(engines, world).decode(2, 64)


async def test_tokens_that_come_quicker_than_they_were_made_do_not_count(
    engines: dict[Stage, StandIn], world: World
) -> None:
    class Slow(list[float]):
        def append(self, gap_s: float) -> None:
            super().append(3600.0)

    world.gaps = Slow()
    with pytest.raises(EngineError, match="1 sequences did not run together: the machine is too"):
        await bench_on(engines, world).decode(1, 64)


# Service ----------------------------------------------------------------------------------------


def test_one_engine_of_each_stage_is_measured_and_nothing_beside_it() -> None:
    deployment = Deployment.model_validate(
        {
            "model": "a/b",
            "device": "cpu",
            "server": {"host": "0.0.0.0", "port": 80, "api_key": "k"},
            "encode": {"replicas": 2, "cores": [[0], [1]]},
            "local_prefill": {},
            "partition": {},
            "prefill": {"replicas": 3},
            "policy": {"remote_share": 0.5, "when": "greedy"},
        }
    )
    alone = profile_service.alone(deployment)
    assert [alone.encode.replicas, alone.prefill.replicas, alone.decode.replicas] == [1, 1, 1]
    assert alone.encode.cores == ((0,),)
    assert (alone.local_prefill, alone.partition) == (None, None)
    assert (alone.server.host, alone.server.port, alone.server.api_key) == ("127.0.0.1", 0, None)
    assert (alone.policy.remote_share, alone.policy.when) == (1, "greedy")


def test_a_span_is_from_the_first_request_to_the_last_answer() -> None:
    used, span = {"router": 1.0}, profile_service.Span()
    first, second = RequestId("1"), RequestId("2")
    span.step(0, [RequestReceived(first, 1, (Modality.IMAGE,))], [])
    span.expect(2, lambda: dict(used))
    span.step(1, [], [])
    used["router"] = 2.0
    span.step(2, [RequestReceived(first, 1, ()), RequestReceived(second, 1, ())], [])
    span.step(3, [PrefillFinished(first, 0, 0)], [Complete(first)])
    assert span.used_s == {}
    used |= {"router": 5.0, "client": 0.5}
    span.step(4, [], [Complete(second)])
    used["router"] = 9.0
    span.step(5, [], [Complete(second)])  # of nobody's run
    assert span.is_over
    assert span.used_s == {"router": 3.0, "client": 0.5}


def test_cpu_seconds_are_those_of_the_threads() -> None:
    begin, before = time.process_time(), scheduled_s(os.getpid())
    while time.process_time() < begin + 0.02:
        pass
    assert scheduled_s(os.getpid()) - before == pytest.approx(0.02, abs=0.02)
    assert scheduled_s(0) == 0
    assert profile_cpu.since({"a": 1.0}, {"a": 3.0, "b": 2.0}) == {"a": 2.0, "b": 2.0}
