"""What is added to the launch of an encoder and its local prefill engine that divide a device."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from easerve.config import ConfigError, Deployment
from easerve.engines.partition.ladder import OFF, Choice
from easerve.engines.partition.setup import Setup
from easerve.engines.vllm.topology import Member
from easerve.types import Stage

MIDDLEWARE = "easerve.engines.vllm.announcer.Announcer"
# Other ranks, other processes that announce, another worker, graphs that stay on the SMs they had.
LEAVES = frozenset(
    "--pipeline-parallel-size -pp --tensor-parallel-size -tp --data-parallel-size -dp "
    "--api-server-count -asc --worker-cls --compilation-config -cc --optimization-level -O".split()
)
EAGER = {"cudagraph_mode": "NONE"}


def setup_of(
    deployment: Deployment, member: Member, run_dir: Path, choice: Choice | None
) -> Setup | None:
    """None for an engine that has its device alone, or shares it undivided."""
    partition = deployment.partition
    divides = member.stage is Stage.ENCODE or member.beside
    if partition is None or choice is None or choice.rung == OFF.name or not divides:
        return None
    if deployment.device == "cpu" and deployment.encode.replicas > 1 and not member.cores:
        raise ConfigError(
            "partition: of several encoders each needs cores of its own (encode.cores)"
        )
    for argument in (*deployment.engine.extra_args, *member.section.extra_args):
        if _option(argument) in LEAVES:
            raise ConfigError(
                f"extra_args: {argument} does not go with the section partition: it would take "
                f"{member.worker_id} out of its part of the device"
            )
    cores, keeps = member.cores or tuple(os.sched_getaffinity(0)), partition.min_prefill_units or 1
    if choice.rung == "cpu" and keeps >= len(cores):
        raise ConfigError(
            f"partition.min_prefill_units: {keeps} of {len(cores)} cores leave encode none"
        )
    encoder = member.beside[0] if member.beside else member.worker_id
    return Setup(
        cell=str(run_dir / f"{encoder}.cell"),
        driver=choice.rung,
        why=choice.why,
        cores=member.cores,
        min_prefill=partition.min_prefill_units,
        hold_s=partition.hold_s,
        patience_s=partition.patience_s,
    )


def _option(argument: str) -> str:
    """Its name, of the ways that vLLM takes it: ``--a_b=c``, ``--a-b.c``, ``-O3``."""
    name = re.split("[=.]", argument)[0].replace("_", "-")
    return name[:2] if name.startswith("-O") else name


def arguments(deployment: Deployment, member: Member, setup: Setup) -> Iterator[str]:
    encodes = member.stage is Stage.ENCODE
    module = "cpu_worker.Cpu" if deployment.device == "cpu" else "cuda_worker.Cuda"
    worker = "EncodeWorker" if encodes else "PrefillWorker"
    yield from ("--worker-cls", f"easerve.engines.vllm.{module}{worker}")
    if encodes:
        yield from ("--middleware", MIDDLEWARE)
    elif setup.driver == "green-context":
        # A graph stays on the SMs that it was captured on.
        yield from ("--compilation-config", json.dumps(EAGER))
