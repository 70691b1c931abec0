"""Starts the systems of ``easerve bench cpu``, and ends them."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from easerve import __version__
from easerve.bench import reference
from easerve.bench.cpu import usable_cores
from easerve.cli import profile_cpu
from easerve.cli.bench import command, cpu_shown
from easerve.cli.bench.cpu import PASS, WHEN, CpuBench, Plan, policies
from easerve.cli.bench.cpu_runs import Aggregated, Easerve, Shape
from easerve.cli.bench.cpu_systems import Plain, Replicas, Turns, pids_of, plain_vllm
from easerve.cli.bench.cpu_watch import Watch
from easerve.cli.demo import DEFAULT_DEPLOYMENT
from easerve.cli.deploy import Service, service
from easerve.cli.profile_service import alone
from easerve.cli.progress import StartProgress
from easerve.config import ConfigError, Deployment
from easerve.workload import mix

DEFAULT = DEFAULT_DEPLOYMENT.with_name("tiny-llava-bench.yaml")
MIX = re.compile(r"(\d{1,4})x(\d{1,6})")
THREE, FOUR = "E, P, D", "E, local P, P, D"
"""Deployments: without and with a local prefill engine."""
IDLE_S = 1.0
Progress = Callable[[str, str], None]
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hosts:
    """``services``: deployments that run, with the log of each, by name; ``turns`` for all."""

    services: Mapping[str, tuple[Service, Watch]]
    plain: Sequence[Plain]
    turns: Turns


def read(path: Path | None) -> Deployment:
    """The deployment to measure. Raises ConfigError."""
    if path is None and not DEFAULT.exists():
        raise ConfigError("the tiny model comes with the repository: name a deployment file")
    return command.read(path or DEFAULT)


def plan(
    mixes: str,
    rounds: int,
    clients: int,
    run_s: float,
    shares: Sequence[float],
    slo_s: float,
    timeline_s: float,
    seed: int,
    quick: bool,
) -> Plan:
    """As it was asked for. Raises ConfigError."""
    if quick:
        return Plan([Shape(4, 8)], 1, 8, 0.5, [0.5], 0.4, 0.5, seed, attempts=1)
    return Plan(_shapes(mixes), rounds, clients, run_s, shares, slo_s, timeline_s, seed)


def _shapes(text: str) -> list[Shape]:
    shapes = []
    for each in text.split(","):
        found = MIX.fullmatch(each.strip())
        if found is None or not 1 <= int(found[1]) <= mix.MAX_IMAGES or int(found[2]) < 1:
            raise ConfigError(f"--mixes: {each!r} is not like 4x8: pictures x tokens of an answer")
        shapes.append(Shape(int(found[1]), int(found[2])))
    return list(dict.fromkeys(shapes))


def check(deployment: Deployment) -> None:
    """Raises ConfigError for a deployment in which a mechanism has nothing to work on."""
    if deployment.device != "cpu":
        raise ConfigError("bench cpu measures on a CPU; the deployment has device: cuda")
    for name in ("local_prefill", "partition"):
        if getattr(deployment, name) is None:
            raise ConfigError(f"bench cpu needs a section {name}: see examples/tiny-llava-bench")


def replicas(num_cores: int, quick: bool) -> list[Replicas]:
    """One engine with a thread per core, and one per core; for ``quick`` only the second."""
    each = Replicas(num_cores, 1)
    return [each] if quick or num_cores == 1 else [Replicas(1, num_cores), each]


@asynccontextmanager
async def hosts(deployment: Deployment, quick: bool, progress: Progress) -> AsyncIterator[Hosts]:
    """``quick``: all variants of EAServe on one deployment. Raises EngineStartError."""
    deployments = {FOUR: deployment} if quick else {THREE: alone(deployment), FOUR: deployment}
    watches = {name: Watch() for name in deployments}
    async with AsyncExitStack() as stack:
        contexts: list[AbstractAsyncContextManager[Any]] = [
            service(each, partial(_told, progress, name), lambda *_: None, watches[name])
            for name, each in deployments.items()
        ]
        groups = replicas(usable_cores(), quick)
        contexts.append(plain_vllm(deployment, groups, progress))
        *running, plain = await _together(stack.enter_async_context(each) for each in contexts)
        services = {
            name: (each, watches[name]) for name, each in zip(deployments, running, strict=True)
        }
        turns = Turns(
            {name: partial(pids_of, each) for name, (each, _) in services.items()}
            | {each.name: each.pids for each in plain}
        )
        try:
            yield Hosts(services, plain, turns)
        finally:
            turns.all()


async def _together(entering: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What each gives; the first error ends the others, and is raised as it is."""
    tasks = [asyncio.create_task(each) for each in entering]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # it cleans up already
                task.cancel()
        await asyncio.wait(tasks)


def _told(progress: Progress, host: str, name: str, state: str) -> None:
    progress(f"{host}: {name}", state)


def easerve_of(hosts: Hosts, deployment: Deployment, share: float) -> dict[str, Easerve]:
    """Passthrough and When need no local engine, so theirs is the deployment without one."""
    found = {}
    for name, policy in policies(deployment.policy, share).items():
        host = THREE if name in (PASS, WHEN) and THREE in hosts.services else FOUR
        running, watch = hosts.services[host]
        found[name] = Easerve(name, host, running, watch, policy, hosts.turns)
    return found


async def idle_cores(hosts: Hosts) -> Result:
    """Cores that each engine takes with nothing to do."""

    def used() -> dict[str, float]:
        found: dict[str, float] = {}
        for host, (running, _) in hosts.services.items():
            names = {str(each.worker_id) for each in running.driver.engines()}
            for name, each in profile_cpu.all_s(running).items():
                if name.removesuffix(" core") in names:
                    found[f"{host}: {name}"] = each
        for plain in hosts.plain:
            found |= plain.used()
        return found

    before, begin = used(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    now, seconds = used(), time.monotonic() - begin
    return {name: each / seconds for name, each in profile_cpu.since(before, now).items()}


def run(
    deployment: Deployment, plan: Plan, quick: bool, output: command.Output, out: Path | None
) -> int:
    """The exit code. Raises ConfigError."""
    check(deployment)
    if out is not None:
        command.check_writable(out)

    async def measured(console: Console) -> Result:
        head = {
            "easerve": __version__,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": reference.this_cpu(),
            "num_cores": usable_cores(),
            "model": deployment.name,
            "quick": quick,
        }
        with StartProgress(console) as starting:
            async with hosts(deployment, quick, starting) as running:
                starting.close()
                head["start_s"] = starting.elapsed_s
                head["idle_cores"] = await idle_cores(running)
                easerve = easerve_of(running, deployment, plan.shares[0])
                plain = [Aggregated(each, deployment.name, running.turns) for each in running.plain]
                with command.progress(console, num_ticks(plan, len(easerve), len(plain))) as tick:
                    result = await CpuBench(plan, easerve, plain, tick).run()
        result = {"kind": "bench-cpu", **head, **result}
        if out is not None:
            _write(result, out, console)
        return result

    return command.run_measured(measured, cpu_shown.sections, output)


def _write(result: Result, out: Path, console: Console) -> None:
    out.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    console.print(f"result: {out}", soft_wrap=True, markup=False)


def num_ticks(plan: Plan, num_easerve: int, num_plain: int) -> int:
    """About as many as there will be, for a progress bar."""
    num_shapes, num_systems = len(plan.shapes), num_easerve + num_plain
    shares = 2 * len(plan.shares) if len(plan.shares) > 1 else 0
    alone = 20 * num_shapes  # shapes with as many pictures have some in common
    rounds = plan.rounds * (num_shapes * num_systems + alone)
    return num_systems + num_shapes + shares + rounds + 11
