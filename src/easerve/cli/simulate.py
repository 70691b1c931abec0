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
from easerve.serve.decisions import DecisionLog, Header
from easerve.sim import scenario as scenarios
from easerve.sim import trace
from easerve.sim.bound import bound_per_s
from easerve.sim.checks import check
from easerve.sim.config import EaserveSystem
from easerve.sim.run import Run
from easerve.sim.scenario import Scenario
from easerve.sim.simulate import make_world, simulate
from easerve.sim.systems.easerve import recipe
from easerve.sim.systems.served import Observe

ALL = "all"
OURS = "easerve"
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
    decision_log: Path | None
    as_json: bool


def run(asked: Asked) -> int:
    """The exit code. Raises ConfigError."""
    scenario = scenarios.read(asked.path, asked.variant, asked.over)
    try:
        check(scenario)
    except ConfigError as error:
        lines = str(error).split("\n")
        raise ConfigError("\n".join(f"{asked.path}: {line}" for line in lines)) from None
    systems = _systems(scenario, asked.systems)
    loads = list(_loads(scenario, asked))
    for name, path in (("trace", asked.trace), ("decision-log", asked.decision_log)):
        if path is not None and len(systems) * len(loads) > 1:
            raise ConfigError(f"--{name} is of one run: name one system, one rate and one seed")
    if asked.decision_log is not None and systems != [OURS]:
        raise ConfigError(f"--decision-log: system {systems[0]} has no core; ask for {OURS}")
    _check_outputs(asked)
    traced = asked.trace is not None or asked.html is not None
    results = []
    with progress(Console(stderr=True), len(systems) * len(loads)) as tick:
        for load, system in product(loads, systems):
            tick(f"{system}, {shown.title_of(load.workload)}")
            try:
                if asked.decision_log is None:
                    results.append(once(load, system, traced))
                else:
                    results.append(_logged(load, asked.decision_log, traced))
            except ConfigError as error:
                raise ConfigError(f"{asked.path}: systems.{system}: {error}") from None
    _write(asked, scenario, results)
    return 0


def _check_outputs(asked: Asked) -> None:
    """Before anything is computed. Raises ConfigError."""
    options = {"trace": asked.trace, "html": asked.html, "decision-log": asked.decision_log}
    taken = {asked.path.resolve(): "the scenario"}
    for name, path in options.items():
        if path is None:
            continue
        check_writable(path)
        if path.resolve() in taken:
            raise ConfigError(f"--{name}: {path} is {taken[path.resolve()]} as well")
        taken[path.resolve()] = f"that of --{name}"


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
    if asked.decision_log is not None:
        console.print(f"decisions, for easerve replay: {asked.decision_log}", soft_wrap=True)


def once(
    scenario: Scenario, system: str, traced: bool = False, observe: Observe | None = None
) -> Result:
    """One run of one system; ``observe`` as ``simulate``. Raises ConfigError."""
    begin_s = time.perf_counter()
    found = simulate(scenario, system, traced, observe)
    wall_s = time.perf_counter() - begin_s
    summary = summarise(found.records, found.end_s, scenario.slo.slos())
    bound = bound_per_s(scenario.configs[system], make_world(scenario, Run()))
    return Result(system, scenario.workload, summary, found, bound, wall_s)


def _logged(scenario: Scenario, path: Path, traced: bool) -> Result:
    """One run of ours, whose core's steps are written down as the server's are."""
    config = scenario.configs[OURS]
    assert isinstance(config, EaserveSystem)
    made = recipe(config.seeded(scenario.workload.seed), make_world(scenario, Run()))
    log = DecisionLog(path, Header(**made._asdict()))
    try:
        return once(scenario, OURS, traced, log.step)
    finally:
        log.close()


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """One run flat; systems under one load by name; else every run in a list."""
    kind = {"kind": "simulate"}
    if len(results) == 1:
        return kind | results[0].as_dict()
    if len({result.system for result in results}) == len(results):
        return kind | {"systems": {result.system: result.as_dict() for result in results}}
    return kind | {"runs": [result.as_dict() for result in results]}


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
