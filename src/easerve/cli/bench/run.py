"""``easerve bench``: requests to any OpenAI-compatible server, and what they were worth."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from rich.console import Console

from easerve.bench import models, reference, report, result
from easerve.bench.client import LoadError
from easerve.bench.job import Target
from easerve.bench.reference import Reference
from easerve.bench.run import Run, measure
from easerve.cli.bench import making, run_shown
from easerve.cli.bench.asked import Pace, Server, described, modality
from easerve.cli.bench.command import check_writable, show
from easerve.cli.bench.making import Made
from easerve.cli.deploy import stop_signals
from easerve.goodput import Slo
from easerve.workload.requests import Asked

INTERRUPTED = 130
Got = TypeVar("Got")


@dataclass(frozen=True, slots=True)
class Promises:
    """Objectives as they were written, and where a reference for tiers is looked for."""

    slos: Sequence[str] = ()
    reference: Path | None = None
    machine: str | None = None

    def check(self) -> None:
        """What can be told without a server. Raises ConfigError."""
        reference.resolve([each for each in self.slos if not reference.tiers_of(each)], None)

    def resolved(
        self, server: Server, model: str, modality: str
    ) -> tuple[dict[str, Slo], Reference | None]:
        """Raises ConfigError."""
        machine = reference.machine_of(server.url, self.machine)
        found = reference.chosen(self.slos, self.reference, model, machine, modality)
        return reference.resolve(self.slos, found), found


@dataclass(frozen=True, slots=True)
class Output:
    """Where the result goes. ``late``: figures although the client was too slow."""

    as_json: bool = False
    out: Path | None = None
    html: Path | None = None
    late: bool = False

    def check(self) -> None:
        """Raises ConfigError for a file that cannot be written."""
        for path in (self.out, self.html):
            if path is not None:
                check_writable(path)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. ``num_requests`` and ``num_warmup`` None: see ``making``."""

    server: Server
    asked: Asked
    pace: Pace
    promises: Promises
    seed: int
    num_requests: int | None
    num_warmup: int | None
    watch: bool


def run(plan: Plan, output: Output) -> int:
    """The exit code. Raises ConfigError."""
    console = Console(stderr=output.as_json)
    output.check()
    try:
        return _run(plan, output, console)
    except LoadError as error:
        print(f"easerve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("easerve: ended before there was a result", file=sys.stderr)
        return INTERRUPTED


def _run(plan: Plan, output: Output, console: Console) -> int:
    server = plan.server
    plan.promises.check()
    model = model_of(server)
    slos, given = plan.promises.resolved(server, model, modality(plan.asked))
    num = making.number(plan.asked, plan.pace, plan.num_requests, plan.seed)
    num_warmup = making.warmups(plan.asked, num, plan.num_warmup)
    with run_shown.making(console, num + num_warmup) as tick:
        made = making.make(
            *(server, model, plan.asked, plan.pace, plan.seed, num, num_warmup), tick
        )
    target = Target(server.url, model, server.api_key, server.timeout_s)

    def measured(stop: asyncio.Event) -> Awaitable[Run]:
        return _measured(plan, made, target, slos, console, stop)

    done = uvloop.run(until_stopped(measured))
    head = {
        **result.head(server.url, model, server.label),
        "command": reference.command_of(["easerve", *sys.argv[1:]]),
        "modality": modality(plan.asked),
        "workload": described(plan.asked),
        "kinds": dict(made.kinds),
        "arrival": plan.pace.described(),
        "seed": plan.seed,
        "stream": server.stream,
        "reference": None if given is None else given.as_dict(),
        "notes": _other_load(plan, given, model),
    }
    found = result.result(done, slos, head, late=output.late)
    written(found, run_shown.sections(found), output, console)
    if done.stopped:
        print(f"easerve: {found['invalid_because'][-1]}", file=sys.stderr)
        return INTERRUPTED
    return code_of(found, output.late)


def _other_load(plan: Plan, given: Reference | None, model: str) -> list[str]:
    """Tiers are worth what their reference is."""
    if given is None:
        return []
    found = reference.differences(given, model, modality(plan.asked), described(plan.asked))
    return [f"the reference is of another load: {each}" for each in found]


def model_of(server: Server) -> str:
    """The model that is asked. Raises LoadError for a server that is not there, ConfigError."""
    return models.chosen(server.model, asyncio.run(models.served(server.url, server.api_key)))


async def _measured(
    plan: Plan,
    made: Made,
    target: Target,
    slos: Mapping[str, Slo],
    console: Console,
    stop: asyncio.Event,
) -> Run:
    with run_shown.sending(console, len(made.planned), len(made.warmup)) as on_progress:
        return await measure(
            target,
            made.planned,
            warmup=made.warmup,
            slos=slos,
            concurrency=plan.pace.concurrency,
            max_in_flight=plan.pace.max_in_flight,
            on_progress=on_progress,
            stop=stop,
            watch=plan.watch,
        )


async def until_stopped(work: Callable[[asyncio.Event], Awaitable[Got]]) -> Got:
    """SIGINT and SIGTERM set the event, and a second one ends the work where it is."""
    stop, main = asyncio.Event(), asyncio.current_task()
    assert main is not None

    def end() -> None:
        if stop.is_set():
            main.cancel()
        stop.set()

    with stop_signals(end):
        try:
            return await work(stop)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def written(
    found: dict[str, Any], sections: Sequence[report.Section], output: Output, console: Console
) -> None:
    """Where it was asked to go."""
    if output.as_json:
        print(json.dumps(found, allow_nan=False))
    else:
        show(sections, console)
    if output.out is not None:
        output.out.write_text(json.dumps(found, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"result: {output.out}", soft_wrap=True, markup=False)
    if output.html is not None:
        from easerve.cli.report import drawn

        pages = drawn([(output.out or Path("this run"), found)])
        output.html.write_text(report.html("EAServe bench", pages), encoding="utf-8")
        console.print(f"report: {output.html}", soft_wrap=True, markup=False)


def code_of(found: Mapping[str, Any], late: bool) -> int:
    """1 when nothing was completed, or figures are withheld; said on stderr."""
    if not found["valid"]:
        for reason in found["invalid_because"]:
            print(f"easerve: {reason}", file=sys.stderr)
        if not late:
            print(f"easerve: {run_shown.TOO_SLOW}", file=sys.stderr)
            return 1
    if not found["completed"]:
        with suppress(StopIteration):
            cause = next(iter(found["causes"]))
            print(f"easerve: no request was completed: {cause}", file=sys.stderr)
        return 1
    return 0
