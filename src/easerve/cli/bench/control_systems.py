"""What ``bench control`` puts between client and engines: nothing, ours, or vLLM's router.

All stand before the same engines of fixed latency. A router has one core; everything else shares
the others.
"""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from easerve.cluster.local import EngineStartError
from easerve.config import ConfigError
from easerve.engines.fake_server import STAGES
from easerve.engines.vllm.launch import free_ports

DIRECT, OURS = "direct", "easerve"
ROUTER, ROUTER_PD = "vllm-router", "vllm-router, PD"
START_S, END_S = 60.0, 10.0
ROUTER_OPTIONS = ("--policy", "round_robin", "--log-level", "error", "--host", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Cores:
    """``router``: for whatever is measured; ``rest``: for clients, engines, picture decoders."""

    router: frozenset[int]
    rest: frozenset[int]

    @property
    def are_apart(self) -> bool:
        return not self.router & self.rest


def divide_cores() -> Cores:
    """The first core that this process may use, and all others; the same one where it is alone."""
    first, *others = sorted(os.sched_getaffinity(0))
    return Cores(frozenset({first}), frozenset(others or [first]))


@dataclass(frozen=True, slots=True)
class System:
    """``pid`` None: there is nothing in between."""

    name: str
    url: str
    pid: int | None


def find_router(given: str | None) -> Path | None:
    """vLLM's router: as given (a path, or a name on the path), or where it is found.

    Raises ConfigError for one that was given and is not there.
    """
    found = shutil.which(given or "vllm-router")
    if given is not None and found is None:
        raise ConfigError(f"--router: {given} is not a program")
    return None if found is None else Path(found).absolute()


@asynccontextmanager
async def started(router: Path | None, cores: Cores) -> AsyncIterator[list[System]]:
    """Everything runs; leaving ends it. Raises EngineStartError."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="easerve-control-")))
        engines = ("-m", "easerve.engines.fake_server", str(folder))
        child, line = await stack.enter_async_context(_child(engines, cores.rest))
        ports = dict(zip(STAGES, line.split(), strict=True))
        systems = [System(DIRECT, f"http://127.0.0.1:{ports['e']}", None)]
        rest = ",".join(map(str, sorted(cores.rest)))
        server = ("-m", "easerve.cli.bench.control_server", str(folder), rest)
        child, line = await stack.enter_async_context(_child(server, cores.router))
        systems.append(System(OURS, f"http://127.0.0.1:{int(line)}", child.pid))
        if router is not None:
            urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
            plain = ("--worker-urls", urls["e"])
            divided = ("--vllm-pd-disaggregation", "--prefill", urls["p"], "--decode", urls["d"])
            for name, options in ((ROUTER, plain), (ROUTER_PD, divided)):
                made = _router(name, router, options, cores.router, folder)
                systems.append(await stack.enter_async_context(made))
        yield systems


@asynccontextmanager
async def _child(
    arguments: Sequence[str], cores: frozenset[int]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A Python process that runs until its input ends, and the line with which it begins."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us, and we end it
        preexec_fn=_on(cores),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = (await child.stdout.readline()).decode()
        if not line.strip():
            raise EngineStartError(f"{arguments[1]} did not start; what it says is above")
        yield child, line
    finally:
        child.stdin.close()
        await _end(child)


@asynccontextmanager
async def _router(
    name: str, program: Path, options: Sequence[str], cores: frozenset[int], folder: Path
) -> AsyncIterator[System]:
    port, metrics = free_ports(2)
    log = folder / f"{port}.log"
    with log.open("w") as file:
        child = await asyncio.create_subprocess_exec(
            *(str(program), *options, *ROUTER_OPTIONS),
            *("--port", str(port), "--prometheus-port", str(metrics)),
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=_on(cores),
        )
    url = f"http://127.0.0.1:{port}"
    try:
        if not await _answers(url, child):
            said = log.read_text(errors="replace")[-1000:]
            raise EngineStartError(f"{name} ({program}) did not start; it said: {said}")
        yield System(name, url, child.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await _end(child)


async def _answers(url: str, child: asyncio.subprocess.Process) -> bool:
    deadline = asyncio.get_running_loop().time() + START_S
    async with aiohttp.ClientSession() as session:
        while child.returncode is None and asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return True
            await asyncio.sleep(0.1)
    return False


async def _end(child: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(END_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


def _on(cores: frozenset[int]) -> Callable[[], None]:
    return lambda: os.sched_setaffinity(0, cores)
