"""``easerve simulate``: a scenario's systems in virtual time, side by side."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from easerve.bench import report
from easerve.cli import simulate_shown as shown
from easerve.cli.bench.command import check_writable, names, progress, show
from easerve.cli.simulate_shown import Result
from easerve.config import ConfigError
from easerve.goodput import summarise
from easerve.sim import scenario as scenarios
from easerve.sim import trace
from easerve.sim.bound import bound_per_s
from easerve.sim.llm import TooLongError
from easerve.sim.run import Run
from easerve.sim.scenario import Scenario
from easerve.sim.simulate import make_world, simulate

ALL = "all"
MAX_SEED = 1 << 53


@dataclass(frozen=True, slots=True)
class Asked:
    """``systems``: names, ``all``, or None for the scenario's own; None of ``rates_per_s`` and
    ``seeds``: as the scenario says. ``over``: changes, as in ``key=value``.
    """

    path: Path
    systems: str | None
    rates_per_s: Sequence[float] | None
    seeds: Sequence[int] | None
    variant: str | None
    over: Sequence[str]
    trace: Path | None
    html: Path | None
    as_json: bool


def run(asked: Asked) -> int:
    """The exit code. Raises ConfigError."""
    scenario = scenarios.read(asked.path, asked.variant, asked.over)
    systems = _systems(scenario, asked.systems)
    loads = list(_loads(scenario, asked))
    if asked.trace is not None and len(systems) * len(loads) > 1:
        raise ConfigError("--trace is of one run: name one system, one rate and one seed")
    for path in (asked.trace, asked.html):
        if path is not None:
            check_writable(path)
    traced = asked.trace is not None or asked.html is not None
    results = []
    with progress(Console(stderr=True), len(systems) * len(loads)) as tick:
        for load, system in product(loads, systems):
            tick(f"{system}, {shown.title_of(load.workload)}")
            try:
                results.append(once(load, system, traced))
            except (ConfigError, TooLongError) as error:
                raise ConfigError(f"{asked.path}: systems.{system}: {error}") from None
    _write(asked, scenario, results)
    return 0


def _write(asked: Asked, scenario: Scenario, results: Sequence[Result]) -> None:
    """Everything that was asked for, the tables or the JSON first."""
    console = Console(stderr=asked.as_json)
    sections = shown.sections(scenario, results)
    if asked.as_json:
        print(json.dumps(as_json(results)))
    else:
        show(sections, console)
    if asked.trace is not None:
        with asked.trace.open("w", encoding="utf-8") as file:
            trace.write(results[0].run, file)
        console.print(f"trace, for https://ui.perfetto.dev: {asked.trace}", soft_wrap=True)
    if asked.html is not None:
        charts = shown.charts(results)
        asked.html.write_text(report.html(scenario.title, [*sections, *charts]))
        console.print(f"report: {asked.html}", soft_wrap=True)


def once(scenario: Scenario, system: str, traced: bool = False) -> Result:
    """One run of one system. Raises ConfigError, and TooLongError for a request too long for it."""
    begin_s = time.perf_counter()
    found = simulate(scenario, system, traced)
    wall_s = time.perf_counter() - begin_s
    summary = summarise(found.records, found.end_s, scenario.slo.slos())
    bound = bound_per_s(scenario.configs[system], make_world(scenario, Run()))
    return Result(system, scenario.workload, summary, found, bound, wall_s)


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """One run flat; systems under one load by name; else every run in a list."""
    if len(results) == 1:
        return results[0].as_dict()
    if len({result.system for result in results}) == len(results):
        return {"systems": {result.system: result.as_dict() for result in results}}
    return {"runs": [result.as_dict() for result in results]}


def _systems(scenario: Scenario, asked: str | None) -> list[str]:
    known = list(scenario.configs)
    if asked is None:
        return [scenario.system]
    return known if asked == ALL else names("system", asked, known)


def _loads(scenario: Scenario, asked: Asked) -> Iterator[Scenario]:
    if asked.rates_per_s is not None and scenario.workload.rate_per_s is None:
        raise ConfigError("--rate: the arrivals of this scenario are a trace, which has its own")
    rates_per_s: Sequence[float | None] = asked.rates_per_s or [None]
    seeds: Sequence[int | None] = asked.seeds or [None]
    for rate_per_s in rates_per_s:
        for seed in seeds:
            yield scenario.at(rate_per_s, seed)
