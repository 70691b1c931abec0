"""The systems of ``easerve bench cpu``: plain vLLM engines, and who runs while others are paused.

The engines of all systems are started once. While one system is measured, those of the others are
stopped (SIGSTOP), as an engine without work still takes a hundredth of a core or two.
"""

import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import aiohttp

from easerve.bench.cpu import children, scheduled_s
from easerve.cli import profile_cpu
from easerve.cli.deploy import Service, check, fork_server
from easerve.cluster.local import LocalCluster, make_folders
from easerve.config import GIB, Deployment
from easerve.engines.vllm import launch
from easerve.engines.vllm.launch import EngineSpec
from easerve.engines.vllm.memory import CPU_KV_CACHE_BYTES
from easerve.types import Stage, WorkerId

HOST = "127.0.0.1"
EXECUTOR = "easerve.engines.vllm.executor.SingleProcessExecutor"
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5)
Used = Callable[[], Mapping[str, float]]
"""CPU seconds so far, by process."""
Pids = Callable[[], list[int]]


@dataclass(frozen=True, slots=True)
class Replicas:
    """Of plain vLLM: so many engines, each with so many OpenMP threads."""

    num: int
    num_threads: int

    @property
    def name(self) -> str:
        return f"vLLM x{self.num}"


@dataclass(frozen=True, slots=True)
class Plain:
    """Engines of plain vLLM that run. ``engines``: address and pid of each, by name."""

    name: str
    engines: Mapping[str, tuple[str, int]]

    @property
    def urls(self) -> list[str]:
        return [url for url, _ in self.engines.values()]

    def used(self) -> Mapping[str, float]:
        found = {}
        for name, (_, pid) in self.engines.items():
            found[name] = scheduled_s(pid)
            found[profile_cpu.core(name)] = sum(map(scheduled_s, children(pid)))
        return found

    def pids(self) -> list[int]:
        return _with_children(pid for _, pid in self.engines.values())


@asynccontextmanager
async def plain_vllm(
    deployment: Deployment, groups: Sequence[Replicas], progress: Callable[[str, str], None]
) -> AsyncIterator[list[Plain]]:
    """Aggregated engines, each group a system of its own; leaving ends them.

    Each has the deployment's model, dtype, max_model_len, media cache and all the KV cache memory
    and sequences that the deployment's prefill and decode engines have in sum; everything else is
    vLLM's default for a CPU, or what the deployment's own engines get. Raises EngineStartError.
    """
    info, _ = check(deployment)
    folders = make_folders()
    with ExitStack() as held:
        urls: dict[str, str] = {}
        specs: list[EngineSpec] = []
        of_group: dict[str, list[str]] = {}
        for group in groups:
            for index in range(group.num):
                name = f"{group.name.replace(' ', '-').lower()}-{index}"
                port = held.enter_context(_kept_port())
                urls[name] = f"http://{HOST}:{port}"
                of_group.setdefault(group.name, []).append(name)
                specs.append(
                    EngineSpec(
                        WorkerId(name),
                        Stage.DECODE,
                        _arguments(deployment, port),
                        _environment(group.num_threads, str(folders.run)),
                        folders.run,  # it listens on TCP; what it waits for is there
                        folders.logs / f"{name}.log",
                    )
                )
        cluster = LocalCluster(folders, specs, fork_server(deployment, info, specs))
        try:
            async with aiohttp.ClientSession(timeout=HEALTH_TIMEOUT) as session:

                async def healthy(spec: EngineSpec) -> bool:
                    with suppress(aiohttp.ClientError, TimeoutError):
                        async with session.get(f"{urls[spec.worker_id]}/health") as answer:
                            return answer.status == 200
                    return False

                await cluster.start(healthy, deployment.engine.startup_timeout_s, progress)
            yield [
                Plain(group, {name: (urls[name], cluster.pids[name]) for name in names})
                for group, names in of_group.items()
            ]
        finally:
            await cluster.stop()


def _arguments(deployment: Deployment, port: int) -> tuple[str, ...]:
    sections = (deployment.prefill, deployment.decode, deployment.local_prefill)
    given = [each for each in sections if each is not None]
    memory = sum(int(each.kv_cache_memory or CPU_KV_CACHE_BYTES) for each in given)
    words = [
        *("--model", deployment.model, "--served-model-name", deployment.name),
        *("--host", HOST, "--port", str(port), "--disable-uvicorn-access-log"),
        *("--dtype", deployment.engine.dtype),
        *("--max-num-seqs", str(sum(each.max_num_seqs for each in given))),
        *("--kv-cache-memory-bytes", str(memory)),
        *("--mm-processor-cache-gb", f"{deployment.engine.media_cache / GIB:g}"),
        *("--enforce-eager", "--distributed-executor-backend", EXECUTOR),
    ]
    if deployment.engine.max_model_len is not None:
        words += ["--max-model-len", str(deployment.engine.max_model_len)]
    return (*words, *deployment.engine.extra_args)


def _environment(num_threads: int, run_dir: str) -> dict[str, str]:
    """As the deployment's own engines have it, see ``launch``."""
    inherited = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(launch.SITE), *([inherited] if inherited else [])]),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": run_dir,
        "TMPDIR": run_dir,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "passive",
        "VLLM_MEDIA_LOADING_THREAD_COUNT": str(num_threads),
        "TORCHDYNAMO_DISABLE": "1",
    }


@contextmanager
def _kept_port() -> Iterator[int]:
    """A free port that nobody takes but an engine told to: vLLM shares ports of its own user."""
    with socket.socket() as kept:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            kept.setsockopt(socket.SOL_SOCKET, option, 1)
        kept.bind((HOST, 0))
        yield int(kept.getsockname()[1])


# Who runs -----------------------------------------------------------------------------------------


def pids_of(service: Service) -> list[int]:
    """The engines of a deployment, all their processes."""
    engines = {engine.worker_id for engine in service.driver.engines()}
    return _with_children(pid for name, pid in service.cluster.pids.items() if name in engines)


def _with_children(pids: Iterable[int]) -> list[int]:
    found = list(pids)
    return [*found, *(child for pid in found for child in children(pid))]


class Turns:
    """Only one of several groups of processes runs at a time."""

    def __init__(self, groups: Mapping[str, Pids]) -> None:
        self._groups = groups
        self._paused: dict[str, list[int]] = {}

    def to(self, name: str) -> None:
        """This group runs, every other is paused."""
        for other in self._groups:
            if other == name:
                _signal(self._paused.pop(other, ()), signal.SIGCONT)
            elif other not in self._paused:
                self._paused[other] = self._groups[other]()
                _signal(self._paused[other], signal.SIGSTOP)

    def all(self) -> None:
        """Everybody runs again; needed before engines can be ended."""
        for pids in self._paused.values():
            _signal(pids, signal.SIGCONT)
        self._paused.clear()


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
