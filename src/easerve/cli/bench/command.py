"""Brings up a deployment for a bench, shows progress, prints what came of it."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from easerve.bench import report
from easerve.bench.client import LoadError
from easerve.cli.bench import (
    encode,
    flow,
    partition,
    partition_cell,
    shown,
    transfer,
    transfer_shown,
)
from easerve.cli.bench.load import Bench
from easerve.cli.bench.recorder import Recorder
from easerve.cli.bench.stage import EncodeStage
from easerve.cli.bench.transfer_folders import storage
from easerve.cli.demo import DEFAULT_DEPLOYMENT
from easerve.cli.deploy import Service, raise_file_limit, service, stop_signals
from easerve.cli.profile_engines import started
from easerve.cli.progress import StartProgress
from easerve.cluster.local import EngineStartError
from easerve.config import ConfigError, Deployment, build, merge, read_file
from easerve.engines.protocol import EngineError
from easerve.serve.media import prepare
from easerve.types import Stage
from easerve.workload import mix

NUM_CALLS = 20_000
Tick = Callable[[str], None]
Measure = Callable[[Service, Recorder, Tick], Awaitable[encode.Result]]


@dataclass(frozen=True, slots=True)
class Output:
    """``html``: where the report goes, if anywhere."""

    as_json: bool
    html: Path | None


def read(path: Path | None, over: Mapping[str, Any] | None = None) -> Deployment:
    """The deployment to measure, on a free port of loopback; ``over`` is laid on its file."""
    if path is None and not DEFAULT_DEPLOYMENT.exists():
        raise ConfigError("the tiny model comes with the repository: name a deployment file")
    path = path or DEFAULT_DEPLOYMENT
    content = merge(read_file(path), {"server": {"port": 0, "host": "127.0.0.1"}})
    content = merge(content, over or {})
    return build(content, str(path))


def names(option: str, text: str, known: Collection[str]) -> list[str]:
    """The value of an option that lists names. Raises ConfigError."""
    given = [name.strip() for name in text.split(",")]
    for name in given:
        if name not in known:
            raise ConfigError(f"--{option}: {name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(given))


def numbers(option: str, text: str, least: float = 1e-3, most: float = 1e6) -> list[float]:
    """The value of an option that lists numbers. Raises ConfigError."""
    try:
        given = [float(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{option}: {text!r} is not a list of numbers") from None
    for number in given:
        if not least <= number <= most:
            raise ConfigError(f"--{option}: {number:g} is not from {least:g} to {most:g}")
    return given


def counts(option: str, text: str, most: int, least: int = 1) -> list[int]:
    """The value of an option that lists whole numbers. Raises ConfigError."""
    given = numbers(option, text, least, most)
    for number in given:
        if not number.is_integer():
            raise ConfigError(f"--{option}: {number:g} is not a whole number")
    return list(dict.fromkeys(map(int, given)))


def bench_encode(deployment: Deployment, plan: encode.Plan, output: Output) -> int:
    """The exit code."""

    async def measure(running: Service, recorder: Recorder, tick: Tick) -> encode.Result:
        bench = Bench(running, recorder, mix.Mix(), plan.seed)
        stage = await _stage(running)
        return await encode.EncodeBench(plan, stage, bench, tick).run()

    def measured(console: Console) -> Awaitable[encode.Result]:
        return _on_service(deployment, plan.num_runs, measure, console)

    return run_measured(measured, shown.of_encode, output, kind="bench-encode")


def bench_flow(deployment: Deployment, plan: flow.Plan, output: Output) -> int:
    """The exit code."""

    async def measure(running: Service, recorder: Recorder, tick: Tick) -> encode.Result:
        tokens = (plan.num_tokens, plan.num_tokens)
        bench = Bench(running, recorder, mix.Mix(num_output_tokens=tokens), plan.seed)
        engines = await flow.on_engines(plan, bench, tick)
        return {"engines": engines, "modelled": flow.modelled(plan)}

    def measured(console: Console) -> Awaitable[encode.Result]:
        return _on_service(deployment, plan.num_runs, measure, console)

    return run_measured(measured, shown.of_flow, output, kind="bench-flow")


def bench_transfer(
    deployment: Deployment, plan: transfer.Plan, disk: Path | None, output: Output
) -> int:
    """The exit code. ``disk``: where the files go that are to be on a disk, None for some place."""

    async def measured(console: Console) -> encode.Result:
        result: encode.Result = {}
        with storage(disk) as kept:
            bench = transfer.TransferBench(plan, kept)
            for part in plan.parts:
                with StartProgress(console) as starting:
                    async with bench.started(part, deployment, starting) as run:
                        starting.close()
                        with progress(console, plan.num_runs(part)) as tick:
                            result |= await run(tick)
        return result

    return run_measured(measured, transfer_shown.of_transfer, output, kind="bench-transfer")


def bench_partition(
    deployment: Deployment, parts: Collection[str], plan: partition.Plan, output: Output
) -> int:
    """The exit code. ``deployment``: with sections local_prefill and partition."""

    async def measured(console: Console) -> encode.Result:
        result: encode.Result = {}
        if "cell" in parts:
            with progress(console, partition_cell.NUM_KINDS) as tick:
                result |= partition_cell.measure(NUM_CALLS, tick)
        if "engines" in parts:
            with StartProgress(console) as starting:
                async with started(deployment, partition.SIZE, starting) as bench:
                    starting.close()
                    with progress(console, plan.num_runs) as tick:
                        result |= await partition.compare(bench, plan, tick)
        return result

    return run_measured(measured, partition.sections, output, kind="bench-partition")


def run_measured(
    measured: Callable[[Console], Awaitable[encode.Result]],
    sections: Callable[[encode.Result], Sequence[report.Section]],
    output: Output,
    title: str = "EAServe bench",
    kind: str | None = None,
) -> int:
    """The exit code; ``measured`` gets the console for its progress. ``kind``: for the JSON, by
    which `easerve report` knows how to draw it.
    """
    raise_file_limit()
    console = Console(stderr=output.as_json)
    if output.html is not None:
        check_writable(output.html)
    try:
        result = uvloop.run(_until_stopped(measured(console)))
    except (EngineStartError, EngineError, LoadError) as error:
        print(f"easerve: {error}", file=sys.stderr)
        return 1
    if result is None:
        print("easerve: ended before there was a result", file=sys.stderr)
        return 130
    found = sections(result)
    if output.as_json:
        print(json.dumps(result if kind is None else {"kind": kind, **result}))
    else:
        show(found, console)
    if output.html is not None:
        output.html.write_text(report.html(title, found))
        console.print(f"report: {output.html}", soft_wrap=True)
    return 0


def check_writable(path: Path) -> None:
    """Before minutes of measuring, not after. What is there stays as it is."""
    existed = path.exists()
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


async def _until_stopped(measured: Awaitable[encode.Result]) -> encode.Result | None:
    """None when it was asked to stop."""
    main = asyncio.current_task()
    assert main is not None

    def stop() -> None:
        if not main.cancelling():
            main.cancel()

    with stop_signals(stop):
        try:
            return await measured
        except asyncio.CancelledError:
            return None


async def _on_service(
    deployment: Deployment, num_runs: int, measure: Measure, console: Console
) -> encode.Result:
    recorder = Recorder()
    with StartProgress(console) as starting:
        async with service(deployment, starting, lambda *_: None, recorder) as running:
            starting.close()
            with progress(console, num_runs) as tick:
                return await measure(running, recorder, tick)


@contextmanager
def progress(console: Console, num_runs: int) -> Iterator[Tick]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    text = TextColumn("{task.description}")
    with Progress(text, *columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_runs)

        def tick(text: str) -> None:
            progress.update(task, description=text)
            progress.advance(task)

        yield tick


async def _stage(running: Service) -> EncodeStage:
    """The running encoders, and a prompt with one picture as they render it."""
    engines = running.driver.engines()
    encoders = [each for each in engines if each.stage is Stage.ENCODE]
    prefill_id = next(each.worker_id for each in engines if each.stage is Stage.PREFILL)
    request = mix.request(mix.Mix(), seed=0, index=0)
    (url,) = (p["image_url"]["url"] for p in request.content if p["type"] == "image_url")
    picture = prepare(url, encode.MAX_PIXELS)
    content = [
        {"type": "image_url", "image_url": {"url": picture.url}, "uuid": picture.key},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": content}]
    prompt = await encoders[0].render({"model": running.deployment.name, "messages": messages})
    pids = list(running.cluster.pids.values())
    return EncodeStage(encoders, prefill_id, prompt, pids)


def show(sections: Sequence[report.Section], console: Console) -> None:
    for section in sections:
        for part in section.parts:
            if isinstance(part, report.Table):
                console.print(rich_table(part))
        if section.text:
            console.print(section.text + "\n", highlight=False, markup=False)


def rich_table(table: report.Table) -> Table:
    rich = Table(
        title=escape(table.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1)
    )
    for number, column in enumerate(table.columns):
        rich.add_column(escape(column), justify="right" if number else "left", no_wrap=not number)
    for row in table.rows:
        rich.add_row(*(escape(report.shown(cell)) for cell in row))
    return rich
