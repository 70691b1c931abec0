"""Puts a deployment together: engines, core, driver and HTTP server in one process."""

import asyncio
import contextlib
import gc
import json
import os
import resource
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from easerve.cli import divide
from easerve.cluster.local import Folders, ForkServerSpec, LocalCluster, make_folders
from easerve.cluster.restarts import Restarts
from easerve.config import ConfigError, Deployment
from easerve.costs.linear import LinearCosts
from easerve.engines.vllm import launch, memory, models, topology
from easerve.engines.vllm.client import VllmEngine
from easerve.engines.vllm.launch import EngineSpec
from easerve.policy.admission import Admission
from easerve.policy.core import Limits
from easerve.serve.admin import knobs_of
from easerve.serve.app import create_app
from easerve.serve.decisions import Header, StepLog
from easerve.serve.driver import Driver
from easerve.serve.metrics import Metrics
from easerve.serve.preparation import PreparationPool
from easerve.types import NS_PER_S, Stage, WorkerId

# Of an engine that has ended: its exit code, and in how many seconds it is started again or None.
OnExit = Callable[[WorkerId, int, float | None], None]
NVIDIA_DRIVER = Path("/dev/nvidiactl")
KEEP_ALIVE_S = 75
DRAIN_S = 30
HURRY_S = 2.0
HEALTH_PERIOD_S = 1.0
MAX_OPEN_FILES = 1 << 16
GC_THRESHOLD = (20_000, 20, 20)  # containers made and not freed between looks, and looks


def check(deployment: Deployment) -> tuple[models.ModelInfo, list[memory.Row]]:
    """What is known of the model, and the memory plan; ConfigError for what cannot run here."""
    info = models.inspect(deployment.model)
    plan = memory.plan(deployment, info)
    memory.check(plan)
    used = {core for member in topology.members(deployment) for core in member.cores}
    if missing := used - os.sched_getaffinity(0):
        raise ConfigError(f"cores {sorted(missing)}: this process cannot run on them")
    if deployment.device == "cuda" and not NVIDIA_DRIVER.exists():
        raise ConfigError("device: cuda, but this machine has no NVIDIA driver (easerve doctor)")
    return info, plan


def recipe(deployment: Deployment) -> Header:
    """What the control core of a deployment is made of."""
    limits = deployment.limits
    return Header(
        knobs_of(deployment.policy),
        Admission(limits.max_requests, int(limits.max_held)),
        Limits(
            limits.max_retries,
            int(limits.request_timeout_s * NS_PER_S),
            int(limits.worker_wait_s * NS_PER_S),
        ),
        LinearCosts(),
        divide.devices(deployment),
    )


def listen(host: str, port: int) -> socket.socket:
    """The server's socket, bound before anything heavy starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0  # below zero for a name that has no address
        reason = os.strerror(number) if number > 0 else error.strerror
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None


@dataclass(slots=True)
class Service:
    """A deployment that runs."""

    deployment: Deployment
    driver: Driver
    cluster: LocalCluster
    server: uvicorn.Server
    address: str

    def hurry(self) -> None:
        """End without finishing the open requests, nor waiting long for slow clients."""
        self.driver.end_requests()
        asyncio.get_running_loop().call_later(HURRY_S, setattr, self.server, "force_exit", True)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the service ends when its owner says so."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(deployment: Deployment, driver: Driver) -> uvicorn.Server:
    """The driver's HTTP server, not started."""
    return _Server(
        uvicorn.Config(
            create_app(deployment, driver),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for garbage cycles less often, and not among what is there already.

    Nearly all that a request makes is freed by its counts. The looking took a tenth of a router's
    time, and each full look is a pause for all requests.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@asynccontextmanager
async def service(
    deployment: Deployment,
    progress: Callable[[str, str], None],
    on_exit: OnExit,
    log: StepLog | None = None,
) -> AsyncIterator[Service]:
    """The server answers at once (/ready: 503); the body runs when every engine is ready.

    A local prefill engine that ends from then on is started again. Leaving drains the open
    requests, then ends the engines and removes every trace of them.
    """
    info, plan = check(deployment)
    token = secrets.token_hex(32)
    listener = listen(deployment.server.host, deployment.server.port)
    folders = make_folders()

    def lost(worker_id: WorkerId, code: int) -> None:
        driver.lose_engine(worker_id)
        divide.withdraw(cluster.specs, worker_id)
        engine = engines.get(worker_id)  # None for what is no engine
        again = running and cluster.can_start and engine is not None and engine.beside
        on_exit(worker_id, code, restarts.ended(worker_id) if again else None)

    try:
        driver = _make_driver(deployment, log)
        cluster = make_cluster(deployment, plan, folders, token, info, lost)
    except ConfigError:
        folders.remove()
        listener.close()
        raise
    server = http_server(deployment, driver)
    watching: asyncio.Task[None] | None = None
    running = False
    serving = asyncio.create_task(server.serve([listener]))
    slots = {each.worker_id: each.section.max_num_seqs for each in topology.members(deployment)}

    def connect(spec: EngineSpec) -> VllmEngine:
        return VllmEngine(
            spec.worker_id,
            spec.stage,
            spec.socket,
            deployment.name,
            info.media_at_prefill,
            slots[spec.worker_id],
            deployment.encode.max_num_batched_tokens or launch.ENCODE_BATCH_TOKENS,
            inbox=spec.inbox,
            token=token,
            beside=spec.beside,
            divided=spec.cell is not None,
        )

    engines = {spec.worker_id: connect(spec) for spec in cluster.specs}
    timeout_s = deployment.engine.startup_timeout_s

    async def healthy(spec: EngineSpec) -> bool:
        return await engines[spec.worker_id].health() is True

    async def start_again(worker_id: WorkerId) -> None:
        (spec,) = (spec for spec in cluster.specs if spec.worker_id == worker_id)
        before, engines[worker_id] = engines[worker_id], connect(spec)
        await before.close()
        await cluster.restart(worker_id, healthy, timeout_s)
        driver.lose_engine(worker_id)  # one that ended between its start and its joining
        driver.add_engine(engines[worker_id])

    restarts = Restarts(start_again)
    try:
        await cluster.start(healthy, timeout_s, progress)
        if info.architecture is None:
            models.inspect(deployment.model)  # the engines have downloaded it
        for engine in engines.values():
            if engine.stage is Stage.ENCODE:
                await engine.learn_limits()
        running = True
        for engine in engines.values():
            driver.add_engine(engine)
        await driver.see_divisions()
        watching = asyncio.create_task(_watch(driver, log))
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        with rare_collections():
            yield Service(deployment, driver, cluster, server, f"http://{shown}:{port}")
    finally:
        await restarts.close()
        if watching is not None:
            watching.cancel()
        driver.drain()
        server.should_exit = True
        await serving
        await driver.close()
        for engine in engines.values():
            await engine.close()
        await cluster.stop()


async def _watch(driver: Driver, log: StepLog | None) -> None:
    """Notice engines that died while nobody called them; write the log down."""
    while True:
        await asyncio.sleep(HEALTH_PERIOD_S)
        if log is not None:
            log.flush()
        probes = (driver.probe(engine.worker_id) for engine in driver.engines())
        await asyncio.gather(*probes, driver.see_divisions())


def raise_file_limit() -> None:
    """A connection of a client is up to four open files here and in the engines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def embedding_options(deployment: Deployment) -> str:
    """Everything besides its pixels that changes a picture's embedding."""
    engine = deployment.engine
    processor = json.dumps(engine.mm_processor_kwargs, sort_keys=True)
    return f"{deployment.model}|{engine.dtype}|{processor}|"


def _make_driver(deployment: Deployment, log: StepLog | None) -> Driver:
    limits = deployment.limits
    preparation = PreparationPool(
        limits.preparation_workers, limits.max_image_pixels, embedding_options(deployment)
    )
    core = recipe(deployment).make_core()
    return Driver(core, preparation, Metrics(), int(limits.max_decoded), log)


def make_cluster(
    deployment: Deployment,
    plan: Sequence[memory.Row],
    folders: Folders,
    token: str,
    info: models.ModelInfo,
    on_exit: Callable[[WorkerId, int], None],
) -> LocalCluster:
    run, logs = folders.run, folders.logs
    chosen = divide.choose(deployment)
    choice = chosen and chosen[1]
    specs = launch.engine_specs(deployment, plan, run, logs, token, info.media_at_prefill, choice)
    divide.make_cells(specs)
    mps = divide.daemon(deployment, chosen, run, logs)
    return LocalCluster(folders, specs, fork_server(deployment, info, specs), on_exit, mps)


def fork_server(
    deployment: Deployment, info: models.ModelInfo, specs: Sequence[EngineSpec]
) -> ForkServerSpec | None:
    """What the engines are forked from, if the deployment wants it."""
    if not deployment.uses_fork_server:
        return None
    argv = launch.fork_server_command(info.architecture or "", info.model_type or "")
    return ForkServerSpec(argv, specs[0].unpinned_env)


@contextlib.contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call ``stop`` instead of ending the process."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
