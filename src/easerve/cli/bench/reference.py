"""``easerve bench reference``: measures what requests take alone, and writes it down for good."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from easerve.bench import reference
from easerve.bench.client import LoadError
from easerve.bench.job import Target
from easerve.bench.reference import Reference
from easerve.bench.report import Section, Table
from easerve.bench.result import head
from easerve.bench.run import Run, measure
from easerve.cli.bench import asked, making, run_shown
from easerve.cli.bench.asked import Pace, Server
from easerve.cli.bench.command import show
from easerve.cli.bench.making import Made
from easerve.cli.bench.run import INTERRUPTED, model_of, until_stopped
from easerve.config import ConfigError
from easerve.goodput import TIERS, tier
from easerve.workload.requests import Asked


@dataclass(frozen=True, slots=True)
class Plan:
    """``out`` None: where ``easerve bench`` looks for it. ``force``: even if it exists."""

    server: Server
    asked: Asked
    machine: str | None
    num_requests: int
    num_warmup: int | None
    seed: int
    out: Path | None
    force: bool
    late: bool

    def path(self, machine: str, model: str) -> Path:
        if self.out is not None:
            return self.out
        name = reference.path_of(machine, model, asked.modality(self.asked))
        return reference.state_folder() / name


def run(plan: Plan) -> int:
    """The exit code. Raises ConfigError."""
    console = Console()
    try:
        machine = reference.machine_of(plan.server.url, plan.machine)
        if machine is None:
            raise ConfigError(
                f"{plan.server.url} is not on this machine: say with --machine what serves there, "
                "e.g. --machine '2 x RTX 6000 Ada'"
            )
        model = model_of(plan.server)
        path = plan.path(machine, model)
        reference.check_new(path, plan.force)
        made = _made(plan, model, console)
        done = uvloop.run(until_stopped(lambda stop: _measured(plan, model, made, console, stop)))
        if done.stopped:
            raise KeyboardInterrupt
        found = _reference(plan, done, machine, model)
    except LoadError as error:
        print(f"easerve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("easerve: ended before there was a reference", file=sys.stderr)
        return INTERRUPTED
    reference.write(found, path, plan.force)
    show(sections(found), console)
    console.print(f"reference: {path}", soft_wrap=True, markup=False, highlight=False)
    return 0


def _made(plan: Plan, model: str, console: Console) -> Made:
    num_warmup = making.warmups(plan.asked, plan.num_requests, plan.num_warmup)
    with run_shown.making(console, plan.num_requests + num_warmup) as tick:
        return making.make(
            *(plan.server, model, plan.asked, Pace(None, concurrency=1), plan.seed),
            *(plan.num_requests, num_warmup, tick),
        )


async def _measured(
    plan: Plan, model: str, made: Made, console: Console, stop: asyncio.Event
) -> Run:
    server = plan.server
    target = Target(server.url, model, server.api_key, server.timeout_s)
    with run_shown.sending(console, len(made.planned), len(made.warmup)) as on_progress:
        return await measure(
            target,
            made.planned,
            warmup=made.warmup,
            concurrency=1,
            on_progress=on_progress,
            stop=stop,
        )


def _reference(plan: Plan, done: Run, machine: str, model: str) -> Reference:
    """Raises LoadError for a run that cannot be a reference."""
    causes = [sample.cause for sample in done.samples if sample.cause is not None]
    late = [] if plan.late else done.client_too_slow()
    try:
        if late:
            raise ValueError(f"{'; '.join(late)}: leave the client a core, or say --allow-late")
        return reference.make(
            done.records,
            words=["easerve", *sys.argv[1:]],
            machine=machine,
            model=model,
            system=head(plan.server.url, model, plan.server.label)["system"],
            modality=asked.modality(plan.asked),
            workload=asked.described(plan.asked),
        )
    except ValueError as error:
        raise LoadError(": ".join([f"no reference: {error}", *causes[:1]])) from None


def sections(found: Reference) -> Sequence[Section]:
    slos = {name: tier(name, found.ttft_s, found.tpot_s) for name in TIERS}
    rows = [
        ("alone, median", 1000 * found.ttft_s, 1000 * found.tpot_s),
        *((name, 1000 * (slo.ttft_s or 0), 1000 * (slo.tpot_s or 0)) for name, slo in slos.items()),
    ]
    columns = ("", "TTFT at most, ms", "TPOT at most, ms")
    text = (
        f"{found.num_requests} requests, one at a time. TTFT from "
        f"{1000 * min(found.ttfts_s):.4g} to {1000 * max(found.ttfts_s):.4g} ms, TPOT from "
        f"{1000 * min(found.tpots_s):.4g} to {1000 * max(found.tpots_s):.4g} ms."
    )
    return [Section("Reference", text, [Table(found.name, columns, rows)])]
