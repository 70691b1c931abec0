"""The third part of ``easerve profile``: what one engine of each stage does alone, in requests per
second of a workload; what a search goes by (``search.capacity``).

Rows are in a file as soon as they are measured: a run that is killed and repeated measures what is
missing, and starts no engines for what is there. On GPUs the engines are started once for each
tensor parallel size; stages that have devices of their own are measured at once. On a CPU one is
measured after another, for all of them share its caches and its memory.
"""

import json
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from easerve import __version__
from easerve.cli.bench import command
from easerve.cli.bench.cpu_stages import closed_loop
from easerve.cli.bench.others import Others
from easerve.cli.deploy import service
from easerve.cli.profile_capacity_bench import CapacityBench, LeftOutError, Workload, limits_of
from easerve.cli.profile_capacity_sets import EngineSet, lanes, section_of, sets_of
from easerve.cli.profile_engines import Progress
from easerve.cli.profile_service import alone, content_of
from easerve.cli.progress import StartProgress
from easerve.config import Deployment
from easerve.costs import profile as profiles
from easerve.engines.protocol import Engine
from easerve.engines.vllm.client import VllmEngine
from easerve.search.capacity import Cell, Key, Row, Store, Table, best, opened
from easerve.types import Stage
from easerve.workload import mix

ENCODE, PREFILL, DECODE = Stage
LEFT_OUT = {"replicas", "devices", "tensor_parallel_size", "gpu_memory_utilization"}
"""Of a section: what is told elsewhere, or changes nothing of what one engine does alone."""
ENGINE_KEYS = {"max_model_len", "mm_processor_kwargs", "media_cache", "extra_args", "cpu_threads"}
Starts = Callable[[Deployment, Progress], AbstractAsyncContextManager["Running"]]


@dataclass(frozen=True, slots=True)
class Running:
    """Engines of each stage, one of each, that have nothing to do."""

    engines: Mapping[Stage, Engine]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Asked:
    """``batches``: of an encoder's calls. ``sizes``: tensor parallel, of prefill and decode; None
    for those of the file. ``fresh``: nothing that was measured before counts.
    """

    workload: Workload
    batches: Sequence[int]
    sizes: Sequence[int] | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """``file``: where rows are kept, under ``key``. ``fresh``: nothing that is there counts."""

    workload: Workload
    sets: Sequence[EngineSet]
    key: Key
    file: Path
    fresh: bool = False

    @property
    def cells(self) -> list[Cell]:
        return [cell for each in self.sets for cell in each.cells]


@dataclass
class Found:
    """``left_out``: cells that the engines cannot do, in words. ``prompt_tokens``: of a request,
    None where no engine was asked.
    """

    rows: Sequence[Row] = ()
    left_out: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    others_cores: float = 0.0


def plan_of(
    deployment: Deployment,
    asked: Asked,
    here: profiles.Key,
    file: Path,
    num_gpus: int,
) -> Plan:
    """``file``: of the profile, beside which the rows are kept. Raises ConfigError."""
    return Plan(
        asked.workload,
        sets_of(deployment, asked.batches, asked.sizes, num_gpus),
        key_of(deployment, here, asked.workload),
        file.with_suffix(".capacity.jsonl"),
        asked.fresh,
    )


def key_of(deployment: Deployment, here: profiles.Key, workload: Workload) -> Key:
    """What the rows hold for: ``here`` is the device, the model and what is installed."""
    units = "core" if deployment.device == "cpu" else "SM"
    cut = alone(deployment)
    settings = {
        "engine": deployment.engine.model_dump(include=ENGINE_KEYS, exclude_defaults=True),
        **{
            stage.value: section_of(cut, stage).model_dump(exclude=LEFT_OUT, exclude_defaults=True)
            for stage in Stage
        },
    }
    driver = [] if here.driver is None else [f"driver {here.driver}"]
    versions = [f"easerve {__version__}", f"vllm {here.vllm}", f"torch {here.torch}", *driver]
    told = json.dumps({name: each for name, each in settings.items() if each}, sort_keys=True)
    return Key(
        f"{here.device}, {here.units} {units}s",
        here.model,
        f"{', '.join(versions)}, {here.dtype}, {told}",
        str(workload),
    )


# Measuring ----------------------------------------------------------------------------------------


@asynccontextmanager
async def running(deployment: Deployment, progress: Progress) -> AsyncIterator[Running]:
    """The engines of a deployment that has one of each stage; leaving ends them.

    Raises ConfigError, EngineStartError, EngineError.
    """
    async with service(deployment, progress, lambda *_: None) as served:
        engines = {engine.stage: engine for engine in served.driver.engines()}
        decode = engines[DECODE]
        assert isinstance(decode, VllmEngine)
        yield Running(engines, await decode.learn_limits())


async def measure(plan: Plan, console: Console, starts: Starts) -> Found:
    """The rows that the file lacks are measured, with progress on the console.

    ``starts``: engines, as ``running`` does; what it raises is raised.
    """
    found, cells = Found(), plan.cells
    with opened(plan.file, plan.key, plan.fresh) as store:
        if kept := sum(cell in store.rows for cell in cells):
            console.print(f"{kept} of {len(cells)} capacities are in {plan.file}", soft_wrap=True)
        for row in filter(None, map(plan.workload.nothing, cells)):
            if row.cell not in store.rows:
                store.add(row)
        for each in plan.sets:
            if missing := [cell for cell in each.cells if cell not in store.rows]:
                async with _ready(each.deployment, plan.workload, console, starts) as bench:
                    found.prompt_tokens = bench.prompt_tokens
                    await _measure(bench, missing, lanes(each.deployment), store, found, console)
        found.rows = tuple(store.rows[cell] for cell in cells if cell in store.rows)
    return found


@asynccontextmanager
async def _ready(
    deployment: Deployment, workload: Workload, console: Console, starts: Starts
) -> AsyncIterator[CapacityBench]:
    with StartProgress(console) as starting:
        async with starts(deployment, starting) as started:
            starting.close()
            engines = started.engines
            picture = mix.request(mix.Mix(sizes={workload.size: 1.0}), seed=2, index=0)
            encoder, prefill = engines[ENCODE], engines[PREFILL]
            content = await content_of(deployment.name, picture, encoder, prefill)
            limits = await limits_of(engines, started.max_model_len)
            yield CapacityBench(engines, content, limits, workload)


async def _measure(
    bench: CapacityBench,
    cells: Sequence[Cell],
    apart: Sequence[Collection[Stage]],
    store: Store,
    found: Found,
    console: Console,
) -> None:
    """Each lane at once, and in a lane one cell after another; the first error ends all."""
    with command.progress(console, len(cells)) as tick:

        async def lane(stages: Collection[Stage]) -> None:
            for cell in (cell for cell in cells if cell.stage in stages):
                tick(str(cell))
                try:
                    store.add(await bench.row(cell))
                except LeftOutError as error:
                    found.left_out.append(f"{cell}: {error}")
                    console.print(f"{cell} is left out: {error}", soft_wrap=True)

        others = Others()
        await closed_loop([partial(lane, stages) for stages in apart], len(apart))
        found.others_cores = round(max(found.others_cores, others.cores()), 3)


# Result -------------------------------------------------------------------------------------------


def head(key: profiles.Key, unit: str) -> dict[str, Any]:
    """Of a result without a profile."""
    of = key.model_dump(include={"device", "model", "units", "dtype"})
    rates = dict.fromkeys(map(str, Stage))
    return {**of, "unit": unit, "capacity_per_s": rates, "others_cores": 0.0}


def result_of(found: Found, plan: Plan) -> dict[str, Any]:
    """What ``--json`` says of it. Rates of ``capacity_requests_per_s`` are the best of any batch,
    of the smallest engine of a stage; null: it is asked for nothing.
    """
    most = {stage.value: row for stage, row in _most(found.rows)}
    rates = {stage: row.per_s if row.per_s < math.inf else None for stage, row in most.items()}
    return {
        "capacity_per_s": _per_s(rates, plan.workload, found.prompt_tokens),
        "capacity_requests_per_s": rates,
        "capacity_rows": Table(tuple(found.rows)).to_json(),
        "capacity_left_out": found.left_out,
        "capacity_workload": plan.key.workload,
        "capacity_file": str(plan.file),
        "others_cores": found.others_cores,
    }


def _most(rows: Sequence[Row]) -> Iterator[tuple[Stage, Row]]:
    for stage in Stage:
        sizes = [row.tp for row in rows if row.stage is stage]
        of_least = [row for row in rows if row.stage is stage and row.tp == min(sizes)]
        if (row := best(of_least)) is not None:
            yield stage, row


def _per_s(
    rates: Mapping[str, float | None], workload: Workload, prompt_tokens: int | None
) -> dict[str, float | None]:
    """Items of encode, tokens of prefill and decode."""
    each = {
        ENCODE: workload.num_items,
        PREFILL: prompt_tokens,
        DECODE: workload.output_tokens,
    }
    return {
        stage: None if (rate := rates.get(stage)) is None or num is None else round(rate * num, 3)
        for stage, num in each.items()
    }


def merged(result: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A profile's result with this part: what the other parts measured of a rate stays."""
    before, now = result["capacity_per_s"], more["capacity_per_s"]
    rates = {name: now[name] if each is None else each for name, each in before.items()}
    others = max(result["others_cores"], more["others_cores"])
    return {**result, **more, "capacity_per_s": rates, "others_cores": others}
