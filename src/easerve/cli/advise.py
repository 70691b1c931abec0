"""``easerve advise``: whether to split a model's stages, on the same GPUs, by simulation."""

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from easerve.bench import report
from easerve.cli import advise_deployment as deployments
from easerve.cli import advise_shown as shown
from easerve.cli.advise_deployment import Given
from easerve.cli.bench.command import check_writable, show
from easerve.config import ConfigError
from easerve.costs import hardware
from easerve.goodput import TIERS, Slo, parse_slo, tier
from easerve.search import trying
from easerve.search.advice import Advice, advise
from easerve.search.contenders import CHUNKS, Machine, alone, families, machine_of
from easerve.search.rates import Mapped, Tick
from easerve.search.trying import Load
from easerve.sim import scenario as scenarios
from easerve.sim.checks import check
from easerve.sim.scenario import OWN_SLO, Scenario

USUAL = ("S3", OWN_SLO)
NUM_SEEDS = 2
LONE_RATE_PER_S, NUM_LONE = 0.01, 20
"""Requests that have the system to themselves."""


@dataclass(frozen=True, slots=True)
class Asked:
    """``slo``: a tier of the scenario, or limits as in ``ttft=2s,tpot=80ms``; None: S3, or its own.

    ``rates_per_s`` None: a ladder that is found. ``chunks``: tokens of a step that engines which
    prefill and decode are tried with. ``given``: for a deployment file alone.
    """

    path: Path
    rates_per_s: Sequence[float] | None = None
    seeds: Sequence[int] = tuple(range(1, NUM_SEEDS + 1))
    slo: str | None = None
    variant: str | None = None
    over: Sequence[str] = ()
    chunks: Sequence[int] = CHUNKS
    max_requests: int = trying.MAX_REQUESTS
    jobs: int = 1
    html: Path | None = None
    as_json: bool = False
    given: Given = field(default_factory=Given)


def run(asked: Asked) -> int:
    """The exit code. Raises ConfigError."""
    if asked.html is not None:
        check_writable(asked.html)
    content, scenario = _read(asked)
    if scenario.workload.rate_per_s is None:
        raise ConfigError(f"{asked.path}: its arrivals have rates of their own: give rate_per_s")
    machine = machine_of(content)
    console = Console(stderr=True)
    with _crew(asked.jobs) as mapped, _progress(console) as tick:
        compared = families(content, machine, asked.chunks)
        name, slo = _promise(asked, content, scenario, machine)
        load = Load(slo, asked.max_requests)
        found = advise(content, compared, load, asked.seeds, asked.rates_per_s, mapped, tick)
    about = shown.About(scenario.title, scenario.num_gpus, name, slo, _on_cpu(scenario), load)
    _write(asked, about, found)
    return 0


def _on_cpu(scenario: Scenario) -> bool:
    return hardware.read(scenario.hardware).kind == "cpu"


def _read(asked: Asked) -> tuple[dict[str, Any], Scenario]:
    """The content of a scenario with all changes, and what it says. Raises ConfigError."""
    if deployments.is_deployment(asked.path):
        scenario = _of_deployment(asked)
    else:
        if asked.given.names:
            raise ConfigError(
                f"{asked.path} is a scenario: {', '.join(asked.given.names)} go with deployment "
                "files; --set changes a scenario"
            )
        scenario = scenarios.read(asked.path, asked.variant, asked.over)
    check(scenario)
    return scenario.model_dump(mode="json", exclude_unset=True), scenario


def _of_deployment(asked: Asked) -> Scenario:
    if asked.variant is not None:
        raise ConfigError(f"{asked.path}: a deployment file has no variants")
    content = deployments.content_of(asked.path, asked.given)
    content = scenarios.laid(content, dict(map(scenarios.key_value, asked.over)))
    deployments.check_asked(content)
    return scenarios.build(content, str(asked.path))


def _promise(
    asked: Asked, content: Mapping[str, Any], scenario: Scenario, machine: Machine
) -> tuple[str, Slo]:
    """A tier's name and limits, or limits alone. Raises ConfigError."""
    known = scenario.slo.slos()
    text = asked.slo or next((name for name in USUAL if name in known), USUAL[0])
    if text in known:
        return text, known[text]
    if text in TIERS:
        return text, tier(text, *_alone(content, machine))
    try:
        return text, parse_slo(text)
    except ValueError as error:
        tiers = ", ".join(dict.fromkeys([*known, *TIERS]))
        raise ConfigError(f"--slo: {error}; or a tier, one of {tiers}") from None


def _alone(content: Mapping[str, Any], machine: Machine) -> tuple[float, float]:
    """TTFT and TPOT, means, of requests that have whole engines to themselves, or the simplest
    system that can be. Raises ConfigError.
    """
    first = next((each for each in families(content, machine) if each.contenders), None)
    if first is None:
        raise ConfigError("--slo: no system fits, so a tier cannot be found: give limits")
    lone = alone(content, first.contenders[0]).at(LONE_RATE_PER_S)
    apart = {"num_requests": NUM_LONE, "arrivals": "constant", "cv": None, "rescaled": False}
    workload = lone.workload.model_copy(update=apart)
    records = trying.simulated(lone.model_copy(update={"workload": workload})).records
    ttfts = [each.ttft_s for each in records if each.ttft_s is not None]
    tpots = [each.tpot_s for each in records if each.tpot_s is not None]
    if not ttfts or not tpots:
        raise ConfigError("--slo: answers of one token make no tier: give limits")
    return fmean(ttfts), fmean(tpots)


@contextmanager
def _crew(jobs: int) -> Iterator[Mapped]:
    if jobs == 1:
        yield map
        return
    # Not forked: the bar's thread may hold a lock at that moment.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:

        def mapped(function: Callable[[Any], Any], each: Iterable[Any]) -> Iterable[Any]:
            return pool.map(function, each)

        yield mapped


@contextmanager
def _progress(console: Console) -> Iterator[Tick]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def tick(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        yield tick


def _write(asked: Asked, about: shown.About, found: Advice) -> None:
    sections = shown.sections(about, found)
    console = Console(stderr=asked.as_json)
    if asked.as_json:
        print(json.dumps(shown.as_json(about, found)))
    else:
        show(sections, console)
    if asked.html is not None:
        title = f"Split or not: {about.title}"
        asked.html.write_text(report.html(title, [*sections, shown.charts(about, found)]))
        console.print(f"report: {asked.html}", soft_wrap=True)
