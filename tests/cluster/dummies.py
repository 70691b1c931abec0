"""Deployments of dummy engines."""

import os
import socket
import sys
from pathlib import Path

from easerve.cluster.local import Folders, ForkServerSpec
from easerve.engines.vllm.launch import SITE, EngineSpec
from easerve.types import Stage, WorkerId

ROOT = Path(__file__).parents[2]
ENTRY = "tests.cluster.dummy_engine"
ENV = {"PYTHONPATH": os.pathsep.join(map(str, (SITE, ROOT, ROOT / "src"))), "DUMMY": "set"}


def engine_specs(folders: Folders, *engines: str) -> list[EngineSpec]:
    """One engine for each text, whose words it is told: ``"child stubborn"``."""
    specs = []
    for index, words in enumerate(engines):
        name = WorkerId(f"decode-{index}")
        address, log = folders.run / f"{name}.sock", folders.logs / f"{name}.log"
        argv = (str(address), *words.split())
        specs.append(EngineSpec(name, Stage.DECODE, argv, ENV, address, log))
    return specs


def fork_server(*words: str) -> ForkServerSpec:
    return ForkServerSpec(
        (sys.executable, "-m", "tests.cluster.dummy_fork_server", "{fd}", *words), ENV
    )


async def healthy(spec: EngineSpec) -> bool:
    """Whether somebody listens."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(spec.socket)) == 0


def pids_in(log: Path) -> list[int]:
    """The processes that an engine has told of."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith("pid ")]
