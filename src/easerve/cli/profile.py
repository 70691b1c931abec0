"""``easerve profile``: how long the encoder takes, by compute units and batch, on this device; what
each stage costs, as a simulator needs it; and what each stage does alone, as a search needs it.

The first is measured on an encoder and its local prefill engine, without a router; the second on
one engine of each stage that has its device to itself, behind the router; ``profile_capacity`` has
the third.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from easerve import __version__
from easerve.cli import divide, profile_capacity, profile_shown
from easerve.cli.bench import command
from easerve.cli.bench.others import Others
from easerve.cli.profile_capacity_bench import Workload
from easerve.cli.profile_engines import EnginesBench, measured_peak, started
from easerve.cli.profile_here import here, path_of
from easerve.cli.profile_service import NUM_PARTS, ServiceBench, Span, serving
from easerve.cli.profile_sweep import Plan, levels, sweep
from easerve.cli.progress import StartProgress
from easerve.config import ConfigError, Deployment, build, merge, read_file
from easerve.costs import profile as profiles
from easerve.costs import roofline
from easerve.costs.profile import P50, Capacity, Key, Peak, Profile
from easerve.costs.profiled import host_of
from easerve.costs.stages import Stages
from easerve.engines.partition import ladder
from easerve.engines.partition.facts import Facts
from easerve.engines.vllm.launch import EngineSpec
from easerve.engines.vllm.models import config_of
from easerve.policy.partition import HALF, MinUnits, Surface

UNITS: Mapping[str, Literal["core", "SM"]] = {"cpu": "core", "cuda": "SM"}
VALUE_BYTES = {"float32": 4}
IN_FILE = ("surface", "stages")
PARTS = (*IN_FILE, "capacity")
MAX_SIDE = 8192
MAX_BATCH, MAX_UNITS, MAX_SIZE = 1024, HALF - 1, 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """``parts``: of ``PARTS``; what the file has of the others that are ``IN_FILE`` is kept.
    ``units`` None: up to 16 numbers of them. ``size`` None: what the encoder was made for.

    The rest is of part capacity: the shape of a request, and see ``profile_capacity``.
    """

    parts: Sequence[str]
    batches: Sequence[int]
    units: Sequence[int] | None
    num_runs: int
    target_s: float
    size: tuple[int, int] | None
    folder: Path
    num_items: int = 1
    text_tokens: int = 24
    output_tokens: int = 32
    tensor_parallel_sizes: Sequence[int] | None = None
    fresh: bool = False

    @property
    def makes_profile(self) -> bool:
        return bool(set(self.parts) & set(IN_FILE))


def read(path: Path, *, keep_profile: bool = False) -> Deployment:
    """The deployment, with sections local_prefill and partition if it has none."""
    content = read_file(path)
    if content.get("local_prefill") is None:
        if isinstance(encode := content.get("encode"), dict):
            # A share of a GPU is of engines that have one to themselves.
            shared = {key: encode[key] for key in encode if key != "gpu_memory_utilization"}
            content = {**content, "encode": shared}
        content = merge(content, {"local_prefill": {}})
    if content.get("partition") is None:
        content = merge(content, {"partition": {}})
    over = {} if keep_profile else {"partition": {"profile": None}}
    return build(merge(content, over), str(path))


def size_of(text: str) -> tuple[int, int]:
    """``336x336`` -> width and height. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    size = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 4 <= min(size) <= max(size) <= MAX_SIDE:
        raise ConfigError(f"--size: {text!r} is not e.g. 336x336, from 4 to {MAX_SIDE} pixels")
    return size


def run(deployment: Deployment, asked: Asked, output: command.Output) -> int:
    """The exit code. No profile is written unless all of it has been measured."""
    facts = _facts(deployment, asked)
    key = here(deployment, facts)
    file = asked.folder / path_of(key, UNITS[deployment.device])
    _check_folder(file)
    side = roofline.picture_side(config_of(deployment.model))
    size = asked.size or (side, side)
    before = _kept(asked, file, key) if asked.makes_profile else None
    capacity = _capacity(deployment, asked, key, size, file)

    async def of_file(console: Console) -> dict[str, Any]:
        made = before
        if "surface" in asked.parts:
            made = await _surface(deployment, asked, key, size, console)
            if before is not None and before.stages is not None:
                made = _joined(made, before.stages)
        assert made is not None, "what is not measured is in the file"
        if "stages" in asked.parts:
            made = await _with_stages(made, deployment, asked.batches, console)
        profiles.write(made, file)
        console.print(f"profile: {file}", soft_wrap=True)
        work = roofline.encoder(config_of(deployment.model), *size)
        return result_of(made, asked.target_s, work) | {"file": str(file)}

    async def measured(console: Console) -> dict[str, Any]:
        unit = UNITS[deployment.device]
        result = await of_file(console) if asked.makes_profile else profile_capacity.head(key, unit)
        if capacity is None:
            return result
        found = await profile_capacity.measure(capacity, console, profile_capacity.running)
        return profile_capacity.merged(result, profile_capacity.result_of(found, capacity))

    return command.run_measured(
        measured, profile_shown.of_profile, output, "EAServe profile", "profile"
    )


def _facts(deployment: Deployment, asked: Asked) -> Facts:
    """Of this machine. Raises ConfigError where what is asked needs a device to be divided."""
    if not asked.makes_profile:
        return divide.facts_of(deployment.device)
    chosen = divide.choose(deployment)
    assert chosen is not None, "the deployment has a section partition"
    facts, choice = chosen
    if choice.rung == ladder.OFF.name:
        raise ConfigError("; ".join(f"{each.rung}: {each.why}" for each in choice.tried))
    return facts


def _kept(asked: Asked, file: Path, key: Key) -> Profile | None:
    """What there is of what is not measured. Raises ConfigError where that is needed and lacks."""
    if set(IN_FILE) <= set(asked.parts):
        return None
    if "surface" in asked.parts and not file.exists():
        return None
    before = profiles.read(file)
    if differs := profiles.mismatch(before.key, key):
        raise ConfigError(f"--parts {','.join(asked.parts)}: {file}: {differs}")
    return before


async def _surface(
    deployment: Deployment, asked: Asked, key: Key, size: tuple[int, int], console: Console
) -> Profile:
    """The first half."""
    peaks: list[Peak] = []
    with StartProgress(console) as starting:

        async def first(encoder: EngineSpec) -> None:
            peaks.append(await measured_peak(deployment, encoder, starting))

        async with started(deployment, size, starting, first) as bench:
            starting.close()
            return await _measure(deployment, asked, bench, peaks[0], key, size, console)


async def _measure(
    deployment: Deployment,
    asked: Asked,
    bench: EnginesBench,
    peak: Peak,
    key: Key,
    size: tuple[int, int],
    console: Console,
) -> Profile:
    plan = plan_of(asked, bench, console)
    with command.progress(console, plan.num_rounds + 2) as tick:
        others = Others()
        runs = await sweep(bench, plan, tick)
        others_cores = others.cores()
        tick("encode under load")
        encode = await bench.encode_rate(plan.batches[-1])
        tick("prefill under load")
        prefill = await bench.prefill_rate()
    return Profile(
        made=datetime.now(UTC).replace(microsecond=0),
        easerve=__version__,
        key=key,
        unit=UNITS[deployment.device],
        partition=bench.driven.driver,
        picture=size,
        item_tokens=bench.item_tokens,
        others_cores=round(others_cores, 3),
        capacity=Capacity(
            encode_items_per_s=round(encode, 3), prefill_tokens_per_s=round(prefill, 3)
        ),
        peak=peak,
        runs=tuple(runs),
    )


async def _with_stages(
    made: Profile, deployment: Deployment, batches: Sequence[int], console: Console
) -> Profile:
    """The second half; ``others_cores`` becomes that of the half with the more of them."""
    with StartProgress(console) as starting:
        span = Span()
        async with serving(deployment, starting, span) as running:
            starting.close()
            bench = ServiceBench(running, span, made.picture, batches)
            with command.progress(console, NUM_PARTS) as tick:
                others = Others()
                stages = await bench.measure(tick)
                others_cores = round(max(made.others_cores, others.cores()), 3)
    return _joined(made, stages).model_copy(update={"others_cores": others_cores})


def _capacity(
    deployment: Deployment, asked: Asked, here: Key, size: tuple[int, int], file: Path
) -> profile_capacity.Plan | None:
    """The third part, whose rows are in a file beside the profile's. Raises ConfigError."""
    if "capacity" not in asked.parts:
        return None
    workload = Workload(asked.num_items, size, asked.text_tokens, asked.output_tokens)
    wanted = profile_capacity.Asked(
        workload, asked.batches, asked.tensor_parallel_sizes, asked.fresh
    )
    num_gpus = len(divide.facts_of("cuda").gpus) if deployment.device == "cuda" else 0
    return profile_capacity.plan_of(deployment, wanted, here, file, num_gpus)


def _joined(made: Profile, stages: Stages) -> Profile:
    decode = {"decode_tokens_per_s": round(decode_rate(stages), 3)}
    capacity = made.capacity.model_copy(update=decode)
    return made.model_copy(update={"stages": stages, "capacity": capacity})


def decode_rate(stages: Stages) -> float:
    """Tokens per second with the most sequences that were measured, of the shortest context."""
    most = max(stages.decode, key=lambda each: (each.sequences, -each.context))
    return most.sequences / profiles.percentile(most.step_s, P50)


def plan_of(asked: Asked, bench: EnginesBench, console: Console) -> Plan:
    """What of that is possible here. Raises ConfigError where nothing is."""
    batches = sorted(batch for batch in asked.batches if batch <= bench.most_items)
    left_out = sorted(set(asked.batches) - set(batches))
    fits = f"a call holds {bench.most_items} items of {bench.item_tokens} tokens"
    if not batches:
        raise ConfigError(f"--batches: {fits}")
    if left_out:
        console.print(f"batches {', '.join(map(str, left_out))} are left out: {fits}")
    parts = bench.driven.parts
    possible = levels(parts)
    if asked.units is not None:
        wrong = [each for each in asked.units if each not in parts]
        if wrong:
            known = ", ".join(map(str, parts)) or "none"
            raise ConfigError(
                f"--units: {wrong[0]} is no part that {bench.driven.driver} can give an encoder "
                f"here: {known}"
            )
        possible = sorted(asked.units)
    return Plan(batches, possible, asked.num_runs)


def result_of(made: Profile, target_s: float, work: roofline.Encoder | None) -> dict[str, Any]:
    """What ``--json`` prints, but for the file."""
    table = MinUnits(Surface(made.item_tokens, made.rows()), target_s).rows
    return {
        "device": made.key.device,
        "model": made.key.model,
        "units": made.key.units,
        "unit": made.unit,
        "dtype": made.key.dtype,
        "partition": made.partition,
        "target_s": target_s,
        "capacity_per_s": {
            "encode": made.capacity.encode_items_per_s,
            "prefill": made.capacity.prefill_tokens_per_s,
            "decode": made.capacity.decode_tokens_per_s,
        },
        "min_units": {str(row.batch): row.units for row in table},
        "over_target": [str(row.batch) for row in table if not row.met],
        "item_tokens": made.item_tokens,
        "others_cores": made.others_cores,
        "num_runs": len(made.runs[0].forward_s),
        "surface": [
            {
                "batch": runs.batch,
                "units": runs.units,
                "contended": runs.contended,
                "p50_s": profiles.percentile(runs.forward_s, P50),
                "p95_s": runs.p95_s,
                "wall_p50_s": profiles.percentile(runs.wall_s, P50),
                "num_late": runs.num_late,
            }
            for runs in made.runs
        ],
        "peak": made.peak.model_dump(),
        "roofline": [] if work is None else _roofline(made, work),
        "stages": None if made.stages is None else _stages(made.stages),
    }


def _stages(stages: Stages) -> dict[str, Any]:
    """Of each kind of call a row: what was asked, the median of the wall, the means."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in ("encode", "prefill", "decode", "pulls", "pushes"):
        for each in getattr(stages, name):
            row = each.model_dump()
            (times,) = (key for key, value in row.items() if isinstance(value, tuple))
            seconds = row.pop(times)
            rows.setdefault(name, []).append(
                row | {times.replace("_s", "_p50_s"): profiles.percentile(seconds, P50)}
            )
    host = dataclasses.asdict(host_of(stages))
    return {**rows, "host": host, "crowding": stages.crowding}


def _roofline(made: Profile, encoder: roofline.Encoder) -> list[Mapping[str, Any]]:
    """Of each batch, alone on all units."""
    rows: list[Mapping[str, Any]] = []
    peak, total = made.peak, max(runs.units for runs in made.runs)
    for runs in made.runs:
        if runs.contended or runs.units < total:
            continue
        work = encoder.forward(runs.batch, VALUE_BYTES.get(made.key.dtype, 2))
        forward_s = profiles.percentile(runs.forward_s, P50)
        reached, memory = work.flops / forward_s, work.intensity * peak.bytes_per_s
        rows.append(
            {
                "batch": runs.batch,
                "flops": work.flops,
                "bytes": work.num_bytes,
                "intensity": work.intensity,
                "forward_s": forward_s,
                "flops_per_s": reached,
                "share_of_peak": reached / peak.flops_per_s,
                "share_of_roof": reached / min(memory, peak.flops_per_s),
                "bound": "memory" if memory < peak.flops_per_s else "compute",
            }
        )
    return rows


def _check_folder(file: Path) -> None:
    """That the profile can be written, before minutes of measuring."""
    there = next(parent for parent in file.parents if parent.exists())
    if not there.is_dir():
        raise ConfigError(f"--out: {there} is not a folder")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"--out: {there} cannot be written")
