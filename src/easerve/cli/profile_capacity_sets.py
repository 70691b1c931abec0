"""Which engines ``easerve profile`` starts together to measure each alone, on which devices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from easerve.cli.profile_service import alone
from easerve.config import ConfigError, Deployment, StageSection
from easerve.engines.vllm.topology import members
from easerve.search.capacity import Cell
from easerve.types import Stage

ENCODE, PREFILL, DECODE = Stage
GPU_SHARE = 0.9
"""Of a GPU that engines share; the rest is for CUDA contexts and graphs."""


@dataclass(frozen=True, slots=True)
class EngineSet:
    """What is measured on engines that are started together."""

    deployment: Deployment
    cells: Sequence[Cell]


def sets_of(
    deployment: Deployment, batches: Sequence[int], sizes: Sequence[int] | None, num_gpus: int
) -> list[EngineSet]:
    """``batches``: of an encoder's calls. ``sizes``: tensor parallel, of prefill and decode; None
    for those of the file. An encoder keeps its own, and is measured with the first of them.

    Raises ConfigError.
    """
    if sizes is not None and deployment.device == "cpu" and set(sizes) != {1}:
        raise ConfigError("--tensor-parallel-sizes: more than 1 needs device: cuda")
    given = [_with_size(deployment, size) for size in sizes] if sizes else [deployment]
    found: list[EngineSet] = []
    for each in given:
        encode = [] if found else _cells(each, ENCODE, batches)
        rest = [
            cell
            for stage in (PREFILL, DECODE)
            for cell in _cells(each, stage, ladder(section_of(each, stage).max_num_seqs))
        ]
        found.append(EngineSet(placed(each, num_gpus), [*encode, *rest]))
    return found


def ladder(most: int) -> list[int]:
    """1, 4, 16, ... and the most."""
    return [*(4**power for power in range(math.ceil(math.log(most, 4)))), most]


def _cells(deployment: Deployment, stage: Stage, batches: Iterable[int]) -> list[Cell]:
    size = section_of(deployment, stage).tensor_parallel_size
    return [Cell(stage, size, batch) for batch in sorted(set(batches))]


def section_of(deployment: Deployment, stage: Stage) -> StageSection:
    section = getattr(deployment, stage)
    assert isinstance(section, StageSection)
    return section


def _with_size(deployment: Deployment, size: int) -> Deployment:
    """Prefill and decode on so many devices; which ones, only where the file says so of as many."""
    changed = {
        stage.value: section.model_copy(update={"tensor_parallel_size": size, "devices": None})
        for stage in (PREFILL, DECODE)
        if (section := section_of(deployment, stage)).tensor_parallel_size != size
    }
    return deployment.model_copy(update=changed)


def placed(deployment: Deployment, num_gpus: int) -> Deployment:
    """One engine of each stage, on GPUs of its own where the machine has enough of them.

    Where it has not, engines share GPUs, the smaller ones with the larger, and their memory. A file
    that names the devices of all stages is followed. Raises ConfigError.
    """
    cut = alone(deployment)
    if deployment.device == "cpu":
        return cut
    sections = {stage: section_of(cut, stage) for stage in Stage}
    if any(section.devices is None for section in sections.values()):
        sections = _on_gpus(sections, num_gpus)
    return cut.model_copy(update={stage.value: each for stage, each in sections.items()})


def _on_gpus(sections: Mapping[Stage, StageSection], num_gpus: int) -> dict[Stage, StageSection]:
    devices: dict[Stage, tuple[int, ...]] = {}
    begin = 0
    for stage in sorted(sections, key=lambda stage: -sections[stage].tensor_parallel_size):
        size = sections[stage].tensor_parallel_size
        if size > num_gpus:
            raise ConfigError(f"{stage}.tensor_parallel_size {size}: this machine has {num_gpus}")
        first = min(begin, num_gpus - size)
        devices[stage] = tuple(range(first, first + size))
        begin = first + size
    most = {
        stage: max(sum(gpu in each for each in devices.values()) for gpu in own)
        for stage, own in devices.items()
    }
    return {
        stage: section.model_copy(update=_share(devices[stage], most[stage]))
        for stage, section in sections.items()
    }


def _share(devices: tuple[int, ...], num_engines: int) -> dict[str, Any]:
    """Of an engine on GPUs of which one is at most so many engines'."""
    if num_engines == 1:
        return {"devices": (devices,)}
    share = math.floor(100 * GPU_SHARE / num_engines) / 100
    return {"devices": (devices,), "gpu_memory_utilization": share}


def lanes(deployment: Deployment) -> list[set[Stage]]:
    """Stages that share devices, together: what one lane measures does not disturb another."""
    if deployment.device == "cpu":
        return [set(Stage)]
    devices = {each.stage: set(each.devices) for each in members(deployment)}
    found: list[set[Stage]] = []
    for stage in devices:
        beside = [lane for lane in found if any(devices[stage] & devices[each] for each in lane)]
        found = [lane for lane in found if lane not in beside] + [{stage}.union(*beside)]
    return found
