"""``easerve bench control``: what the control plane itself costs, over engines of fixed latency.

Each system gets the same requests at the same times; they take turns. Added latency is a quantile
of the system's less the same quantile of the engines asked directly. Saturation is a closed loop.
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from easerve.bench.client import Planned, run_in_process
from easerve.bench.cpu import cpu_seconds, scheduled_s
from easerve.bench.sample import Sample
from easerve.cli.bench import command, control_shown
from easerve.cli.bench.control_systems import (
    DIRECT,
    OURS,
    ROUTER_PD,
    Cores,
    System,
    divide_cores,
    started,
)
from easerve.cli.bench.encode import medians
from easerve.engines.fake_server import MODEL, Latency
from easerve.goodput import summarise
from easerve.workload import mix
from easerve.workload.arrivals import Arrivals

MODALITIES = ("text", "image")
CLIENT_BOUND = 0.9  # of what the engines give asked directly
NAMED_RATE_PER_S = 200.0  # of the figures that stand for all
Result = dict[str, Any]
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """``num_saturating``: requests of a closed loop of ``concurrency`` clients."""

    rates_per_s: Sequence[float]
    modalities: Sequence[str]
    duration_s: float
    num_tokens: int
    num_saturating: int
    concurrency: int
    rounds: int
    seed: int
    router: Path | None

    @property
    def num_systems(self) -> int:
        return 4 if self.router else 2

    @property
    def num_runs(self) -> int:
        """For a progress bar."""
        each = self.rounds * (len(self.rates_per_s) + 1) * self.num_systems
        return len(self.modalities) * (each + self.num_systems)


def run(plan: Plan, output: command.Output) -> int:
    """The exit code."""

    async def measured(console: Console) -> Result:
        cores = divide_cores()
        with _on(cores.rest), command.progress(console, plan.num_runs) as tick:
            async with started(plan.router, cores) as systems:
                return await _measure(plan, cores, systems, tick)

    return command.run_measured(measured, control_shown.sections, output, kind="bench-control")


@contextmanager
def _on(cores: frozenset[int]) -> Iterator[None]:
    """This process, and the load clients that it starts, on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _measure(plan: Plan, cores: Cores, systems: Sequence[System], tick: Tick) -> Result:
    loads: Result = {}
    for modality in plan.modalities:
        bench = ControlBench(plan, modality, systems, tick)
        await bench.warm_up()
        rates = {f"{rate:g}": await bench.at_rate(rate) for rate in plan.rates_per_s}
        loads[modality] = {"rates": rates, "saturated": await bench.saturated()}
    return {
        "latency_s": asdict(Latency()),
        "num_output_tokens": plan.num_tokens,
        "cores": {"router": sorted(cores.router), "rest": sorted(cores.rest)},
        "modalities": loads,
        **figures(loads),
    }


def figures(loads: Mapping[str, Any]) -> Result:
    """Those that stand for all: of the first modality, added at the rate next to 200/s.

    ``req_per_s_of_a_core``: by the CPU time of a request at saturation. ``ratio_vs_router``: of
    that to vllm-router's. ``is_client_bound``: what saturated was the client and the engines, for
    without anything in between they are hardly faster; then ``max_req_per_s`` says too little.
    """
    first = next(iter(loads.values()))
    rates, saturated = first["rates"], first["saturated"]
    named = rates[min(rates, key=lambda rate: abs(float(rate) - NAMED_RATE_PER_S))][OURS]
    ours, router = saturated[OURS], saturated.get(ROUTER_PD)
    return {
        "added_p50_s": named["added_p50_s"],
        "added_p99_s": named["added_p99_s"],
        "max_req_per_s": ours["req_per_s"],
        "is_client_bound": ours["req_per_s"] > CLIENT_BOUND * saturated[DIRECT]["req_per_s"],
        "cpu_s_per_request": ours["cpu_s"],
        "req_per_s_of_a_core": 1 / ours["cpu_s"],
        "ratio_vs_router": router["cpu_s"] / ours["cpu_s"] if router else None,
    }


class ControlBench:
    """The systems under requests of one modality."""

    def __init__(self, plan: Plan, modality: str, systems: Sequence[System], tick: Tick) -> None:
        self._plan, self._modality, self._systems, self._tick = plan, modality, systems, tick
        self._num_drawn = 0
        self._rng = random.Random(plan.seed)  # noqa: S311 (arrivals, not secrets)

    async def warm_up(self) -> None:
        """Connections, picture decoders, and the estimates of the control core."""
        for system in self._systems:
            self._tick(f"{self._modality}, warm-up, {system.name}")
            await self._run(system, self._requests(2 * self._plan.concurrency), None)

    async def at_rate(self, rate_per_s: float) -> Result:
        """By system: medians of the rounds."""
        rows: dict[str, list[Result]] = {system.name: [] for system in self._systems}
        num = max(20, round(rate_per_s * self._plan.duration_s))
        for number in range(self._plan.rounds):
            times_s = Arrivals("poisson", rate_per_s).times(num, self._rng)
            row: Result = {}
            for system in _rotated(self._systems, number):
                self._tick(f"{self._modality}, {rate_per_s:g}/s, {system.name}, {number + 1}")
                row[system.name] = await self._run(system, self._requests(num), times_s)
            for name, figures in row.items():
                rows[name].append({**figures, **_added(figures, row[DIRECT])})
        return {name: _together(each) for name, each in rows.items()}

    async def saturated(self) -> Result:
        """The same in a closed loop."""
        rows: dict[str, list[Result]] = {system.name: [] for system in self._systems}
        for number in range(self._plan.rounds):
            for system in _rotated(self._systems, number):
                self._tick(f"{self._modality}, saturated, {system.name}, {number + 1}")
                requests = self._requests(self._plan.num_saturating)
                rows[system.name].append(await self._run(system, requests, None))
        return {name: _together(each) for name, each in rows.items()}

    async def _run(
        self, system: System, bodies: Sequence[dict[str, Any]], times_s: Sequence[float] | None
    ) -> Result:
        at_s = times_s or [0.0] * len(bodies)
        planned = [Planned(*each) for each in zip(at_s, bodies, strict=True)]
        concurrency = None if times_s else self._plan.concurrency
        before, others = _cpu_s(system)
        samples = await run_in_process(system.url, MODEL, planned, concurrency=concurrency)
        after, others_after = _cpu_s(system)
        return _row(samples) | {
            "cpu_s": (after - before) / len(samples),
            "decoders_cpu_s": (others_after - others) / len(samples),
        }

    def _requests(self, num: int) -> list[dict[str, Any]]:
        """New ones: no picture comes twice."""
        asked = mix.Mix(text_share=0.0 if self._modality == "image" else 1.0)
        first, self._num_drawn = self._num_drawn, self._num_drawn + num
        drawn = (mix.request(asked, self._plan.seed, first + index) for index in range(num))
        fixed = {"max_tokens": self._plan.num_tokens, "temperature": 0}
        return [{"messages": request.messages, **fixed} for request in drawn]


def _cpu_s(system: System) -> tuple[float, float]:
    """CPU seconds of a router's process, and of the processes that it has started."""
    if system.pid is None:
        return 0.0, 0.0
    own_s = scheduled_s(system.pid)
    whole_s = cpu_seconds([system.pid]).get(system.pid, own_s)
    return own_s, max(0.0, whole_s - own_s)


def _row(samples: Sequence[Sample]) -> Result:
    """Of a run: quantiles in seconds, and how many were not completed."""
    records = [sample.record for sample in samples]
    begin_s = min(record.sent_s for record in records)
    end_s = max((record.end_s for record in records if record.end_s is not None), default=begin_s)
    run = summarise(records, end_s - begin_s, {})
    return {
        "req_per_s": run.throughput_per_s or 0.0,
        "ttft_p50_s": run.ttft_s.p50,
        "ttft_p99_s": run.ttft_s.p99,
        "latency_p50_s": run.latency_s.p50,
        "latency_p99_s": run.latency_s.p99,
        "lateness_p99_s": run.lateness_p99_s,
        "not_completed": run.num_requests - run.completed,
    }


def _added(row: Result, direct: Result) -> Result:
    """To the time to the first token, and to that of the whole answer."""
    pairs = {"added": "ttft", "added_latency": "latency"}
    return {
        f"{added}_{quantile}_s": None
        if None in (row[f"{of}_{quantile}_s"], direct[f"{of}_{quantile}_s"])
        else row[f"{of}_{quantile}_s"] - direct[f"{of}_{quantile}_s"]
        for added, of in pairs.items()
        for quantile in ("p50", "p99")
    }


def _rotated(systems: Sequence[System], by: int) -> list[System]:
    by %= len(systems)
    return [*systems[by:], *systems[:by]]


def _together(rows: Sequence[Result]) -> Result:
    """Medians of the rounds; what was lost is lost."""
    return {**medians(rows), "not_completed": sum(row["not_completed"] for row in rows)}
