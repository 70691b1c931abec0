"""What ``easerve bench transfer`` measures: pairs of engines, one of each connector; and, without
engines, two processes that have all the connectors.
"""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from easerve.cli import deploy
from easerve.cluster.local import (
    EngineStartError,
    Folders,
    LocalCluster,
    make_folders,
    tail,
)
from easerve.cluster.supervisor import PARENT_PID
from easerve.config import Deployment
from easerve.engines.protocol import EngineError
from easerve.engines.vllm import launch
from easerve.engines.vllm.client import VllmEngine
from easerve.engines.vllm.launch import EngineSpec
from easerve.engines.vllm.models import ModelInfo
from easerve.types import Stage

FLAG = "--ec-transfer-config"
ROLES = {Stage.ENCODE: "producer", Stage.PREFILL: "consumer"}
DATA_PLANE, MODULE = "data plane", "easerve.engines.vllm.transfer"
START_S = 300.0
Progress = Callable[[str, str], None]
Storages = Mapping[str, Path | None]


@dataclass(frozen=True, slots=True)
class Pair:
    """An encoder and a prefill engine of one connector, serving ``model``."""

    encoder: VllmEngine
    prefill: VllmEngine
    model: str


@dataclass(frozen=True, slots=True)
class Launch:
    """``specs``: of each connector its encoder and its prefill engine; ``token``: their secret."""

    deployment: Deployment
    info: ModelInfo
    folders: Folders
    token: str
    specs: Mapping[str, tuple[EngineSpec, EngineSpec]]

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """By connector, and by the engine's role: what ``--ec-transfer-config`` says."""
        return {
            name: {ROLES[spec.stage]: json.loads(spec.argv[_value_at(spec)]) for spec in pair}
            for name, pair in self.specs.items()
        }


@contextmanager
def planned(deployment: Deployment, storages: Storages) -> Iterator[Launch]:
    """How to start a pair of engines for each connector in ``storages``.

    None stands for the deployment's own connector, a folder for vLLM's example that keeps its files
    there. The deployment has as many encoders and prefill engines. Raises ConfigError. The folders
    go when the body ends.
    """
    folders = make_folders()
    try:
        yield _plan(deployment, folders, storages)
    finally:
        folders.remove()
        os.close(folders.lock)


def _plan(deployment: Deployment, folders: Folders, storages: Storages) -> Launch:
    info, memory = deploy.check(deployment)
    token = secrets.token_hex(32)
    specs = launch.engine_specs(
        deployment, memory, folders.run, folders.logs, token, info.media_at_prefill
    )
    encoders, prefills = (
        [spec for spec in specs if spec.stage is stage] for stage in (Stage.ENCODE, Stage.PREFILL)
    )
    pairs = zip(storages.items(), encoders, prefills, strict=True)
    chosen = {
        name: (_with_storage(encoder, folder), _with_storage(prefill, folder))
        for (name, folder), encoder, prefill in pairs
    }
    return Launch(deployment, info, folders, token, chosen)


def _value_at(spec: EngineSpec) -> int:
    return spec.argv.index(FLAG) + 1


def _with_storage(spec: EngineSpec, folder: Path | None) -> EngineSpec:
    """The engine with vLLM's example connector that keeps its files there, if anywhere."""
    if folder is None:
        return spec
    config = {
        "ec_connector": "ECExampleConnector",
        "ec_role": f"ec_{ROLES[spec.stage]}",
        "ec_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    at = _value_at(spec)
    argv = (*spec.argv[:at], json.dumps(config), *spec.argv[at + 1 :])
    return replace(spec, argv=argv, inbox=None)


# Engines ------------------------------------------------------------------------------------------


@asynccontextmanager
async def pairs(plan: Launch, progress: Progress) -> AsyncIterator[dict[str, Pair]]:
    """All of them run and are healthy; leaving ends them. Raises EngineStartError."""
    deployment = plan.deployment
    specs = [spec for pair in plan.specs.values() for spec in pair]
    engines = {spec.worker_id: _connect(spec, plan) for spec in specs}

    async def healthy(spec: EngineSpec) -> bool:
        return await engines[spec.worker_id].health() is True

    folders = replace(plan.folders, lock=os.dup(plan.folders.lock))  # it closes its own
    cluster = LocalCluster(folders, specs, deploy.fork_server(deployment, plan.info, specs))
    try:
        await cluster.start(healthy, deployment.engine.startup_timeout_s, progress)
        yield {
            name: Pair(engines[encoder.worker_id], engines[prefill.worker_id], deployment.name)
            for name, (encoder, prefill) in plan.specs.items()
        }
    finally:
        for engine in engines.values():
            await engine.close()
        await cluster.stop()


def _connect(spec: EngineSpec, plan: Launch) -> VllmEngine:
    """vLLM's example ignores what a request says to our connector, and says nothing in replies."""
    return VllmEngine(
        spec.worker_id,
        spec.stage,
        spec.socket,
        plan.deployment.name,
        plan.info.media_at_prefill,
        inbox=spec.inbox,
        token=plan.token,
    )


# Two processes ------------------------------------------------------------------------------------


class DataPlane:
    """The processes of ``easerve.engines.vllm.transfer``."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        destination: str,
        log: Path,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._destination, self._log = destination, log

    async def receive(self) -> dict[str, Any]:
        """Raises EngineError when there is nothing more to come."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        if not line:
            raise EngineError(f"the {DATA_PLANE} ended\n{tail(self._log)}")
        received: dict[str, Any] = json.loads(line)
        return received

    async def run(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """One transfer (see the module), in seconds."""
        order = {**order, "destination": self._destination}
        self._writer.write(json.dumps(order).encode() + b"\n")
        return await self.receive()


@asynccontextmanager
async def data_plane(plan: Launch, progress: Progress) -> AsyncIterator[DataPlane]:
    """Two processes that have every connector; leaving ends them. Raises EngineStartError."""
    log = plan.folders.logs / "data-plane.log"
    progress(DATA_PLANE, "importing vLLM")
    process, connection = _spawn(plan, log)
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection(sock=connection)
        _, prefill = next(iter(plan.specs.values()))
        plane = DataPlane(reader, writer, prefill.worker_id, log)
        try:
            async with asyncio.timeout(START_S):
                await plane.receive()
        except TimeoutError:
            raise EngineStartError(f"the {DATA_PLANE} was not ready after {START_S:g} s") from None
        progress(DATA_PLANE, "ready")
        yield plane
    finally:
        if writer is not None:
            writer.close()
        process.kill()  # the kernel ends the consumer with it
        await asyncio.to_thread(process.wait)


def _spawn(plan: Launch, log: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    spec, _ = next(iter(plan.specs.values()))
    ours, theirs = socket.socketpair()
    with theirs, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(theirs.fileno()), json.dumps(plan.settings)],
            env={**os.environ, **spec.unpinned_env, PARENT_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is for the bench
        )
    return process, ours
