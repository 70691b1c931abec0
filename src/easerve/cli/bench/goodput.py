"""``easerve bench goodput``: the highest rate at which a server keeps a promise, and the most that
it does within it, against any OpenAI-compatible server."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import uvloop
from rich.console import Console

from easerve.bench import result
from easerve.bench.client import LoadError
from easerve.bench.job import Target
from easerve.bench.reference import command_of
from easerve.bench.run import Run, measure
from easerve.bench.watch import wait_idle
from easerve.cli.bench import asked, goodput_shown, making, run_shown
from easerve.cli.bench.asked import Pace, Server
from easerve.cli.bench.goodput_search import Load, Plan, searched
from easerve.cli.bench.goodput_shown import Result, Told
from easerve.cli.bench.making import Made
from easerve.cli.bench.run import INTERRUPTED, Output, Promises, model_of, until_stopped, written
from easerve.config import ConfigError
from easerve.goodput import Slo
from easerve.workload.requests import Asked

ALONE = Pace(None, concurrency=1)
REPEATED = (
    "the lines of a data set come again at each rate: a server that keeps what it has seen is "
    "quicker from the second run on"
)
KINDS = ("poisson", "gamma", "constant")
"""Arrivals that a rate makes."""


@dataclass(frozen=True, slots=True)
class Offered:
    """What is asked, and of whom. ``kind`` and ``cv``: of the arrivals at each rate.

    Raises ConfigError for what cannot be.
    """

    server: Server
    asked: Asked
    promises: Promises
    kind: str = "poisson"
    cv: float | None = None
    num_warmup: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"--arrival: {self.kind!r} is none of {', '.join(KINDS)}")
        self.times_s(Load(1.0, 1, 0, 0))

    def arrival(self) -> Result:
        """For JSON."""
        return {"kind": self.kind} if self.cv is None else {"kind": self.kind, "cv": self.cv}

    def times_s(self, load: Load) -> list[float]:
        """When requests come. Raises ConfigError."""
        closed = load.rate_per_s is None
        when = ALONE if closed else asked.pace(str(load.rate_per_s), self.kind, self.cv)
        return making.scheduled(when, load.num_requests, load.seed)

    def made(self, model: str, load: Load, num_warmup: int = 0) -> Made:
        """The requests of a run. Raises ConfigError."""
        made = making.make(
            *(self.server, model, self.asked, ALONE, load.content_seed),
            *(load.num_requests, num_warmup),
        )
        pairs = zip(self.times_s(load), made.planned, strict=True)
        made.planned[:] = [replace(planned, at_s=at_s) for at_s, planned in pairs]
        return made


class Asker:
    """Makes the requests of a run, sends them and measures; ``alone`` were made before."""

    def __init__(
        self, offered: Offered, model: str, alone: Made, console: Console, stop: asyncio.Event
    ) -> None:
        server = offered.server
        self._target = Target(server.url, model, server.api_key, server.timeout_s)
        self._offered, self._alone, self._console, self._stop = offered, alone, console, stop

    async def __call__(self, load: Load, slos: Mapping[str, Slo]) -> Run:
        made = self._alone
        if load.rate_per_s is not None:
            made = await asyncio.to_thread(self._offered.made, self._target.model, load)
        with run_shown.sending(self._console, len(made.planned), len(made.warmup)) as on_progress:
            return await measure(
                self._target,
                made.planned,
                warmup=made.warmup,
                slos=slos,
                concurrency=1 if load.rate_per_s is None else None,
                on_progress=on_progress,
                stop=self._stop,
            )

    async def idle(self) -> bool | None:
        return await wait_idle(self._target.url, self._target.api_key)


def run(offered: Offered, plan: Plan, output: Output) -> int:
    """The exit code. Raises ConfigError."""
    console = Console(stderr=output.as_json)
    output.check()
    try:
        return _run(offered, plan, output, console)
    except LoadError as error:
        print(f"easerve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("easerve: ended before there was a result", file=sys.stderr)
        return INTERRUPTED


def _run(offered: Offered, plan: Plan, output: Output, console: Console) -> int:
    server = offered.server
    model = model_of(server)
    modality = asked.modality(offered.asked)
    slos, reference = offered.promises.resolved(server, model, modality)
    num_warmup = making.warmups(offered.asked, plan.num_alone, offered.num_warmup)
    alone = offered.made(model, plan.alone(), num_warmup)

    async def work(stop: asyncio.Event) -> Told:
        asker = Asker(offered, model, alone, console, stop)
        return await searched(plan, slos, asker, asker.idle, say, stop)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    told = uvloop.run(until_stopped(work))
    if offered.asked.dataset is not None:
        told = replace(told, notes=[*told.notes, REPEATED])
    head = {
        **result.head(server.url, model, server.label),
        "command": command_of(["easerve", *sys.argv[1:]]),
        "modality": modality,
        "workload": asked.described(offered.asked),
        "arrival": offered.arrival(),
        "stream": server.stream,
    }
    found = goodput_shown.result(told, slos, head, plan.settings(), reference)
    written(found, goodput_shown.sections(found), output, console)
    for reason in found["invalid_because"]:
        print(f"easerve: {reason}", file=sys.stderr)
    return 0 if found["valid"] else INTERRUPTED if told.stopped else 1
