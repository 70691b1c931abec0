"""The engines of a deployment: their names, stages and devices, in the order of the stages."""

from collections.abc import Iterator
from dataclasses import dataclass

from easerve.config import Deployment, LocalPrefill, StageSection
from easerve.types import Stage, WorkerId


@dataclass(frozen=True, slots=True)
class Member:
    """One engine. ``devices``: its GPUs; ``cores``: of a CPU, none for all of them.

    ``beside``: the encoders whose devices a local prefill engine shares; of any other none.
    """

    worker_id: WorkerId
    stage: Stage
    section: StageSection | LocalPrefill
    devices: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    beside: tuple[WorkerId, ...] = ()

    @property
    def kind(self) -> str:
        """The stage, or ``local prefill``."""
        return f"local {self.stage}" if self.beside else str(self.stage)


def members(deployment: Deployment) -> list[Member]:
    """Every engine: ``encode-0``, ..., then ``local-prefill-0``, ..., prefill and decode."""
    staged = list(_staged(deployment))
    encoders = [member for member in staged if member.stage is Stage.ENCODE]
    return [*encoders, *_local(deployment, encoders), *staged[len(encoders) :]]


def _staged(deployment: Deployment) -> Iterator[Member]:
    """The engines of the stages' sections; GPUs are the lowest that no section names."""
    sections = {
        Stage.ENCODE: deployment.encode,
        Stage.PREFILL: deployment.prefill,
        Stage.DECODE: deployment.decode,
    }
    named = {gpu for each in sections.values() for group in each.devices or () for gpu in group}
    free = (gpu for gpu in range(1 << 16) if gpu not in named)
    for stage, section in sections.items():
        for index in range(section.replicas):
            devices: tuple[int, ...] = ()
            if section.devices is not None:
                devices = section.devices[index]
            elif deployment.device == "cuda":
                devices = tuple(next(free) for _ in range(section.tensor_parallel_size))
            cores = section.cores[index] if section.cores is not None else ()
            yield Member(WorkerId(f"{stage}-{index}"), stage, section, devices, cores)


def _local(deployment: Deployment, encoders: list[Member]) -> Iterator[Member]:
    """The local prefill engines (config.LocalPrefill says where they are)."""
    section = deployment.local_prefill
    if section is None:
        return
    if deployment.device == "cpu":
        for index, each in enumerate(encoders):
            worker_id = WorkerId(f"local-prefill-{index}")
            yield Member(worker_id, Stage.PREFILL, section, (), each.cores, (each.worker_id,))
        return
    gpus = [gpu for each in encoders for gpu in each.devices]
    size = section.tensor_parallel_size
    for index, begin in enumerate(range(0, len(gpus), size)):
        devices = tuple(gpus[begin : begin + size])
        beside = tuple(each.worker_id for each in encoders if set(each.devices) & set(devices))
        worker_id = WorkerId(f"local-prefill-{index}")
        yield Member(worker_id, Stage.PREFILL, section, devices, (), beside)
