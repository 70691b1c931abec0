"""``easerve serve``: from a deployment file or a model's name to a running server."""

import asyncio
import contextlib
import json
import logging
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from easerve.cli import divide
from easerve.cli.deploy import (
    Service,
    raise_file_limit,
    recipe,
    service,
    stop_signals,
)
from easerve.cli.progress import StartProgress
from easerve.cluster.local import EngineStartError
from easerve.config import (
    GIB,
    PARTITION_KNOBS,
    ConfigError,
    Deployment,
    build,
    merge,
    parse_topology,
    read_file,
)
from easerve.engines.protocol import Division, EngineError
from easerve.engines.vllm import launch, memory, models
from easerve.engines.vllm.topology import members
from easerve.serve.decisions import DecisionLog, StepLog
from easerve.types import WorkerId

NO_SWITCHES: Mapping[str, bool | None] = {}
console = Console(stderr=True)


def read(
    source: str,
    topology: str | None,
    over: Mapping[str, Any],
    switches: Mapping[str, bool | None] = NO_SWITCHES,
) -> Deployment:
    """The deployment: a file or a model, with the command line's options laid over it.

    ``switches``: sections that are switched on, with what the file says of them, or off.
    """
    is_file = source.endswith((".yaml", ".yml"))
    content = read_file(Path(source)) if is_file else {"model": source}
    if topology is not None:
        content = merge(content, parse_topology(topology))
    for section, on in switches.items():
        if on is not None:
            content = merge(content, {section: {} if on else None})
    if False in switches.values() and not switches.get("partition"):
        content = _undivided(content)
    if content.get("local_prefill") is not None:
        over = {**over, "encode": {}}  # a share of a GPU is of engines that have one to themselves
    return build(merge(content, _given(over)), source if is_file else "command line")


def _undivided(content: Mapping[str, Any]) -> dict[str, Any]:
    """Without the section, and what the file says of its rule."""
    policy = content.get("policy")
    if isinstance(policy, Mapping):
        content = {**content, "policy": {k: policy[k] for k in policy if k not in PARTITION_KNOBS}}
    return {**content, "partition": None}


def json_option(name: str, text: str | None) -> Any:
    """The value of an option that is JSON, as vLLM's are."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        raise ConfigError(f"--{name}: not JSON: {text!r}") from None


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, by section; sections without any are left out."""
    given: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            section = {key: each for key, each in value.items() if each is not None}
            given |= {name: section} if section else {}
        elif value is not None:
            given[name] = value
    return given


def dry_run(deployment: Deployment, as_json: bool) -> None:
    """Print what would be started and how the memory would be used; then whether it would fit."""
    info = models.inspect(deployment.model)
    run, logs = Path("/run/easerve"), Path("/var/log/easerve")
    plan = memory.plan(deployment, info)
    divide.devices(deployment)
    chosen = divide.choose(deployment)
    specs = launch.engine_specs(
        deployment, plan, run, logs, "<secret>", info.media_at_prefill, chosen and chosen[1]
    )
    if as_json:
        _print_json(specs, plan)
    else:
        _print_tables(specs, plan)
    memory.check(plan)


def _print_json(specs: Sequence[launch.EngineSpec], plan: Sequence[memory.Row]) -> None:
    engines = [
        {
            "name": spec.worker_id,
            "stage": spec.stage,
            "devices": list(spec.devices),
            "beside": list(spec.beside),
            "env": dict(spec.env),
            "command": spec.command(),
        }
        for spec in specs
    ]
    print(json.dumps({"engines": engines, "memory": [row.as_dict() for row in plan]}))


def _print_tables(specs: Sequence[launch.EngineSpec], plan: Sequence[memory.Row]) -> None:
    for spec in specs:
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in spec.env.items())
        print(f"# {spec.worker_id}\n{env} \\\n  {shlex.join(spec.command())}\n")
    table = Table(title="Memory plan (GiB for each GPU of an engine; on a CPU, for each engine)")
    table.add_column("engine", no_wrap=True)
    table.add_column("devices")
    keeps = ("embeddings",) if any(row.embeddings for row in plan) else ()
    for heading in ("weights", "KV cache", "activations", *keeps, "of", "KV tokens"):
        table.add_column(heading, justify="right")
    for row in plan:
        kept = (row.embeddings,) if keeps else ()
        cells = (row.weights, row.kv_cache, row.activations, *kept, row.available)
        table.add_row(
            row.worker_id,
            ",".join(map(str, row.devices)) or "cpu",
            *("?" if cell is None else f"{cell / GIB:.2f}" for cell in cells),
            "?" if row.kv_tokens is None else f"{row.kv_tokens:,}",
        )
    Console().print(table)


def divisions(running: Service) -> list[str]:
    return [f"{name}: {describe(each)}" for name, each in running.driver.divisions.items()]


def describe(division: Division) -> str:
    """By what its device is divided."""
    sides = {"encode": division.encode, "prefill": division.prefill}
    drivers = {driven.driver for driven in sides.values() if driven is not None}
    if len(drivers) > 1:
        each = ", ".join(f"{side} by {driven.driver}" for side, driven in sides.items() if driven)
        return f"its device is divided by one engine only: {each}"
    driven = next(filter(None, sides.values()), None)
    if driven is None:
        return "its engines do not say how its device is divided"
    most = driven.parts[-1] if driven.parts else 0
    units = f": {driven.total} units, {most} at most for encode" if most else ""
    return f"device divided by {driven.driver} ({driven.why}){units}"


def run(deployment: Deployment, decision_log: Path | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit code."""
    raise_file_limit()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with contextlib.ExitStack() as stack:
        log = None
        if decision_log is not None:
            log = DecisionLog(decision_log, recipe(deployment))
            stack.callback(log.close)
        try:
            return uvloop.run(_serve(deployment, log))
        except (EngineStartError, EngineError) as error:
            print(f"easerve: {error}", file=sys.stderr)
            return 1


async def _serve(deployment: Deployment, log: StepLog | None) -> int:
    stop = asyncio.Event()
    main = asyncio.current_task()
    running: Service | None = None

    def asked_to_stop() -> None:
        if running is None and main is not None and not stop.is_set():
            main.cancel()
        elif running is not None and stop.is_set():
            running.hurry()
        stop.set()

    def engine_ended(worker_id: WorkerId, code: int, restart_s: float | None) -> None:
        if running is not None:  # before that it is an EngineStartError
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            log = running.cluster.folders.logs / f"{worker_id}.log"
            again = "" if restart_s is None else f"; it is started again in {restart_s:g} s"
            console.print(
                f"[red]{worker_id} ended ({how})[/red]; its log: {log}{again}", soft_wrap=True
            )

    with stop_signals(asked_to_stop), StartProgress(console) as progress:
        try:
            async with service(deployment, progress, engine_ended, log) as running:
                progress.close()
                kinds = Counter(member.kind for member in members(deployment))
                counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
                console.print(
                    f"[bold]{deployment.name}[/bold] is served at {running.address}/v1 "
                    f"({counts}); ready in {progress.elapsed_s:.1f} s; Ctrl-C ends it\n"
                    f"engine logs: {running.cluster.folders.logs}",
                    soft_wrap=True,
                )
                for line in (*divide.refusals(deployment), *divisions(running)):
                    console.print(line, soft_wrap=True, markup=False)
                await stop.wait()
                console.print("ending: open requests are finished first; Ctrl-C again ends now")
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
            console.print("ended before the engines were ready")
    return 0
