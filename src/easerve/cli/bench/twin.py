"""``easerve bench twin``: the server as it runs, and beside it its twin in virtual time.

In one run: what each stage costs is measured on the running engines (or read from a profile), then
requests come over HTTP at each rate, and the very same requests, with the same arrival times,
prompts and lengths of answers, go through the simulator. Nothing is fitted to what was served.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from easerve.bench.client import Planned, run_in_process
from easerve.bench.cpu import usable_cores
from easerve.cli import divide, profile_cpu
from easerve.cli.bench import command, twin_shown
from easerve.cli.bench.others import Others
from easerve.cli.bench.twin_shown import METRICS
from easerve.cli.deploy import Service
from easerve.cli.profile_here import here
from easerve.cli.profile_service import NUM_PARTS, ServiceBench, Span, serving
from easerve.cli.profile_stages import StagesBench
from easerve.cli.progress import StartProgress
from easerve.config import Deployment, StageSection
from easerve.costs import profiled
from easerve.costs.base import Media
from easerve.costs.profile import mismatch
from easerve.costs.profiled import ProfileCosts
from easerve.costs.stages import PrefillCalls, Stages
from easerve.engines.protocol import EngineError
from easerve.goodput import Record, summarise
from easerve.policy import events as ev
from easerve.sim.config import EaserveSystem, Encoders, Limits, LlmEngines
from easerve.sim.host import Host
from easerve.sim.run import Request, Run
from easerve.sim.sharing import machine
from easerve.sim.simulate import finished
from easerve.sim.systems import easerve
from easerve.sim.world import World
from easerve.types import RequestId, Shape, Stage
from easerve.workload import mix
from easerve.workload.arrivals import Arrivals

ANSWER_TOKENS = (8, 64)
SIZE = (60, 60)
BATCHES = (1, 2, 4, 8, 16)
CPU_BATCH_TOKENS = 2048
"""vLLM's default of an API server on a CPU, per rank (engine/arg_utils.py)."""
Result = dict[str, Any]
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """``num_requests`` of each of ``rounds`` at each rate. ``profile`` None: measured first."""

    rates_per_s: Sequence[float]
    num_requests: int
    rounds: int
    seed: int
    profile: Path | None

    @property
    def num_runs(self) -> int:
        """For a progress bar."""
        return NUM_PARTS + len(self.rates_per_s) * self.rounds


class Watch(Span):
    """Notes what each request asked, as the router understood it."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self._received: list[RequestId] = []
        self._shapes: dict[RequestId, Shape] = {}

    def step(self, now_ns: int, events: Sequence[ev.Event], actions: Sequence[ev.Action]) -> None:
        super().step(now_ns, events, actions)
        for event in events:
            match event:
                case ev.RequestReceived():
                    self._received.append(event.request_id)
                case ev.Prepared():
                    self._shapes[event.request_id] = event.shape
                case _:
                    pass

    def shapes(self) -> list[Shape]:
        """In the order in which the requests came. Raises EngineError where one has none."""
        try:
            return [self._shapes[request_id] for request_id in self._received]
        except KeyError as error:
            raise EngineError(f"request {error} was not prepared") from None


@dataclass(frozen=True, slots=True)
class Model:
    """Of a deployment with one engine of each stage: its costs, and the sections of its twin."""

    costs: ProfileCosts
    host: profiled.Host
    config: EaserveSystem
    on_cpu: bool
    num_cores: int

    def simulate(self, requests: Sequence[Request], seed: int) -> Run:
        cores = machine(self.num_cores - self.host.idle_cores)
        world = World(
            costs_of=lambda tp, step_overhead_s=None: self.costs,
            kv_tokens=_no_kv_tokens,
            num_units=self.num_cores,
            granule=1,
            requests=requests,
            run=Run(),
            rng=random.Random(seed),  # noqa: S311 (routing, not secrets)
            machine=cores if self.on_cpu else None,
            host=Host(self.host, cores),
        )
        return finished(easerve.build(self.config, world), world, "easerve")


def _no_kv_tokens(
    tp: int, utilization: float, with_encoder: bool, with_activations: bool = True
) -> int:
    raise AssertionError("the sections of a twin say what a KV cache holds")


def model_of(
    deployment: Deployment, stages: Stages, item_tokens: int, call_tokens: int, kv_tokens: int
) -> Model:
    """``call_tokens``: of one call to the encoder; ``kv_tokens``: of a KV cache."""
    config = EaserveSystem(
        prepare_s=0.0,
        encode=Encoders(dispatch_s=0.0, item_s=0.0, max_num_batched_tokens=call_tokens),
        prefill=_llm(deployment.prefill, kv_tokens),
        decode=_llm(deployment.decode, kv_tokens),
        policy=deployment.policy,
        limits=Limits(**{name: getattr(deployment.limits, name) for name in Limits.model_fields}),
    )
    return Model(
        ProfileCosts(stages, item_tokens),
        profiled.host_of(stages),
        config,
        deployment.device == "cpu",
        usable_cores(),
    )


def _llm(section: StageSection, kv_tokens: int) -> LlmEngines:
    return LlmEngines(
        max_num_batched_tokens=section.max_num_batched_tokens or CPU_BATCH_TOKENS,
        max_num_seqs=section.max_num_seqs,
        kv_cache_tokens=kv_tokens,
    )


@dataclass(slots=True)
class Side:
    """What came of the rounds at a rate, served or simulated."""

    records: list[Record]
    throughputs: list[float]
    busy: list[Mapping[str, float]]

    def add(self, records: Sequence[Record], busy_s: Mapping[str, float]) -> None:
        begin_s = min(record.sent_s for record in records)
        duration_s = max(record.end_s or record.sent_s for record in records) - begin_s
        self.records += records
        completed = sum(record.outcome == "completed" for record in records)
        self.throughputs.append(completed / duration_s)
        self.busy.append({stage: each / duration_s for stage, each in busy_s.items()})

    def row(self) -> Result:
        summary = summarise(self.records, 0.0, {})
        row: Result = {}
        for metric in METRICS:
            name, _, part = metric.partition(".")
            row[metric] = getattr(getattr(summary, name), part)
        row["throughput_per_s"] = fmean(self.throughputs)
        for stage in Stage:
            row[f"busy.{stage}"] = fmean(each[stage] for each in self.busy)
        row["not_completed"] = summary.num_requests - summary.completed
        return row


class TwinBench:
    def __init__(self, running: Service, watch: Watch, plan: Plan, tick: Tick) -> None:
        self._running, self._watch, self._plan, self._tick = running, watch, plan, tick
        self._bench = ServiceBench(running, watch, SIZE, BATCHES)
        self._num_drawn = 0

    async def run(self) -> Result:
        bench, sizes = await self._bench.plan()
        stages, source = await self._stages()
        encoder = next(
            each for each in self._running.driver.engines() if each.stage is Stage.ENCODE
        )
        model = model_of(
            self._running.deployment,
            stages,
            bench.item_tokens,
            encoder.max_batch_tokens,
            sizes.kv_tokens,
        )
        rows = [await self._rate(rate, model, stages, bench) for rate in self._plan.rates_per_s]
        return {
            "rates": rows,
            "profile": source,
            "host": {name: getattr(model.host, name) for name in model.host.__slots__},
            "num_requests": self._plan.num_requests * self._plan.rounds,
            "rounds": self._plan.rounds,
            "seed": self._plan.seed,
            "num_cores": model.num_cores,
        }

    async def _stages(self) -> tuple[Stages, str]:
        """And where they come from, in words."""
        if self._plan.profile is None:
            return await self._bench.measure(self._tick), "measured in this run"
        made, stages = profiled.read(self._plan.profile)
        await self._bench.warm_up()
        deployment = self._running.deployment
        differs = mismatch(made.key, here(deployment, divide.facts_of(deployment.device)))
        source = f"{self._plan.profile}, {made.made:%Y-%m-%d %H:%M}"
        return stages, f"{source} ({differs})" if differs else source

    async def _rate(
        self, rate_per_s: float, model: Model, stages: Stages, bench: StagesBench
    ) -> Result:
        served, simulated = Side([], [], []), Side([], [], [])
        slower, others_cores = [], []
        for number in range(self._plan.rounds):
            self._tick(f"{rate_per_s:g} requests/s, {number + 1}")
            seed = self._plan.seed + number
            slower.append(await self._slower(stages, bench))
            rng = random.Random(f"{seed}:{rate_per_s}")  # noqa: S311
            times_s = Arrivals("poisson", rate_per_s).times(self._plan.num_requests, rng)
            others = Others()
            records, busy_s = await self._serve(times_s)
            others_cores.append(others.cores())
            served.add(records, busy_s)
            run = model.simulate(requests(times_s, self._watch.shapes()), seed)
            by_stage: dict[str, float] = dict.fromkeys(Stage, 0.0)
            for name, stage in run.stages.items():
                by_stage[stage] += run.busy_s[name]
            simulated.add(run.records, by_stage)
        return compared(rate_per_s, served.row(), simulated.row()) | {
            "slower": round(fmean(slower), 3),
            "others_cores": round(fmean(others_cores), 3),
        }

    async def _slower(self, stages: Stages, bench: StagesBench) -> float:
        """How long the engines take now, of what the profile says: machines change their speed."""
        middle = stages.prefill[len(stages.prefill) // 2]
        now: PrefillCalls = await bench.prefill(middle.tokens)
        first = stages.encode[0]
        encode = await bench.encode(first.batch)
        return fmean([now.engine_s / middle.engine_s, encode.engine_s / first.engine_s])

    async def _serve(self, times_s: Sequence[float]) -> tuple[list[Record], Mapping[str, float]]:
        """Records, and CPU seconds of the cores by stage."""
        asked = mix.Mix(sizes={SIZE: 1.0}, num_output_tokens=ANSWER_TOKENS)
        first, self._num_drawn = self._num_drawn, self._num_drawn + len(times_s)
        drawn = [
            mix.request(asked, self._plan.seed + 2, first + index) for index in range(len(times_s))
        ]
        planned = [
            Planned(
                at_s,
                {
                    "messages": each.messages,
                    "max_tokens": each.max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            )
            for at_s, each in zip(times_s, drawn, strict=True)
        ]
        service = self._running
        self._watch.reset()
        before = profile_cpu.used_s(service)
        samples = await run_in_process(service.address, service.deployment.name, planned)
        records = [sample.record for sample in samples]
        used_s = profile_cpu.since(before, profile_cpu.used_s(service))
        engines = {engine.stage: engine.worker_id for engine in service.driver.engines()}
        return records, {stage: used_s[profile_cpu.core(engines[stage])] for stage in Stage}


def compared(rate_per_s: float, served: Result, simulated: Result) -> Result:
    """``error``: of what is simulated, as a share of what was measured."""
    names = (*METRICS, "throughput_per_s", *(f"busy.{stage}" for stage in Stage))
    error = {
        name: simulated[name] / served[name] - 1 if served[name] and simulated[name] else None
        for name in names
    }
    return {
        "rate_per_s": rate_per_s,
        "measured": served,
        "simulated": simulated,
        "error": error,
    }


def requests(times_s: Sequence[float], shapes: Sequence[Shape]) -> list[Request]:
    """As the simulator takes them. Raises EngineError where some did not come."""
    if len(shapes) != len(times_s):
        raise EngineError(f"{len(times_s) - len(shapes)} requests did not reach the router")
    found = []
    for at_s, shape in zip(times_s, shapes, strict=True):
        items = tuple(Media(item.modality, item.num_tokens) for item in shape.items)
        text = shape.num_prompt_tokens - sum(item.num_tokens for item in items)
        found.append(Request(at_s, items, text, shape.max_new_tokens))
    return found


def run(deployment: Deployment, plan: Plan, output: command.Output) -> int:
    """The exit code. Starts one engine of each stage and ends them."""
    if plan.profile is not None:
        profiled.read(plan.profile)  # before minutes of measuring

    async def measured(console: Console) -> Result:
        watch = Watch()
        with StartProgress(console) as starting:
            async with serving(deployment, starting, watch) as running:
                starting.close()
                with command.progress(console, plan.num_runs) as tick:
                    return await TwinBench(running, watch, plan, tick).run()

    return command.run_measured(measured, twin_shown.of_twin, output, kind="bench-twin")
